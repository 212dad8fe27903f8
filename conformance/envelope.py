"""How far from the truth a correct kernel may be: an envelope of rounding errors, row by row.

There is no one tolerance for KDA. The same kernel is exact to the last bit on one input and off by a thousand
roundings on another, because keys that repeat make it subtract large, nearly equal numbers. So the limit is
measured on the input at hand: the fp64 code runs again a few times with the roundings that the judged
precision allows, and the spread of those runs is what a correct result may show.

    R_s(x)   = round(s x) / s             one rounding, on a grid moved by a random s in [1, 2)
    E[row]   = max over samples of rms(sample - exact) + u rms(exact) + floor
    ratio    = rms(got - exact) / E       about 1 for a correct kernel; the limit is RATIO_LIMIT

All elements of one result share s, so equal numbers get equal errors, as on a machine: errors of repeated
keys add up instead of averaging out. A contraction also moves each element of its smaller operand by up to one
roundoff, independently: that stands for the roundings of partial sums, which do not cancel when the terms do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

RATIO_LIMIT = 4.0  # forward: correct kernels reach about 2, the mildest seeded errors 5
GRADIENT_RATIO_LIMIT = 8.0  # backward: correct kernels reach about 6
SAMPLES = 8  # rounded runs; their maximum is within a factor of two of that of many

_aten = torch.ops.aten
CONTRACTIONS = {_aten.bmm, _aten.mm, _aten.mv, _aten.dot, _aten.sum, _aten.mean, _aten.cumsum}
ARITHMETIC = {
    *(_aten.add, _aten.sub, _aten.rsub, _aten.mul, _aten.div, _aten.sigmoid, _aten.logaddexp),
    *(_aten.exp, _aten.exp2, _aten.log, _aten.log1p, _aten.sqrt, _aten.rsqrt, _aten.reciprocal),
    *(_aten._softmax, _aten._log_softmax, _aten._softmax_backward_data, _aten._log_softmax_backward_data),
}


class Rounding(TorchDispatchMode):
    """Inside this context fp64 arithmetic is rounded after every operation as if it were done in `dtype`.

    Only values move: copies, views and selections are exact. Code under it runs unchanged.
    """

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket
        if operation in CONTRACTIONS:
            args = self.jitter_smallest(args)
        result = func(*args, **(kwargs or {}))
        if operation in CONTRACTIONS or operation in ARITHMETIC:
            return self.round(result)
        return result

    def round(self, x: Tensor) -> Tensor:
        """R_s(x) with a fresh s; tensors that are not fp64 pass."""
        if x.dtype != torch.float64:
            return x
        s = self.fresh()
        moved = x * s
        return moved.copy_(moved.to(self.dtype)).div_(s)

    def fresh(self) -> float:
        """A grid's s: of fp64, since on a grid moved by a number of `dtype` powers of two would be exact."""
        return 1 + torch.rand((), dtype=torch.float64, generator=self.generator).item()

    def jitter_smallest(self, args: Sequence[Any]) -> list[Any]:
        """Move each element of the smallest fp64 operand by a relative error of at most one roundoff."""
        operands = [x for x in args if isinstance(x, Tensor) and x.dtype == torch.float64]
        if not operands:
            return list(args)
        smallest = min(operands, key=Tensor.numel)
        noise = torch.rand(smallest.shape, dtype=torch.float64, generator=self.generator)
        moved = smallest * (1 + unit_roundoff(self.dtype) * (2 * noise - 1))
        return [moved if x is smallest else x for x in args]


class OperandRounding(Rounding):
    """Inside this context the operands of fp64 contractions are rounded to `dtype`, and nothing else is.

    That is what a matrix unit does with half precision: products and sums are exact beside the rounding of what
    it reads. The envelope of such runs, with the roundoff of `dtype`, is the limit for kernels whose operands are
    fp16 or bf16 and whose sums and state are fp32.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in CONTRACTIONS:
            args = [self.round(x) if isinstance(x, Tensor) else x for x in args]
        return func(*args, **(kwargs or {}))


def rounded_runs(
    run: Callable[[], Sequence[Tensor]],
    dtype: torch.dtype = torch.float32,
    samples: int = SAMPLES,
    seed: int = 0,
    rounding: type[Rounding] = Rounding,
) -> list[list[Tensor]]:
    """Results of `run`, fp64 code, under `samples` different roundings to `dtype`: one list per result.

    Sample i is what `seed + i` gives alone. A `run` must return as many results each time: ValueError.
    """
    runs = []
    for sample in range(samples):
        with rounding(dtype, seed + sample):
            runs.append(list(run()))
    return [list(column) for column in zip(*runs, strict=True)]


def rms(x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows"]:
    """Root mean square of each row, scaled first so that squares neither overflow nor vanish."""
    top = x.abs().amax(-1, keepdim=True)
    top = torch.where((top > 0) & top.isfinite(), top, torch.ones_like(top))
    return top.squeeze(-1) * (x / top).square().mean(-1).sqrt()


def envelope(
    exact: Float[Tensor, "*rows D"],
    samples: Sequence[Float[Tensor, "*rows D"]],
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*rows"]:
    """E of the module's docstring for each row (last dimension) of a result that is stored in `dtype`."""
    if exact.numel() == 0:
        return exact.new_zeros(exact.shape[:-1])
    u = unit_roundoff(dtype)
    spread = torch.stack([rms(sample - exact) for sample in samples]).amax(0)
    return spread + u * rms(exact) + u * exact.abs().amax()


def error_ratio(
    got: Float[Tensor, "*rows D"], exact: Float[Tensor, "*rows D"], limit: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    """Each row's error over its envelope; inf where `got` is not finite; 0 where both are 0."""
    error = rms(got.double() - exact)
    error = torch.where(error.isfinite(), error, torch.full_like(error, torch.inf))
    return torch.where(error == 0, torch.zeros_like(error), error / limit)


def in_precision(limit: Tensor, of: torch.dtype, wanted: torch.dtype) -> Tensor:
    """An envelope measured for one precision, for another: rounding errors are linear in the roundoff."""
    return limit * (unit_roundoff(wanted) / unit_roundoff(of))


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to nearest: half of eps.

    >>> unit_roundoff(torch.bfloat16)
    0.00390625
    """
    return torch.finfo(dtype).eps / 2
