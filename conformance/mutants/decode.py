"""Bugs of decoding from a pool."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

import torch

from ..emulated import Emulated
from ..precision import to_format
from .registry import changed, mutant

WRAP = "flashinfer #5042"
DRAFTS = "sglang #29472"


@mutant("decode", "padding of index -1 is the pool's last slot", link=WRAP)
class PadWraps(Emulated):
    def is_nobody(self, slot, pool):
        return slot >= len(pool)


@mutant("decode", "an index past the pool is its last slot", link=WRAP)
class PadClamped(Emulated):
    def is_nobody(self, slot, pool):
        return slot < 0

    def read(self, pool, slot):
        return super().read(pool, min(slot, len(pool) - 1))

    def write(self, pool, slot, S):
        super().write(pool, min(slot, len(pool) - 1), S)


@mutant("decode", "output rows of padding are left as they were", link="vllm-ascend #15553")
class PadRowsLeft(Emulated):
    def padding_rows(self, o):
        return o + 1


@mutant("decode", "the state advances in a copy of the pool", link="xllm #1873")
class PoolCopied(Emulated):
    def decode(self, call):
        return super().decode(changed(call, state_pool=call.state_pool.clone()))


@mutant("decode", "the slot after a sequence's is overwritten")
class NextSlotCleared(Emulated):
    def write(self, pool, slot, S):
        super().write(pool, slot, S)
        if slot + 1 < len(pool):
            pool[slot + 1] *= 0


@mutant("decode", "slots that nobody named are written back in a shorter format")
class PoolRewritten(Emulated):
    def decode(self, call):
        o = super().decode(call)
        call.state_pool.copy_(to_format(call.state_pool, "bf16"))
        return o


@mutant("decode", "64-bit indices are read as 32-bit ones")
class SlotWidth(Emulated):
    def slot_table(self, call):
        halves = call.slot_indices.contiguous().view(torch.int32).flatten()[: call.slot_indices.numel()]
        return super().slot_table(changed(call, slot_indices=halves.view(call.slot_indices.shape)))


@mutant("decode", "the stride of a table of slots is ignored")
class SlotStride(Emulated):
    def slot_table(self, call):
        slots = call.slot_indices
        flat = torch.as_strided(slots, slots.shape, torch.empty(slots.shape, device="meta").stride())
        return super().slot_table(changed(call, slot_indices=flat))


@mutant("decode", "a slot's address is its index times the size of a state")
class PoolStride(Emulated):
    def decode(self, call):
        pool = call.state_pool
        dense = torch.as_strided(pool, pool.shape, torch.empty(pool.shape, device="meta").stride())
        return super().decode(changed(call, state_pool=dense))


@mutant("decode", "the first sequence's slot for all", link="vllm #57573")
class SlotOfFirst(Emulated):
    def slot_table(self, call):
        table = super().slot_table(call)
        return [table[0]] * len(table)


@mutant("decode", "the state after the last draft, whatever was accepted", link=DRAFTS)
class DraftsAllKept(Emulated):
    def first_column(self, call, n):
        return 0 if call.accepted is None else call.slot_indices.shape[1] - 1


@mutant("decode", "the state before the last accepted token", link=DRAFTS)
class DraftsOneShort(Emulated):
    def first_column(self, call, n):
        return max(super().first_column(call, n) - 1, 0)


@mutant("decode", "the first sequence's number of accepted tokens for all", link=DRAFTS)
class DraftsOfFirst(Emulated):
    def first_column(self, call, n):
        return super().first_column(call, 0)


@mutant("decode", "all drafts are written to the first slot", link=DRAFTS)
class DraftsOneSlot(Emulated):
    def decode(self, call):
        if call.slot_indices.dim() == 2:
            call = changed(call, slot_indices=call.slot_indices[:, :1].expand_as(call.slot_indices))
        return super().decode(call)


@mutant("decode", "the output is read before the write")
class DecodeOutputBefore(Emulated):
    def token(self, rows, S):
        old = self.exp(rows[3])[..., None] * S
        return (old * rows[0][..., None]).sum(1), super().token(rows, S)[1]


@mutant("decode", "decoding takes the gate in log2 units", link="flashinfer #2490")
class DecodeGateLog2(Emulated):
    def token(self, rows, S):
        q, k, v, g, beta = rows
        return super().token([q, k, v, g * 0.6931472, beta], S)


@mutant("decode", "decoding rounds the state to bf16 in a pool of fp32")
class DecodeStateBf16(Emulated):
    def write(self, pool, slot, S):
        super().write(pool, slot, to_format(S, "bf16"))


@mutant("decode", "a state in bf16 is cut off instead of rounded")
class DecodeStateCut(Emulated):
    def write(self, pool, slot, S):
        cut = (S.contiguous().view(torch.int32) >> 16 << 16).view(torch.float32)
        super().write(pool, slot, cut if pool.dtype == torch.bfloat16 else S)


@mutant("decode", "decoding puts beta through its sigmoid again", link="sglang #17508")
class DecodeSigmoidTwice(Emulated):
    again = False

    def decode(self, call):
        self.again = True
        o = super().decode(call)
        self.again = False
        return o

    def beta_activation(self, x, form):
        beta = super().beta_activation(x, form)
        return torch.sigmoid(beta) if self.again else beta


@mutant("decode", "decoding forgets the scale", link="mlx-lm #1799")
class DecodeUnscaled(Emulated):
    def decode(self, call):
        return super().decode(changed(call, scale=1.0))
