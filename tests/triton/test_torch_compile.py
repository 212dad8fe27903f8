"""The kernels inside torch.compile(fullgraph=True): one graph, the same numbers, pools updated."""

import pytest
import torch
from triton_inputs import DEVICE, make_call

from kimi_linear.triton_kernels.decode import decode_step
from kimi_linear.triton_kernels.recurrent import fused_recurrent_kda
from kimi_linear.triton_kernels.short_conv import causal_conv1d
from kimi_linear.triton_kernels.short_conv_update import causal_conv1d_update

# Traces, functionalises and runs; inductor would generate code besides, and on the CPU compile C++.
BACKEND = "inductor" if DEVICE == "cuda" else "aot_eager"


def compiled(function):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend=BACKEND)


def test_recurrent_kernel_compiles_into_one_graph():
    call = make_call()
    names = ("q", "k", "v", "g", "beta")

    def step(initial_state, *inputs):
        named = dict(zip(names, inputs, strict=True))
        o, ht = fused_recurrent_kda(
            **named, front_end=call["front_end"], initial_state=initial_state, output_final_state=True
        )
        return 2 * o, ht + 1

    arguments = [call["initial_state"], *(call[name] for name in names)]
    for got, want in zip(compiled(step)(*arguments), step(*arguments), strict=True):
        assert torch.equal(got, want)


def test_decode_updates_its_pool_from_inside_a_graph():
    call = make_call(B=2, T=1)
    pool = torch.stack([*call.pop("initial_state"), torch.zeros(2, 12, 20, device=DEVICE)])
    slots = torch.tensor([2, 0], device=DEVICE)
    front_end = call.pop("front_end")

    def step(state_pool, **inputs):
        o = decode_step(**inputs, front_end=front_end, state_pool=state_pool, slot_indices=slots)
        return o, state_pool.sum()

    eager, graph = pool.clone(), pool.clone()
    want, want_sum = step(eager, **call)
    got, got_sum = compiled(step)(graph, **call)
    assert torch.equal(got, want)
    assert torch.equal(graph, eager)
    assert not torch.equal(graph, pool)
    torch.testing.assert_close(got_sum, want_sum)  # inductor sums in another order


def test_convolutions_compile_into_one_graph():
    x, weight, pool = torch.randn(2, 5, 8), torch.randn(8, 4), torch.randn(2, 8, 3)
    x, weight, pool = (tensor.to(DEVICE) for tensor in (x, weight, pool))

    def prefill_then_step(x, pool):
        y, state = causal_conv1d(x, weight, output_final_state=True)
        return y, state, causal_conv1d_update(x[:, 0], pool, weight)

    eager, graph = pool.clone(), pool.clone()
    want = prefill_then_step(x, eager)
    got = compiled(prefill_then_step)(x, graph)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert torch.equal(graph, eager)


@pytest.mark.parametrize("name", ["fused_recurrent_kda", "decode_step", "causal_conv1d", "causal_conv1d_update"])
def test_operators_say_which_arguments_they_change(name):
    schema = getattr(torch.ops.kimi_linear_triton, name).default._schema
    changed = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
    pools = {"decode_step": ["state_pool"], "causal_conv1d_update": ["conv_state"]}
    assert changed == pools.get(name, [])


def test_operators_keep_the_rules_that_the_compiler_relies_on():
    call = make_call(B=1, T=2)
    tensors = [call[name] for name in ("q", "k", "v", "g", "beta")]
    arguments = (*tensors, call["initial_state"], None, True, 1.0, None, None, None, 1e-6, 0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.kimi_linear_triton.fused_recurrent_kda.default, arguments, test_utils=checks)
