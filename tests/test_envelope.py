"""The judge of the other tests: it accepts what is correct, and rejects what is not by much."""

import dataclasses

import pytest
import torch
from test_exact import LONG

from cases import draw_inputs
from judge import assert_within_envelope, bounds_of
from kimi_linear.conformance import (
    RATIO_LIMIT,
    OperandRounding,
    Rounding,
    envelope,
    error_ratio,
    rms,
    rounded_runs,
    unit_roundoff,
)
from kimi_linear.conformance.envelope import SAMPLES, in_precision
from kimi_linear.reference.chunked import chunk_kda
from kimi_linear.reference.naive import recurrent_kda


def test_rounding_leaves_fp64_results_on_a_moved_fp32_grid():
    x = torch.rand(1000, dtype=torch.float64)
    with Rounding(torch.float32, seed=0):
        y = x * 1
        view = y[10:20].reshape(2, 5)
    error = (y - x).abs() / x
    assert 0 < error.max() <= 2**-24
    assert torch.equal(view.flatten(), y[10:20])


def test_equal_numbers_get_equal_errors():
    x = torch.full((50,), 1 / 3, dtype=torch.float64)
    with Rounding(torch.float32, seed=0):
        y = x * 1
    assert y.unique().numel() == 1
    assert y[0] != x[0]


def test_a_rounding_is_to_nearest_on_a_grid_moved_by_one_to_two():
    x = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    s = Rounding(torch.float32, seed=3).fresh()
    assert torch.equal(Rounding(torch.float32, seed=3).round(x), (x * s).float().double() / s)
    one = Rounding(torch.float32, seed=0)
    draws = torch.tensor([one.fresh() for _ in range(200)])
    assert 1 <= draws.min() < 1.05
    assert 1.95 < draws.max() < 2


def test_a_power_of_two_is_rounded_though_a_plain_grid_has_it():
    with Rounding(torch.float32, seed=0):
        y = torch.ones(1, dtype=torch.float64) * 1
    assert 0 < (y - 1).abs() <= 2**-24


def test_an_operation_keeps_its_options_and_numbers_that_are_not_fp64_stay():
    x, whole = torch.full((2, 3), 1 / 3, dtype=torch.float64), torch.arange(6).reshape(2, 3)
    with Rounding(torch.float32, seed=0):
        total, rows, count = torch.add(x, x, alpha=-3), x.sum(1, keepdim=True), whole.sum(1)
    torch.testing.assert_close(total, -2 * x, rtol=2**-23, atol=0)
    torch.testing.assert_close(rows, torch.ones(2, 1, dtype=torch.float64), rtol=2**-22, atol=0)
    assert count.tolist() == [3, 12]


def test_a_contraction_is_charged_for_terms_that_cancel():
    x = torch.tensor([[1.0, 1e4, -1e4]], dtype=torch.float64)
    ones = torch.ones(3, 1, dtype=torch.float64) / 3
    runs = rounded_runs(lambda: [x @ ones])[0]
    assert max((run - x @ ones).abs().item() for run in runs) > 1e4 * 2**-26


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_element_of_the_smaller_operand_moves_on_its_own_by_up_to_a_roundoff_either_way(dtype):
    large, small = torch.ones(300, 10, dtype=torch.float64), torch.ones(2000, dtype=torch.float64)
    kept, moved = Rounding(dtype, seed=0).jitter_smallest([large, small])
    assert torch.equal(kept, large)
    error = (moved - 1) / unit_roundoff(dtype)
    assert error.unique().numel() > 1900
    assert -1 <= error.min() < -0.99
    assert 0.99 < error.max() <= 1
    assert error.mean().abs() < 0.05


@pytest.mark.parametrize("operation", [torch.mul, torch.dot])
def test_samples_differ_and_repeat_with_the_seed(operation):
    x = torch.rand(5, dtype=torch.float64)
    first, again, other = (rounded_runs(lambda: [operation(x, x)], seed=s)[0] for s in (0, 0, 100))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


def test_a_sample_can_be_run_again_alone():
    x = torch.rand(5, dtype=torch.float64)
    several, alone = rounded_runs(lambda: [x * x])[0], rounded_runs(lambda: [x * x], samples=1, seed=5)[0]
    assert len(several) == SAMPLES
    assert torch.equal(several[5], alone[0])


def test_runs_with_more_or_fewer_results_than_the_first_are_refused():
    returns = iter(([torch.ones(2)], [torch.ones(2)] * 2))
    with pytest.raises(ValueError, match="zip"):
        rounded_runs(lambda: next(returns), samples=2)


