"""Tokens to chunks and back, for batches and packed segments alike.

Every segment (a batch row, or a packed segment) is cut into chunks of C tokens; its last chunk is filled up
with zero rows, which neither write (k = 0, beta = 0) nor forget (g = 0). Nothing is padded to the longest.

Chunks are ordered by their place in the segment, and at one place the longest segment comes first:

    segments of 3, 1 and 2 chunks:    a0 c0 b0 | a1 c1 | a2        (a = first, b = second, c = third)

so that a step of the state pass, chunk n of every segment that has one, is a plain slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True)
class ChunkLayout:
    """Which token stands in which chunk. Made by `chunk_layout`."""

    chunk_size: int
    shape: tuple[int, int]  # B, T of the inputs
    segment: Int[Tensor, " N"]  # each chunk's segment
    index: Int[Tensor, " N"]  # and its place in that segment
    rows: Int[Tensor, " NC"]  # the token that each chunk row reads; B * T stands for a zero row
    home: Int[Tensor, " BT"]  # the chunk row that each token went to; N * C stands for a zero row
    order: Int[Tensor, " segments"]  # segments, longest first: the order of states during the pass
    steps: tuple[slice, ...]  # chunks of each step of the state pass

    @property
    def padded(self) -> bool:
        """Whether some chunk row is no token, or some token in no chunk."""
        B, T = self.shape
        return bool((self.rows == B * T).any()) or bool((self.home == len(self.rows)).any())

    def split(self, x: Tensor) -> Tensor:
        """[B, T, HV, *] to [HV, N, C, *]: rows that are no token are zero, whatever lies beside them."""
        x = x.flatten(0, 1)
        if self.padded:
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        chunks = x.transpose(0, 1).index_select(1, self.rows)
        return chunks.unflatten(1, (len(self.segment), self.chunk_size))

    def join(self, x: Tensor) -> Tensor:
        """[HV, N, C, *] to [B, T, HV, *]: tokens past the last segment are zero."""
        x = x.flatten(1, 2).transpose(0, 1)
        if self.padded:
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return x.index_select(0, self.home).unflatten(0, self.shape)


def chunk_layout(B: int, T: int, offsets: list[int] | None, chunk_size: int, device: torch.device) -> ChunkLayout:
    """Lay out a batch [B, T] (offsets None), or the packed segments of one row."""
    offsets = [b * T for b in range(B + 1)] if offsets is None else offsets
    starts, ends = torch.tensor(offsets[:-1], dtype=torch.int64), torch.tensor(offsets[1:], dtype=torch.int64)
    counts = (ends - starts + chunk_size - 1) // chunk_size
    order = torch.argsort(counts, descending=True, stable=True)
    most = int(counts.max()) if len(counts) else 0
    live = [int((counts > step).sum()) for step in range(most)]  # segments that have a chunk at this step

    edges = [0, *torch.tensor(live, dtype=torch.int64).cumsum(0).tolist()]
    index = torch.repeat_interleave(torch.arange(most), torch.tensor(live, dtype=torch.int64))
    segment = torch.cat([order[:n] for n in live]) if live else order[:0]
    tokens = (starts[segment] + index * chunk_size)[:, None] + torch.arange(chunk_size)
    rows = torch.where(tokens < ends[segment][:, None], tokens, B * T).flatten()
    home = torch.full((B * T + 1,), len(rows))
    home = home.index_put((rows,), torch.arange(len(rows)))[: B * T]
    return ChunkLayout(
        chunk_size=chunk_size,
        shape=(B, T),
        segment=segment.to(device),
        index=index.to(device),
        rows=rows.to(device),
        home=home.to(device),
        order=order.to(device),
        steps=tuple(slice(start, end) for start, end in pairwise(edges)),
    )
