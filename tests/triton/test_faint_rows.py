"""bf16 tiles: one product from the middle, but for rows that some channel reaches too faint; those go by halving.

Without a GPU the kernels run in the interpreter, with the bf16 of a GPU.
"""

from contextlib import nullcontext
from math import inf, log

import pytest
import torch
import triton.language as tl
from scripts import FINDINGS, load_script
from test_exact import integer_inputs
from triton_inputs import DEVICE

from judge import assert_same_bits
from kimi_linear.conformance import RATIO_LIMIT, OperandRounding, envelope, error_ratio
from kimi_linear.reference.chunked import chunk_kda as reference_chunk_kda
from kimi_linear.reference.naive import recurrent_kda
from kimi_linear.triton_kernels import chunk_kda, chunk_products, chunk_slices, chunk_tiles

T, H, HV, K, V = 29, 1, 2, 20, 12
OCTAVE = log(2)
SAMPLES = 4
on_gpu = torch.cuda.is_available()
plants = pytest.mark.skipif(on_gpu, reason="plants a bug in a kernel, which a compiled one would not see")


@pytest.fixture(autouse=True)
def _bf16():
    with nullcontext() if on_gpu else load_script(FINDINGS / "own_kernels.py").as_on_a_gpu():
        yield


def mild_inputs():
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, *shape, generator=rng) for shape in ((H, K), (H, K), (HV, V)))
    k = torch.nn.functional.normalize(k, dim=-1)
    g = -0.1 * torch.rand(1, T, HV, K, generator=rng)
    beta = torch.rand(1, T, HV, generator=rng)
    return [x.to(DEVICE) for x in (q.bfloat16(), k.bfloat16(), v.bfloat16(), g, beta.bfloat16())]


def fading_inputs():
    """Channels that fade for good in the middle of a tile and are used again after it."""
    x = mild_inputs()
    g = x[3]
    g[:, 5:9, :, 3:8] = -100 * OCTAVE
    g[:, 6, :, 9] = -inf
    for channel, octaves in ((10, 116.0), (11, 115.999), (12, 116.001)):
        g[:, 16:24, :, channel] = -octaves / 8 * OCTAVE
    g[:, 16, :, 2] = -inf
    return x


def error_ratios(x):
    state = torch.randn(1, HV, K, V, generator=torch.Generator().manual_seed(1))
    exact = [y.cpu().double() for y in x]
    options = {"initial_state": state.double(), "output_final_state": True}
    truth = recurrent_kda(*exact, **options)
    samples = []
    for seed in range(SAMPLES):
        with OperandRounding(torch.bfloat16, seed):
            samples.append(reference_chunk_kda(*exact, **options))
    got = chunk_kda(*x, initial_state=state.to(DEVICE), output_final_state=True)
    return [
        error_ratio(mine.cpu(), want, envelope(want, drawn, torch.bfloat16)).max().item()
        for mine, want, *drawn in zip(got, truth, *samples, strict=True)
    ]


def test_faint_rows_are_as_right_as_others():
    assert max(error_ratios(mild_inputs())) <= RATIO_LIMIT
    assert max(error_ratios(fading_inputs())) <= RATIO_LIMIT


@plants
def test_faint_rows_from_the_middle_would_be_wrong(monkeypatch):
    monkeypatch.setattr(chunk_tiles, "redo_faint_rows", lambda A, Aqk, *_: (A, Aqk))
    assert max(error_ratios(mild_inputs())) <= RATIO_LIMIT
    assert not max(error_ratios(fading_inputs())) <= RATIO_LIMIT


def outputs_before_and_after(x, t, gate):
    """o before t, and from t on, where the gates are as they were, and where some are `gate` from t on."""
    changed = [y.clone() for y in x]
    changed[3][:, t:, :, :15] = gate
    outputs = chunk_kda(*x)[0], chunk_kda(*changed)[0]
    return [o[:, :t] for o in outputs], [o[:, t:] for o in outputs]


@pytest.mark.parametrize(
    ("inputs", "t", "gate"),
    [
        (mild_inputs, 11, -inf),
        (mild_inputs, 1, -60 * OCTAVE),
        (fading_inputs, 11, -inf),
        (fading_inputs, 23, -60 * OCTAVE),
    ],
)
def test_outputs_do_not_see_that_a_later_token_fades_the_tile(inputs, gate, t):
    before, after = outputs_before_and_after(inputs(), t, gate)
    assert_same_bits(*before)
    assert not torch.equal(*after)


@plants
def test_a_later_token_would_be_seen_if_the_whole_tile_decided(monkeypatch):
    def of_whole_tile(g):
        total = tl.min(tl.sum(g, axis=0), axis=0)
        return tl.zeros([g.shape[0]], tl.float32) + total < chunk_products.FAINT

    monkeypatch.setattr(chunk_slices, "faint_rows", of_whole_tile)
    before, _ = outputs_before_and_after(mild_inputs(), 11, -inf)
    assert not torch.equal(*before)


def of_integers_without_decay():
    """o and the final state, and what they are exactly."""
    x = integer_inputs(1, B=1, T=40, H=1).to(torch.bfloat16)
    inputs, state = [y.to(DEVICE) for y in x.args], x.h0.to(DEVICE)
    inputs[3].zero_()
    options = {"scale": 0.5, "initial_state": state, "output_final_state": True}
    return chunk_kda(*inputs, **options), recurrent_kda(*inputs, **options)


def test_a_decay_of_1_rounds_nothing():
    got, want = of_integers_without_decay()
    assert want[0].abs().max() > 1
    for mine, theirs in zip(got, want, strict=True):
        assert_same_bits(mine, theirs)


@plants
def test_a_decay_of_1_would_round_from_a_middle_between_whole_numbers(monkeypatch):
    monkeypatch.setattr(chunk_products, "MIDDLE", tl.constexpr(-57.5))
    monkeypatch.setattr(chunk_tiles, "AT_MIDDLE", tl.constexpr(2.0**-57.5))
    (o, _), (want, _) = of_integers_without_decay()
    assert not torch.equal(o, want)


def test_a_state_that_only_decays_keeps_its_fp32():
    """Nothing is written: what is left of the state is exp of a sum of gates, which no middle has rounded."""
    x = mild_inputs()
    x[4].zero_()
    state = torch.randn(1, HV, K, V, generator=torch.Generator().manual_seed(1))
    _, left = chunk_kda(*x, initial_state=state.to(DEVICE), output_final_state=True)
    exact = state.double() * x[3].cpu().double().sum(1).exp()[..., None]
    assert ((left.cpu() - exact) / exact).abs().max() < 8 * 2.0**-24
