"""A line of `kimi-linear verify`: what is run, on what, and how far from the truth it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..conformance import error_ratio, rms

Operator = Callable[..., Any]  # returns a tuple of tensors


@dataclass(frozen=True)
class Tier:
    """An implementation: its forward, its adjoint, and the dtype it is run in."""

    name: str
    forward: Operator
    backward: Operator
    dtype: torch.dtype


@dataclass(frozen=True)
class VerifyCase:
    """One input. `gradients` judges the adjoint instead of the outputs; `exact` allows no error."""

    name: str
    inputs: tuple[Tensor, ...]  # q, k, v, g, beta in fp64, all of them values of fp32
    options: dict[str, Any] = field(default_factory=dict)
    gradients: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Row:
    """One line of the table. Errors are relative to the result's rms, at the row nearest its limit.

    A row that cannot be judged here holds, and `skipped` says why.
    """

    case: str
    tier: str
    error: float
    limit: float
    ok: bool
    skipped: str = ""


def line(*fields: str) -> str:
    """Fields in the columns of the table: case, tier, error, limit, and whether it holds."""
    return "  ".join((f"{fields[0]:<25}", f"{fields[1]:<24}", *(f"{field:>8}" for field in fields[2:4]), *fields[4:]))


def judge(case: str, tier: str, results: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Row:
    """The row of the results (got, truth, limit by row of channels) that comes nearest its limit."""
    worst = Row(case, tier, 0.0, 0.0, ok=True)
    worst_ratio = -1.0
    for got, truth, limit in results:
        ratio = error_ratio(got, truth, limit).flatten()
        at = int(ratio.argmax())
        if ratio[at] > worst_ratio:
            worst_ratio = ratio[at].item()
            size = truth.square().mean().sqrt()
            error = (rms(got.to(torch.float64) - truth).flatten()[at] / size).item()
            worst = Row(case, tier, error, (limit.flatten()[at] / size).item(), worst_ratio <= 1)
    return worst
