"""The recurrent kernel against the definition in fp64: values, edges, memory, refusals."""

from dataclasses import replace

import pytest
import torch
from triton_inputs import DEVICE, GATES, assert_rounded_only, inside_poison, make_call, poisoned, reference

from kimi_linear.reference import FrontEnd, SoftplusGate
from kimi_linear.reference.naive import recurrent_kda
from kimi_linear.triton_kernels import support
from kimi_linear.triton_kernels.recurrent import fused_recurrent_kda

SIZES = [  # B, T, H, HV, K, V
    (2, 5, 2, 4, 12, 20),
    (1, 3, 1, 3, 60, 33),
    (1, 2, 1, 1, 100, 20),
    (1, 2, 1, 1, 256, 40),
]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_recurrent_kernel_agrees_with_the_definition(gate, sizes):
    call = make_call(*sizes, gate=gate)
    o, ht = fused_recurrent_kda(**call, output_final_state=True)
    exact_o, exact_ht = reference(**call)
    assert_rounded_only(o, exact_o, tokens=sizes[1])
    assert_rounded_only(ht, exact_ht, tokens=sizes[1])


def test_the_judge_sees_a_missing_bias():
    call = make_call()
    o, _ = fused_recurrent_kda(**call)
    gate = replace(call["front_end"].gate, dt_bias=0.999 * call["front_end"].gate.dt_bias)
    exact_o, _ = reference(**call | {"front_end": replace(call["front_end"], gate=gate)})
    with pytest.raises(AssertionError, match="row error"):
        assert_rounded_only(o, exact_o, tokens=5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_are_computed_with_in_fp32(dtype):
    call = make_call(dtype=dtype)
    o, ht = fused_recurrent_kda(**call, output_final_state=True)
    exact_o, exact_ht = reference(**call)
    assert o.dtype == dtype
    assert ht.dtype == torch.float32
    assert_rounded_only(o, exact_o, tokens=5)
    assert_rounded_only(ht, exact_ht, tokens=5)


def test_raw_gates_and_betas_may_be_fp32_beside_half_inputs():
    call = make_call(dtype=torch.float16)
    call |= {"g": call["g"].float(), "beta": call["beta"].float()}
    o, _ = fused_recurrent_kda(**call)
    assert_rounded_only(o, reference(**call)[0], tokens=5)


def test_integers_come_out_bit_for_bit():
    draw = torch.Generator().manual_seed(0)
    B, T, H, HV, K, V = 1, 6, 1, 2, 12, 20

    def small(*shape):
        return torch.randint(-2, 3, shape, generator=draw).float()

    call = {"q": small(B, T, H, K), "k": small(B, T, H, K), "v": small(B, T, HV, V)}
    call |= {"beta": small(B, T, HV).abs(), "initial_state": small(B, HV, K, V)}
    forgotten = torch.rand(B, T, HV, K, generator=draw) < 0.2
    call["g"] = torch.where(forgotten, -torch.inf, 0.0)
    naive = recurrent_kda(**call, scale=1.0, output_final_state=True)
    call = {name: x.to(DEVICE) for name, x in call.items()}
    kernel = fused_recurrent_kda(**call, scale=1.0, output_final_state=True)
    assert naive[1].abs().max() < 2**24, "not exact in fp32"
    for got, want in zip(kernel, naive, strict=True):
        assert torch.equal(got.cpu(), want)
        assert want.abs().max() > 10


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
@pytest.mark.parametrize("transposed", [False, True])
def test_memory_around_the_inputs_does_not_matter_and_inputs_stay_as_they_are(poison, transposed):
    call = make_call(K=12, V=20)
    clean = fused_recurrent_kda(**call, output_final_state=True)
    sliced = poisoned(call, poison, transposed=transposed)
    assert not sliced["q"].is_contiguous()
    around = fused_recurrent_kda(**sliced, output_final_state=True)
    for got, want, exact in zip(around, clean, reference(**call), strict=True):
        assert_rounded_only(got, exact, tokens=5)
        # A GPU gives each thread what it can load at once, and sums in that order.
        assert torch.equal(got, want) or DEVICE == "cuda"
    for name in ("q", "k", "v", "g", "beta", "initial_state"):
        assert torch.equal(sliced[name], call[name])


def test_packed_segments_are_as_if_alone_and_rows_past_them_are_0():
    offsets = [0, 0, 3, 4, 4, 9]
    call = make_call(B=1, T=11, N=5)
    cu_seqlens = torch.tensor(offsets, device=DEVICE)
    o, ht = fused_recurrent_kda(**call, output_final_state=True, cu_seqlens=cu_seqlens)
    for n in range(5):
        tokens = slice(offsets[n], offsets[n + 1])
        alone = {name: call[name][:, tokens] for name in ("q", "k", "v", "g", "beta")}
        alone |= {"front_end": call["front_end"], "initial_state": call["initial_state"][n : n + 1]}
        o_n, ht_n = fused_recurrent_kda(**alone, output_final_state=True)
        assert torch.equal(o[:, tokens], o_n)
        assert torch.equal(ht[n : n + 1], ht_n)
    assert torch.equal(ht[0], call["initial_state"][0]), "an empty segment passes its state through"
    assert torch.equal(o[:, 9:], torch.zeros_like(o[:, 9:]))


def test_a_segment_does_not_see_nan_in_its_neighbours_or_past_the_end():
    call = make_call(B=1, T=9, N=3)
    cu_seqlens = torch.tensor([0, 3, 6, 8], dtype=torch.int32, device=DEVICE)
    clean, _ = fused_recurrent_kda(**call, cu_seqlens=cu_seqlens)
    for name in ("q", "k", "v", "g", "beta"):
        call[name] = call[name].clone()
        call[name][:, 3:6] = call[name][:, 8:] = float("nan")
    call["initial_state"] = call["initial_state"].clone()
    call["initial_state"][1] = float("nan")
    dirty, _ = fused_recurrent_kda(**call, cu_seqlens=cu_seqlens)
    kept = [0, 1, 2, 6, 7, 8]
    assert torch.equal(dirty[:, kept], clean[:, kept])
    assert dirty[:, 3:6].isnan().all()


def test_no_tokens_return_the_initial_state():
    call = make_call(T=0)
    o, ht = fused_recurrent_kda(**call, output_final_state=True)
    assert o.shape == (2, 0, 2, 20)
    assert torch.equal(ht, call["initial_state"])


def test_without_a_state_it_starts_from_0_and_returns_none():
    call = make_call()
    call["initial_state"] = None
    o, ht = fused_recurrent_kda(**call)
    assert ht is None
    assert_rounded_only(o, reference(**call)[0], tokens=5)


def test_minus_infinity_forgets_everything():
    call = make_call(gate="given", T=1)
    call["g"] = torch.full_like(call["g"], -torch.inf)
    o, ht = fused_recurrent_kda(**call, output_final_state=True)
    fresh = fused_recurrent_kda(**call | {"initial_state": None}, output_final_state=True)
    assert torch.equal(o, fresh[0])
    assert torch.equal(ht, fresh[1])
    assert ht.abs().max() > 0


def test_softplus_is_exact_where_the_plain_logarithm_is_0():
    """softplus(-25) is 1.4e-11, and log(1 + exp(-25)) is 0 in fp32; a fast head makes it visible."""
    call = make_call(T=1, HV=1)
    call["g"] = torch.full_like(call["g"], -25.0)
    A_log, dt_bias = torch.full((1,), 22.0, device=DEVICE), torch.zeros(1, 12, device=DEVICE)
    call["front_end"] = FrontEnd(SoftplusGate(A_log, dt_bias))
    _, ht = fused_recurrent_kda(**call, output_final_state=True)
    exact = reference(**call)[1]
    assert (exact / call["initial_state"].cpu() - 1).abs().median() > 0.01, "no decay to see"
    assert_rounded_only(ht, exact, tokens=1)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, about lanes past K
def test_a_huge_rate_times_no_softplus_is_no_nan():
    call = make_call(T=2)
    call["g"] = torch.full_like(call["g"], -200.0)
    A_log, dt_bias = torch.full((2,), 90.0, device=DEVICE), torch.zeros(2, 12, device=DEVICE)
    call["front_end"] = FrontEnd(SoftplusGate(A_log, dt_bias))
    o, _ = fused_recurrent_kda(**call)
    assert o.isfinite().all()
    assert o.abs().max() > 0


def test_reruns_give_the_same_bits():
    call = make_call()
    first, second = (fused_recurrent_kda(**call, output_final_state=True) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_later_tokens_do_not_change_earlier_outputs():
    call = make_call(T=4)
    prefix = call | {name: call[name][:, :2] for name in ("q", "k", "v", "g", "beta")}
    assert torch.equal(fused_recurrent_kda(**call)[0][:, :2], fused_recurrent_kda(**prefix)[0])


def test_fp64_is_refused_by_name():
    call = make_call()
    fp64 = {name: call[name].double() for name in ("q", "k", "v", "g", "beta")}
    with pytest.raises(
        TypeError, match=r"q must be float16, bfloat16 or float32 .* got torch.float64; the reference"
    ):
        fused_recurrent_kda(**fp64)


def test_too_many_key_channels_are_refused_by_name():
    call = make_call(T=1, K=257)
    with pytest.raises(ValueError, match="K <= 256 in fused_recurrent_kda; got K=257"):
        fused_recurrent_kda(**call)


def test_cpu_tensors_without_the_interpreter_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(support, "INTERPRETED", False)
    call = {name: make_call()[name].cpu() for name in ("q", "k", "v", "g", "beta")}
    with pytest.raises(ValueError, match=r"q must be on a GPU .* TRITON_INTERPRET=1"):
        fused_recurrent_kda(**call)


def test_a_lost_gradient_is_refused_by_name():
    call = make_call()
    call["k"].requires_grad_()
    with pytest.raises(RuntimeError, match=r"no backward, .* use chunk_kda"):
        fused_recurrent_kda(**call)
    with torch.no_grad():
        fused_recurrent_kda(**call)


def test_a_wrong_shape_is_refused_as_in_the_contract():
    call = make_call()
    call["v"] = inside_poison(call["v"], 0.0)[:, :, :1]
    with pytest.raises(ValueError, match="g must be"):
        fused_recurrent_kda(**call)
