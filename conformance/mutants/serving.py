"""Bugs of decoding from a pool, of unchecked input, and of memory that is not as simple as expected."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

import torch

from ..adapter import Call
from ..emulated import Emulated
from ..precision import to_format
from .registry import mutant

WRAP = "flashinfer #5042"
DRAFTS = "sglang #29472"


def changed(call, **tensors):
    return Call(**{**vars(call), **tensors})


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


@mutant("refusal", "shapes are not checked")
class ShapesUnchecked(Emulated):
    def check_shape(self, name, got, wanted):
        if name == "k" and got != wanted:
            super().check_shape(name, got, wanted)

    def heads(self, call):
        g = call.g if call.g.dim() == 4 else call.g[..., None].expand(*call.g.shape, call.q.shape[-1])
        T, HV = min(call.q.shape[1], call.v.shape[1]), min(call.v.shape[2], call.beta.shape[2])
        rows = {"v": call.v[:, :T, :HV], "g": g[:, :T, :HV], "beta": call.beta[:, :T, :HV]}
        rows |= {"q": call.q[:, :T], "k": call.k[:, :T]}
        return super().heads(changed(call, **rows))


@mutant("refusal", "the number of value heads is not checked")
class GroupsUnchecked(Emulated):
    def check_groups(self, call):
        pass


@mutant("refusal", "formats are not checked", link="cudnn-frontend #596")
class DtypesUnchecked(Emulated):
    def check_dtypes(self, call):
        pass


@mutant("refusal", "a positive gate is clamped")
class GateUnchecked(Emulated):
    def check_gate(self, call):
        pass

    def gate(self, g):
        return g.clamp(max=0)


@mutant("refusal", "cu_seqlens is not checked")
class OffsetsUnchecked(Emulated):
    def check_packed(self, offsets, B, T):
        pass

    def segments(self, call):
        T = call.q.shape[1]
        return [(b, min(start, T), min(max(start, end), T)) for b, start, end in super().segments(call)]


@mutant("refusal", "cu_seqlens is checked by an error that does not name it")
class OffsetsUnnamed(Emulated):
    def check_packed(self, offsets, B, T):
        try:
            super().check_packed(offsets, B, T)
        except ValueError:
            raise ValueError("invalid configuration") from None


@mutant("refusal", "the number of initial states is not checked")
class StatesUnchecked(Emulated):
    def check_state(self, call):
        pass

    def initial_state(self, call, v, n, states):
        if call.initial_state is None:
            return super().initial_state(call, v, n, states)
        return call.initial_state[min(n, len(call.initial_state) - 1)].float()


@mutant("refusal", "the number of slots is not checked")
class SlotsUnchecked(Emulated):
    def check_slots(self, call):
        pass


@mutant("memory", "an input is read from the beginning of its memory")
class OffsetIgnored(Emulated):
    def run(self, call, want):
        moved = {
            name: torch.as_strided(x, x.shape, x.stride(), 0)
            for name, x in call.tensors().items()
            if x.is_floating_point() and x.is_contiguous() and x.numel()
        }
        return super().run(changed(call, **moved), want)


@mutant("memory", "strides in 32 bits", link="flash-linear-attention #1080")
class StridesIn32Bits(Emulated):
    def run(self, call, want):
        if any(max(x.stride(), default=0) >= 2**31 for x in call.tensors().values()):
            call = changed(call, q=torch.zeros_like(call.q))
        return super().run(call, want)


@mutant("memory", "the row of a token is as long as its channels")
class RowsDense(Emulated):
    def run(self, call, want):
        dense = {}
        for name in ("q", "k", "v"):
            x = getattr(call, name)
            strides = (x.stride(0), x.shape[2] * x.shape[3], *x.stride()[2:])
            dense[name] = x if x.is_contiguous() or not x.numel() else torch.as_strided(x, x.shape, strides)
        return super().run(changed(call, **dense), want)


@mutant("memory", "a stride of 0 is taken for 1")
class ZeroStride(Emulated):
    def run(self, call, want):
        if call.beta.numel() > 1 and not any(call.beta.stride()):
            call = changed(call, beta=call.beta * (torch.arange(call.beta.shape[1]) == 0)[:, None])
        return super().run(call, want)


@mutant("memory", "the output is added to what new memory holds")
class OutputAccumulated(Emulated):
    def allocate(self, v):
        used = torch.empty_like(v)
        return torch.where(used.isfinite() & (used.abs() < 2.0**90), torch.zeros_like(v), used)

    def write_rows(self, o, o_n, b, start, end):
        kept = o.clone()
        kept[b, start:end] += o_n.transpose(0, 1)
        return kept
