"""Tokens to chunks and back, for batches and packed segments alike.

Every segment (a batch row, or a packed segment) is cut into chunks of C tokens; its last chunk is filled up
with zero rows, which neither write (k = 0, beta = 0) nor forget (g = 0). Nothing is padded to the longest.

Chunks are ordered by their place in the segment, and at one place the longest segment comes first:

    segments of 3, 1 and 2 chunks:    a0 c0 b0 | a1 c1 | a2        (a = first, b = second, c = third)

so that a step of the state pass, chunk n of every segment that has one, is a plain slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from einops import rearrange
from jaxtyping import Float, Int
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

    def windows(self, chunks: int) -> Iterator[tuple[slice, ...]]:
        """The steps in groups of at most so many chunks, or of one step that is larger."""
        group: list[slice] = []
        for step in self.steps:
            if group and step.stop - group[0].start > chunks:
                yield tuple(group)
                group = []
            group.append(step)
        if group:
            yield tuple(group)

    def split(self, x: Tensor, chunks: slice = slice(None)) -> Tensor:
        """[B, T, HV, *] to [HV, N, C, *], all chunks or some: rows that are no token are zero."""
        rows = self.rows.unflatten(0, (len(self.segment), self.chunk_size))[chunks]
        x = x.flatten(0, 1)
        is_token = rows < len(x)
        padded = not is_token.all()
        picked = torch.where(is_token, rows, 0) if padded else rows
        x = rearrange(x.index_select(0, picked.flatten()).unflatten(0, rows.shape), "n c h ... -> h n c ...")
        if padded:  # a selection, no product with 0: what stands beside the tokens may be NaN
            is_token = is_token.reshape(*is_token.shape, *[1] * (x.dim() - 3))
            x = torch.where(is_token, x, torch.zeros_like(x))
        return x.contiguous()

    def join(self, x: Tensor) -> Tensor:
        """[HV, N, C, *] to [B, T, HV, *]: tokens past the last segment are zero."""
        x = x.flatten(1, 2).transpose(0, 1)
        if bool((self.home == len(self.rows)).any()):
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return x.index_select(0, self.home).unflatten(0, self.shape)

    def longest_first(self, h0: Float[Tensor, "segments HV K V"]) -> Float[Tensor, "HV segments K V"]:
        """States as the state pass carries them."""
        return rearrange(h0[self.order], "s h k v -> h s k v")

    def segment_order(self, states: list[Tensor]) -> Float[Tensor, "segments HV K V"]:
        """States in the order they left the pass, the longest segment's last, in the order of the segments."""
        longest_first = torch.cat(states[::-1], dim=1)
        return rearrange(longest_first, "h s k v -> s h k v")[torch.argsort(self.order)]


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
