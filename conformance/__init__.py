"""Judging KDA kernels: the rounding envelope, against which every error is measured."""

from .envelope import (
    GRADIENT_RATIO_LIMIT,
    RATIO_LIMIT,
    OperandRounding,
    Rounding,
    envelope,
    error_ratio,
    in_precision,
    rms,
    rounded_runs,
    unit_roundoff,
)

__all__ = [
    "GRADIENT_RATIO_LIMIT",
    "RATIO_LIMIT",
    "OperandRounding",
    "Rounding",
    "envelope",
    "error_ratio",
    "in_precision",
    "rms",
    "rounded_runs",
    "unit_roundoff",
]
