"""Number formats by name, and rounding to them: tf32 is no dtype of torch, but kernels compute in it.

to_format(x, f)     the nearest number of format f, in x's own dtype; gradients pass straight through
moved_grid(x, f, s) to_format(s x) / s: the same rounding on a grid moved by s, for envelopes
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MANTISSA = {"fp64": 53, "fp32": 24, "tf32": 11, "fp16": 11, "bf16": 8}  # bits, the implicit one included
LARGEST = {"fp64": 1.7e308, "fp32": 3.4e38, "tf32": 3.4e38, "fp16": 65504.0, "bf16": 3.3e38}


def roundoff(name: str) -> float:
    """The largest relative error of one rounding to nearest."""
    return 2.0 ** -MANTISSA[name]


def to_format(x: Tensor, name: str) -> Tensor:
    """x rounded to a format, in x's dtype; the gradient is that of x itself, rounded to the format too."""
    if name == "tf32":
        moved = _short_mantissa(x.detach()) - x.detach()
        return x + torch.where(x.detach().isfinite(), moved, torch.zeros_like(moved))
    return x.to(DTYPES[name]).to(x.dtype)


def moved_grid(x: Tensor, name: str, s: float) -> Tensor:
    """x rounded to a format on a grid moved by s in [1, 2): equal numbers get equal errors."""
    return to_format(x * s, name) / s


def _short_mantissa(x: Tensor) -> Tensor:
    """x with 11 significant bits, ties to even; non-finite numbers stay."""
    mantissa, exponent = torch.frexp(x)
    rounded = torch.ldexp(torch.round(mantissa * 2.0**11), exponent - 11)
    return torch.where(x.isfinite(), rounded, x)
