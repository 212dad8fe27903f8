"""Which tokens of a call belong together: a batch of equal lengths, or segments packed end to end.

Padding does not exist inside the model. A padded batch [B, T] with a mask is packed before the first layer,
its B segments end to end in one row, and spread out again after the last; so a padded position touches
neither a convolution, nor a KDA state, nor attention, nor an expert, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..contract import check_offsets


@dataclass(frozen=True)
class Segments:
    """The tokens of one call, sequence by sequence.

    lengths   new tokens of each of the N sequences; 0 is allowed in packed form
    packed    activations are [1, sum(lengths), *] with the segments end to end; else [N, T, *]
    """

    lengths: tuple[int, ...]
    packed: bool

    @property
    def longest(self) -> int:
        """The most tokens that a sequence has in this call."""
        return max(self.lengths)

    def cu_seqlens(self, device: torch.device) -> Int[Tensor, " N_plus_1"] | None:
        """Offsets of the packed segments, for the KDA operator; None for a batch."""
        if not self.packed:
            return None
        return torch.tensor([0, *accumulate(self.lengths)], device=device)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, T, *] to one [t, *] for each sequence."""
        return x[0].split(self.lengths) if self.packed else x.unbind(0)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """One [t, *] for each sequence to [B, T, *]: the inverse of `split`."""
        return torch.cat(list(pieces))[None] if self.packed else torch.stack(list(pieces))


def segments_of(
    input_ids: Int[Tensor, "B T"],
    attention_mask: Bool[Tensor, "B T"] | None,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None,
) -> Segments:
    """How a call's tokens are laid out once padding is gone, from its mask or its offsets."""
    B, T = input_ids.shape
    if cu_seqlens is not None:
        offsets = _checked_offsets(cu_seqlens, attention_mask, B, T)
        return Segments(tuple(end - start for start, end in pairwise(offsets)), packed=True)
    if attention_mask is None or bool(attention_mask.all()):
        return Segments((T,) * B, packed=False)
    return Segments(tuple(attention_mask.sum(1).tolist()), packed=True)


def check_tokens(input_ids: Int[Tensor, "B T"], attention_mask: Bool[Tensor, "B T"] | None, vocab_size: int) -> None:
    """Check a call's tokens and mask: shapes, dtypes, and that the ids are in the vocabulary."""
    if input_ids.dim() != 2 or input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"input_ids must be [B, T] of int32 or int64; got {list(input_ids.shape)} of {input_ids.dtype}"
        )
    if input_ids.shape[0] < 1:
        raise ValueError(f"input_ids must be [B, T] with B of 1 or more; got {list(input_ids.shape)}")
    if attention_mask is not None and (attention_mask.shape != input_ids.shape or attention_mask.dtype != torch.bool):
        raise ValueError(
            f"attention_mask must be bool [B, T] = {list(input_ids.shape)}, of this call's tokens only, true "
            f"where there is a token; got {list(attention_mask.shape)} of {attention_mask.dtype}"
        )
    kept = input_ids if attention_mask is None else input_ids[attention_mask]
    low, high = (int(kept.min()), int(kept.max())) if kept.numel() else (0, 0)
    if low < 0 or high >= vocab_size:
        raise ValueError(f"input_ids must be in [0, {vocab_size}); got {low} to {high}")


def _checked_offsets(
    cu_seqlens: Int[Tensor, " N_plus_1"], attention_mask: Bool[Tensor, "B T"] | None, B: int, T: int
) -> list[int]:
    if attention_mask is not None:
        raise ValueError("attention_mask must be None beside cu_seqlens; got both")
    if B != 1:
        raise ValueError(f"cu_seqlens must be None unless B = 1: segments lie end to end in one row; got B={B}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = f"{list(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        raise ValueError(f"cu_seqlens must be [N + 1] offsets of N >= 1 segments, int32 or int64; got {got}")
    offsets = cu_seqlens.tolist()
    check_offsets(offsets, T)
    if offsets[-1] != T:
        raise ValueError(f"cu_seqlens must end at T={T}; got {offsets[-1]}")
    return offsets
