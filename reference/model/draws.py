"""Random weights that are the same bits on every machine: counted integers, then exact arithmetic.

    word      one 64-bit word of Philox-4x64-10, keyed by SHA-256 of the seed and the tensor's name
    normal    (sum of the word's four 16-bit quarters, centred) / its standard deviation: |x| < 3.5
    uniform   the word's upper 53 bits / 2^53, in [0, 1)

After the integers there is one product and one sum in fp64, then one rounding to fp32 (and one to bf16), all of
them fixed by IEEE 754. There is no exp, log or pow: their last bit belongs to the C library. A tensor's draw does
not depend on which other tensors exist or in what order they are made.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 2**20  # words drawn at once: what bounds the memory above the tensor itself
QUARTERS = (0, 16, 32, 48)  # bit offsets of a word's quarters
QUARTER_MASK = np.uint64(2**16 - 1)
QUARTERS_MEAN = 2 * (2**16 - 1)  # of their sum
QUARTERS_STD = math.sqrt((2**32 - 1) / 3)
FRACTION_BITS = 53  # of an fp64

Words = NDArray[np.uint64]
Values = NDArray[np.float64]


def normal(seed: int, name: str, shape: Sequence[int], *, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """A tensor in fp32 with a bell-shaped distribution: the sum of four uniform integers, shifted and scaled."""
    return _fill(seed, name, shape, lambda words: mean + std / QUARTERS_STD * _centred_sum(words))


def uniform(seed: int, name: str, shape: Sequence[int], *, low: float = 0.0, high: float = 1.0) -> Tensor:
    """A tensor in fp32, uniform in [low, high)."""
    return _fill(seed, name, shape, lambda words: low + (high - low) * _fraction(words))


def _fill(seed: int, name: str, shape: Sequence[int], values: Callable[[Words], Values]) -> Tensor:
    stream = np.random.Philox(key=_key(seed, name))
    count = math.prod(shape)
    filled = np.empty(count, dtype=np.float32)
    for start in range(0, count, BLOCK):
        block = filled[start : start + BLOCK]
        block[:] = values(stream.random_raw(len(block)))
    return torch.from_numpy(filled).reshape(tuple(shape))


def _key(seed: int, name: str) -> int:
    """128 bits that differ wherever seed or name do."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:16], "little")


def _centred_sum(words: Words) -> Values:
    total = sum((words >> np.uint64(offset)) & QUARTER_MASK for offset in QUARTERS)
    return np.asarray(total, dtype=np.float64) - QUARTERS_MEAN


def _fraction(words: Words) -> Values:
    return (words >> np.uint64(64 - FRACTION_BITS)).astype(np.float64) / 2**FRACTION_BITS
