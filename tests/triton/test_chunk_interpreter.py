"""`chunk_kda` of the Triton tier, run by Triton's interpreter on the CPU (fp32 and fp16: it has no bf16).

The kernels must be imported with TRITON_INTERPRET=1, and cannot be compiled in the same process.
"""

import pytest
import torch

pytest.importorskip("triton")

from kimi_linear.reference.front_end import FrontEnd
from kimi_linear.reference.gates import BoundedGate, SoftplusGate
from kimi_linear.reference.naive import recurrent_kda
from kimi_linear.triton_kernels import support
from kimi_linear.triton_kernels.chunk import chunk_kda

if not support.INTERPRETED or torch.cuda.is_available():
    pytest.skip("runs kernels on CPU tensors: needs TRITON_INTERPRET=1 and no GPU", allow_module_level=True)

ROUNDINGS = 16  # of one operand, that a row's error may amount to: sums are fp32, operands the input's dtype


def inputs(T, H=1, HV=2, K=20, V=12, B=1, dtype=torch.float32, seed=0):
    """q, k, v, g, beta, each cut out of a larger buffer full of NaN."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        buffer = torch.full((*shape[:-1], shape[-1] + 3), float("nan"), dtype=dtype)
        buffer[..., : shape[-1]] = torch.randn(shape, generator=generator).to(dtype)
        return buffer[..., : shape[-1]]

    q, k, v, g, beta = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, HV, V), draw(B, T, HV, K), draw(B, T, HV)
    g.copy_(-g.abs())
    return q, k, v, g, beta


def front_end(kind, HV, K):
    generator = torch.Generator().manual_seed(1)
    A_log, dt_bias = torch.rand(HV, generator=generator), torch.randn(HV, K, generator=generator)
    gates = {"softplus": SoftplusGate, "bounded": BoundedGate}
    return FrontEnd(gate=gates[kind](A_log, dt_bias) if kind in gates else None)


def in_fp64(args, fe, **options):
    gate = fe.gate and type(fe.gate)(fe.gate.A_log.double(), fe.gate.dt_bias.double())
    options = {n: x.double() if n == "initial_state" else x for n, x in options.items()}
    return recurrent_kda(*(x.double() for x in args), front_end=FrontEnd(gate=gate), **options)


def assert_rows_close(got, want, dtype):
    error = (got.double() - want).norm(dim=-1)
    assert bool((error <= ROUNDINGS * torch.finfo(dtype).eps * want.norm(dim=-1).clamp_min(want.std())).all())


@pytest.mark.parametrize("kind", ["softplus", "bounded", "given"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_chunk_agrees_with_the_recurrence_in_fp64(kind, dtype):
    args, fe = inputs(T=70, dtype=dtype), front_end(kind, 2, 20)
    state = torch.randn(1, 2, 20, 12)
    o, final = chunk_kda(*args, front_end=fe, initial_state=state, output_final_state=True)
    want_o, want_final = in_fp64(args, fe, initial_state=state, output_final_state=True)
    assert_rows_close(o, want_o, dtype)
    assert_rows_close(final, want_final, dtype)


def test_chunk_takes_any_gate():
    q, k, v, g, beta = inputs(T=70)
    draw = torch.rand(g.shape)
    g = g.masked_fill(draw < 0.2, -torch.inf).masked_fill(draw > 0.8, -1000.0)
    fe = front_end("given", 2, 20)
    o, _ = chunk_kda(q, k, v, g, beta, front_end=fe)
    assert_rows_close(o, in_fp64((q, k, v, g, beta), fe)[0], torch.float32)


def test_chunk_packs_segments_and_zeroes_rows_after_the_last():
    args, fe = inputs(T=90), front_end("softplus", 2, 20)
    offsets = torch.tensor([0, 0, 5, 70, 70, 77])
    state = torch.randn(5, 2, 20, 12)
    options = {"initial_state": state, "output_final_state": True, "cu_seqlens": offsets}
    o, final = chunk_kda(*args, front_end=fe, **options)
    want_o, want_final = in_fp64(args, fe, **options)
    assert_rows_close(o[:, :77], want_o[:, :77], torch.float32)
    assert_rows_close(final, want_final, torch.float32)
    assert torch.equal(o[:, 77:], torch.zeros_like(o[:, 77:]))
    assert torch.equal(final[0], state[0])  # an empty segment passes its state through


def test_chunk_output_ignores_future_tokens():
    args, fe = inputs(T=70), front_end("softplus", 2, 20)
    o, _ = chunk_kda(*args, front_end=fe)
    later = [x.clone() for x in args]
    for x in later:
        x[:, 37:] = torch.randn_like(x[:, 37:])
    changed, _ = chunk_kda(*later, front_end=fe)
    assert torch.equal(o[:, :37], changed[:, :37])
    assert not torch.equal(o[:, 37:], changed[:, 37:])


def test_a_segment_never_sees_its_neighbours():
    args, fe = inputs(T=60), front_end("bounded", 2, 20)
    offsets = torch.tensor([0, 13, 40, 50])
    o, _ = chunk_kda(*args, front_end=fe, cu_seqlens=offsets)
    poisoned = [x.clone() for x in args]
    for x in poisoned:
        x[:, :13] = x[:, 40:] = torch.nan
    beside, _ = chunk_kda(*poisoned, front_end=fe, cu_seqlens=offsets)
    assert torch.equal(o[:, 13:40], beside[:, 13:40])
    assert bool(beside[:, :13].isnan().any())


def test_chunk_compiles_to_one_graph():
    args, fe = inputs(T=20), front_end("softplus", 2, 20)

    def call(*args):
        return chunk_kda(*args, front_end=fe, output_final_state=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*args), call(*args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"T": 1, "K": 257}, "K <= 256 in chunk_kda; got K=257"),
        ({"T": 1, "V": 257}, "V <= 256 in chunk_kda; got V=257"),
    ],
)
def test_too_many_channels_are_refused_by_name(sizes, message):
    with pytest.raises(ValueError, match=message):
        chunk_kda(*inputs(**sizes))


def test_fp64_is_refused_by_name():
    with pytest.raises(TypeError, match=r"q must be float16, bfloat16 or float32 in chunk_kda; got torch.float64"):
        chunk_kda(*inputs(T=1, dtype=torch.float64))


def test_cpu_tensors_without_the_interpreter_are_refused_even_when_the_call_passed_before(monkeypatch):
    args = inputs(T=1)
    chunk_kda(*args)
    monkeypatch.setattr(support, "INTERPRETED", False)
    with pytest.raises(ValueError, match=r"q must be on a GPU in chunk_kda; got cpu"):
        chunk_kda(*args)


@pytest.mark.parametrize("name", ["k", "dt_bias"])
def test_a_lost_gradient_is_refused_by_name(name):
    args, fe = inputs(T=1), front_end("softplus", 2, 20)
    tensor = args[1].requires_grad_() if name == "k" else fe.gate.dt_bias.requires_grad_()
    with pytest.raises(RuntimeError, match="chunk_kda has no backward"):
        chunk_kda(*args, front_end=fe)
    with torch.no_grad():
        chunk_kda(*args, front_end=fe)
    assert tensor.grad is None


def test_a_check_that_passed_once_still_fails_for_what_differs():
    q, k, v, g, beta = inputs(T=5)
    chunk_kda(q, k, v, g, beta, scale=1)
    for scale in (True, "1", float("nan")):
        with pytest.raises((TypeError, ValueError), match="scale must be"):
            chunk_kda(q, k, v, g, beta, scale=scale)
    with pytest.raises(TypeError, match="v must be the dtype of q"):
        chunk_kda(q, k, v.double(), g, beta, scale=1)
    with pytest.raises(ValueError, match=r"g must be \[B, T, HV, K\]"):
        chunk_kda(q, k, v, g[:, :4], beta, scale=1)
    with pytest.raises(TypeError, match=r"k must be a torch\.Tensor"):
        chunk_kda(q, k.tolist(), v, g, beta, scale=1)
    with pytest.raises(TypeError, match="front_end must be a FrontEnd or None"):
        chunk_kda(q, k, v, g, beta, scale=1, front_end="softplus")