@pytest.mark.parametrize("slip", ["gate", "beta", "state", "k"])
def test_one_tensor_kept_in_bf16_is_rejected_in_fp32(slip):
    x = draw_inputs(dataclasses.replace(LONG, keys="random"))
    exact = x.call(recurrent_kda)
    bounds = bounds_of(exact, lambda: x.call(recurrent_kda))
    field = {"gate": "g", "beta": "beta", "state": "h0", "k": "k"}[slip]
    rounded = dataclasses.replace(x, **{field: getattr(x, field).bfloat16().double()})
    with pytest.raises(AssertionError, match="ratio"):
        assert_within_envelope(rounded.to(torch.float32).call(recurrent_kda), exact, bounds)


def test_an_error_in_one_row_is_found_though_the_rest_is_exact():
    x = draw_inputs(LONG)
    exact = x.call(recurrent_kda)
    bounds = bounds_of(exact, lambda: x.call(recurrent_kda))
    o, S = x.to(torch.float32).call(recurrent_kda)
    o[1, 60, 2] *= 1.001
    with pytest.raises(AssertionError, match=r"result 0: .* at row \[1, 60, 2\]"):
        assert_within_envelope((o, S), exact, bounds)


def test_a_ratio_of_what_is_not_finite_is_infinite_and_of_an_exact_zero_is_zero():
    exact = torch.zeros(3, 4, dtype=torch.float64)
    limit = envelope(exact, [exact])
    assert error_ratio(exact, exact, limit).tolist() == [0, 0, 0]
    got = exact.clone()
    got[0, 0], got[1, 0] = torch.nan, torch.inf
    assert error_ratio(got, exact, limit).tolist() == [torch.inf, torch.inf, 0]


def test_an_envelope_is_the_widest_spread_of_a_row_and_two_roundings():
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.3, 0.4]], dtype=torch.float64)
    near, far = exact + 0.1, exact + torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, 0.2]], dtype=torch.float64)
    u = 2**-8
    want = [0.5**0.5 + u * 12.5**0.5 + u * 4, 0.1 + u * 4, 0.02**0.5 + u * 0.125**0.5 + u * 4]
    assert envelope(exact, [near, far], torch.bfloat16).tolist() == pytest.approx(want, rel=1e-12)
    assert envelope(exact[None, :0], []).shape == (1, 0)
    one = torch.full((1, 1), 2.0, dtype=torch.float64)
    assert envelope(one, [one + 1], torch.bfloat16).tolist() == pytest.approx([1 + 4 * u])


def test_an_envelope_for_another_precision_is_scaled_by_their_roundoffs():
    limit = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert in_precision(limit, torch.float32, torch.bfloat16).tolist() == [2.0**16, 3 * 2.0**16]


def test_rms_neither_overflows_nor_vanishes():
    x = torch.tensor([[3e200, 4e200], [3e-200, 4e-200], [0.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(rms(x), torch.tensor([5e200, 5e-200, 0], dtype=torch.float64) / 2**0.5, rtol=1e-14, atol=0)


def test_unit_roundoff_is_half_an_ulp_of_one():
    assert unit_roundoff(torch.float32) == 2**-24
    assert unit_roundoff(torch.bfloat16) == 2**-8


def test_operand_rounding_rounds_what_a_product_reads_and_nothing_else():
    x = torch.full((1, 4), 1 + 2**-9, dtype=torch.float64)
    y = torch.full((4, 1), 1.0, dtype=torch.float64)
    with OperandRounding(torch.bfloat16, seed=0):
        product, total, exponential = x @ y, x + x, x.exp()
    assert torch.equal(total, 2 * x)
    assert torch.equal(exponential, torch.tensor(x[0, 0].item(), dtype=torch.float64).exp().expand(1, 4))
    error = (product / (x @ y) - 1).abs().item()
    assert 0 < error <= 2.1 * unit_roundoff(torch.bfloat16)


def test_half_precision_operands_stay_inside_their_envelope_and_fp8_ones_do_not():
    x = draw_inputs(LONG).to(torch.bfloat16).to(torch.float64)
    exact = x.call(recurrent_kda)
    runs = rounded_runs(lambda: x.call(chunk_kda), torch.bfloat16, 4, rounding=OperandRounding)
    limits = [envelope(truth, samples, torch.bfloat16) for truth, samples in zip(exact, runs, strict=True)]
    for dtype, inside in ((torch.bfloat16, True), (torch.float8_e4m3fn, False)):
        with OperandRounding(dtype, seed=100):
            got = x.call(chunk_kda)
        worst = max(error_ratio(*of).max().item() for of in zip(got, exact, limits, strict=True))
        assert (worst <= RATIO_LIMIT) == inside, f"{dtype}: {worst}"
