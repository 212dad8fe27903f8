"""Arithmetic modulo a prime for code that was written for floats: no rounding, so one wrong index shows.

Inside `Modular()` int64 tensors are residues. Sums and products are reduced after every operation, and
exp(g) is GENERATOR ** g: a gate is an exponent, its decay a power. exp(g + h) = exp(g) exp(h) holds, which is
all that the derivation of the chunk form uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRIME = 5 * 2**25 + 1  # below 2 ** 27.4: a sum of 300 products stays below 2 ** 63
GENERATOR = 3
EXPONENT_BITS = 16  # of sums of gates

_aten = torch.ops.aten
_REDUCED = {_aten.add, _aten.sub, _aten.mul, _aten.neg, _aten.bmm, _aten.mm, _aten.sum}


class Modular(TorchDispatchMode):
    """Inside this context int64 arithmetic is modulo PRIME. Raises AssertionError where code leaves the integers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket
        if operation is _aten.exp:
            return power_of_generator(args[0])
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor):
            return result
        assert not result.is_floating_point(), f"{func} left the integers"
        return result.remainder(PRIME) if operation in _REDUCED else result


def power_of_generator(exponent: Tensor) -> Tensor:
    """GENERATOR ** exponent modulo PRIME, by squaring."""
    assert exponent.numel() == 0 or 0 <= exponent.min() <= exponent.max() < 2**EXPONENT_BITS
    result, square = torch.ones_like(exponent), GENERATOR
    for bit in range(EXPONENT_BITS):
        factor = torch.where((exponent >> bit) & 1 == 1, square, 1)
        result = result * factor % PRIME
        square = square * square % PRIME
    return result
