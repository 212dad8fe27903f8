"""The chunk form equals the recurrence as a matter of algebra: both run over the integers modulo a prime.

Random residues in place of floats, gates as exponents of a generator: nothing is rounded, so every element has to be
the same number, and one wrong index, sign or factor makes almost all of them differ. This judges the derivation that
`kimi_linear.reference` ships, not a kernel.

    row = compared(residues(seed, T=37), chunk_size=16)          row.different == 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..reference.chunked.forward import run_all_stages
from ..reference.contract import Dims
from ..reference.naive import kda_scan
from ..reference.operands import Operands
from .modular import PRIME, Modular

GATES_BELOW = 200  # exponents: sums over a few hundred tokens stay below 2 ** 16
SCALE = 3  # a residue like any other
SIZES: list[tuple[int, ...]] = [(1,), (15,), (16,), (17,), (64,), (97,), (200,), (0, 33, 1, 70), (64, 0, 65)]
CHUNK_SIZES = (16, 32, 64, 128)


@dataclass(frozen=True)
class Row:
    """How many numbers of o and of the final state were compared, and how many differ."""

    lengths: tuple[int, ...]
    chunk_size: int
    numbers: int
    different: int


def residues(
    seed: int, T: int, HV: int = 2, K: int = 5, V: int = 3, lengths: tuple[int, ...] | None = None
) -> Operands:
    """Operands modulo the prime, packed where lengths are given; gates are exponents."""
    rng = torch.Generator().manual_seed(seed)

    def draw(*shape: int, below: int = PRIME) -> Tensor:
        return torch.randint(below, shape, generator=rng)

    bounds = None if lengths is None else [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    N = 1 if lengths is None else len(lengths)
    q, k, v, beta = draw(1, T, HV, K), draw(1, T, HV, K), draw(1, T, HV, V), draw(1, T, HV)
    g = draw(1, T, HV, K, below=GATES_BELOW)
    return Operands(q, k, v, g, beta, SCALE, draw(N, HV, K, V), bounds, Dims(1, T, HV, HV, K, V, N))


def compared(x: Operands, chunk_size: int) -> Row:
    """The chunk form of all segments against the recurrence of each."""
    bounds = x.offsets or [0, x.dims.T]
    numbers = different = 0
    with Modular():
        stages = run_all_stages(x, chunk_size)
        got = stages.by_token("o")
        for n, (start, end) in enumerate(pairwise(bounds)):
            segment = (y[:, start:end] for y in (x.q, x.k, x.v, x.g, x.beta))
            o, S = kda_scan(*segment, scale=x.scale, S=x.h0[n : n + 1])
            for mine, want in ((got[:, start:end], o), (stages.final_state[n : n + 1], S)):
                numbers += want.numel()
                different += int((mine != want).sum())
    return Row(tuple(end - start for start, end in pairwise(bounds)), chunk_size, numbers, different)


def table(seed: int, K: int = 5, V: int = 3, heads: int = 2) -> Iterator[Row]:
    """Lengths around every chunk's edge, alone and packed, at every chunk size."""
    for lengths in SIZES:
        packed = lengths if len(lengths) > 1 else None
        x = residues(seed, sum(lengths), heads, K, V, packed)
        yield from (compared(x, chunk_size) for chunk_size in CHUNK_SIZES)
