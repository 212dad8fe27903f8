"""State pools of a serving engine: which slot an index means, and the checks around it."""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.contract import Dims

INDEX_DTYPES = (torch.int32, torch.int64)
STATE_DTYPES = (torch.float32, torch.bfloat16)


@triton.jit
def read_slot(slot_indices, strides, n, column, M: tl.constexpr, slots, pad_slot):
    """The slot that slot_indices[n, column] names (int64), or -1 where that is padding or outside the pool.

    M is the number of columns; 0 where slot_indices is [N] and column 0 is meant.
    """
    COLUMNS: tl.constexpr = M if M > 0 else 1
    known = (column >= 0) & (column < COLUMNS)
    slot = tl.load(slot_indices + n * strides[0] + column * strides[1], mask=known, other=-1).to(tl.int64)
    return tl.where((slot < slots) & (slot != pad_slot), tl.maximum(slot, -1), -1)


@triton.jit
def size_if(slot, size):
    """`size`, or 0 where the slot is nobody's: the limit of a mask that then lets nothing through."""
    return tl.where(slot >= 0, size, 0)


def check_pool(name: str, pool: Tensor, like: Tensor, layout: str, shape: tuple[int, ...]) -> None:
    """Check a pool's shape behind its slots, its dtype and its device."""
    if pool.dim() != len(shape) + 1 or tuple(pool.shape[1:]) != shape:
        raise ValueError(f"{name} must be {layout}, that is [slots, {str(list(shape))[1:]}; got {list(pool.shape)}")
    if pool.dtype not in STATE_DTYPES:
        raise TypeError(f"{name} must be float32 or bfloat16; got {pool.dtype}")
    if pool.device != like.device:
        raise ValueError(f"{name} must be on the device of q, {like.device}; got {pool.device}")


def check_slots(slot_indices: Tensor, accepted: Tensor | None, q: Tensor, dims: Dims, *, packed: bool) -> None:
    """Check what can be told about indices without reading them."""
    if slot_indices.dim() not in (1, 2) or slot_indices.shape[0] != dims.N:
        raise ValueError(f"slot_indices must be [N] or [N, M] with N={dims.N}; got {list(slot_indices.shape)}")
    check_index_tensor("slot_indices", slot_indices, q)
    per_token = slot_indices.dim() == 2
    if per_token and not packed and slot_indices.shape[1] < dims.T:
        raise ValueError(f"slot_indices must be [N, M] with M >= T={dims.T}; got {list(slot_indices.shape)}")
    if accepted is None:
        return
    if not per_token:
        raise ValueError("num_accepted_tokens must be None unless slot_indices is [N, M], one slot a token; got both")
    if tuple(accepted.shape) != (dims.N,):
        raise ValueError(f"num_accepted_tokens must be [N] with N={dims.N}; got {list(accepted.shape)}")
    check_index_tensor("num_accepted_tokens", accepted, q)


def check_index_tensor(name: str, indices: Tensor, like: Tensor) -> None:
    """Check the dtype and device of a tensor of indices or counts."""
    if indices.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name} must be int32 or int64; got {indices.dtype}")
    if indices.device != like.device:
        raise ValueError(f"{name} must be on the device of q, {like.device}; got {indices.device}")


def check_slot_contents(
    slot_indices: Tensor, slots: int, pad_slot: int, accepted: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Read indices on the host and refuse those that a kernel would have to ignore, or that race."""
    used = [slot for slot in slot_indices.flatten().tolist() if slot != pad_slot]
    for slot in used:
        if not 0 <= slot < slots:
            raise ValueError(f"slot_indices must be in [0, {slots}) or pad_slot={pad_slot}; got {slot}")
    if len(set(used)) < len(used):
        twice = next(slot for slot in used if used.count(slot) > 1)
        raise ValueError(f"slot_indices must name a slot once: two states would race for it; got {twice} twice")
    columns = slot_indices.shape[-1]
    for count in [] if accepted is None else accepted.tolist():
        if not 1 <= count <= columns:
            raise ValueError(f"num_accepted_tokens must be in [1, M={columns}]; got {count}")
    if slot_indices.dim() == 2 and cu_seqlens is not None:
        longest = max(end - start for start, end in pairwise(cu_seqlens.tolist()))
        if longest > columns:
            raise ValueError(f"slot_indices must be [N, M] with M >= {longest}, the longest segment; got M={columns}")
