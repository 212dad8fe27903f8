"""Memory between the chunk kernels: one allocation a call, cut into tensors."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .chunk_table import CHUNK, TILE
from .support import cdiv

ALIGNMENT = 256  # bytes: of each tensor in the workspace


class Workspace(NamedTuple):
    """What one kernel leaves for the next; all dense, chunk by chunk. C = 64, M = 4 tiles of 16."""

    first_chunk: Tensor  # [N + 2]
    k_start: Tensor  # [chunks, HV, C, KP]      k times its decay from the tile's start
    k_end: Tensor  # [chunks, HV, C, KP]        k times its decay to the tile's end
    q_start: Tensor  # [chunks, HV, C, KP]
    kg: Tensor  # [chunks, HV, C, KP]           k times its decay to the chunk's end
    wq: Tensor  # [chunks, HV, 2 C, KP]         w above qg = q exp(G)
    u: Tensor  # [chunks, HV, C, VP]            of wide slices [chunks, HV, VP, C]
    Aqk: Tensor  # [chunks, HV, C, C]
    T_tile: Tensor  # [chunks, HV, C, 16]
    Aqk_tile: Tensor  # [chunks, HV, C, 16]
    tile_decay: Tensor  # [chunks, HV, M, KP]   that of a whole tile
    chunk_decay: Tensor  # [chunks, HV, KP]
    strength: Tensor  # [chunks, HV, C]         beta


class Layout(NamedTuple):
    """Where in one piece of memory each tensor of the workspace lies."""

    offsets: dict[str, int]  # bytes
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    size: int

    def cut(self, memory: Tensor) -> Workspace:
        """The workspace in memory [size], uint8."""
        views = {}
        for name, (shape, dtype) in self.tensors.items():
            offset = self.offsets[name]
            views[name] = memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return Workspace(**views)


@functools.lru_cache
def workspace_layout(N: int, chunks: int, HV: int, KP: int, VP: int, dot: torch.dtype, solve: torch.dtype) -> Layout:
    """The layout for so many segments and chunks."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "first_chunk": ((N + 2,), torch.int32),
        **{name: ((chunks, HV, CHUNK, KP), dot) for name in ("k_start", "k_end", "q_start", "kg")},
        "wq": ((chunks, HV, 2 * CHUNK, KP), dot),
        "u": ((chunks, HV, CHUNK * VP), dot),
        "Aqk": ((chunks, HV, CHUNK, CHUNK), dot),
        "T_tile": ((chunks, HV, CHUNK, TILE), solve),
        "Aqk_tile": ((chunks, HV, CHUNK, TILE), dot),
        "tile_decay": ((chunks, HV, CHUNK // TILE, KP), torch.float32),
        "chunk_decay": ((chunks, HV, KP), torch.float32),
        "strength": ((chunks, HV, CHUNK), torch.float32),
    }
    offsets, end = {}, 0
    for name, (shape, dtype) in tensors.items():
        offsets[name] = end
        end += cdiv(math.prod(shape) * dtype.itemsize, ALIGNMENT) * ALIGNMENT
    return Layout(offsets, tensors, end)
