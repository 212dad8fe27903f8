"""How tests compare: exactly, or against the rounding envelope of the case at hand."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kimi_linear.conformance import (
    GRADIENT_RATIO_LIMIT,
    RATIO_LIMIT,
    envelope,
    error_ratio,
    in_precision,
    rounded_runs,
)


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    """Equal values, dtype and shape; +0 and -0 are one value, as they are in the sums that follow."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    different = ~((got == want) | (got.isnan() & want.isnan()))
    assert not different.any(), f"{int(different.sum())} of {got.numel()} differ, first at {first_index(different)}"


def assert_within_envelope(
    got: Sequence[Tensor],
    exact: Sequence[Tensor],
    bounds: Sequence[Tensor],
    gradients: bool = False,
) -> float:
    """Every row of `got` is within its bound, or the bound's fp64 counterpart if it is in fp64.

    Returns the worst ratio.
    """
    limit = GRADIENT_RATIO_LIMIT if gradients else RATIO_LIMIT
    worst = 0.0
    for number, (mine, truth, bound) in enumerate(zip(got, exact, bounds, strict=True)):
        assert mine.shape == truth.shape
        ratio = error_ratio(mine, truth, in_precision(bound, torch.float32, mine.dtype))
        if ratio.numel() == 0:
            continue
        worst = max(worst, ratio.max().item())
        assert worst <= limit, (
            f"result {number}: ratio {worst:.3g} > {limit} at row {first_index(ratio == ratio.max())}"
        )
    return worst


def bounds_of(exact: Sequence[Tensor], *forms: Callable[[], Sequence[Tensor]]) -> list[Tensor]:
    """fp32 envelopes of results: the rounding errors that any of the `forms`, fp64 code, shows."""
    by_form = zip(*(rounded_runs(form) for form in forms), strict=True)
    columns = [[sample for runs in column for sample in runs] for column in by_form]
    return [envelope(truth, samples) for truth, samples in zip(exact, columns, strict=True)]


def first_index(mask: Tensor) -> list[int]:
    return mask.nonzero()[0].tolist()
