"""Bugs of the host side: segments, heads, tiles, caches, races, contracts."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

from functools import cached_property

import torch

from ..emulated import Emulated
from ..precision import to_format
from .registry import mutant

TAIL = "cuLA #43"


@mutant("output", "the last columns of V, past a multiple of 16, are not written")
class TileOfV(Emulated):
    def write_rows(self, o, o_n, b, start, end):
        written = torch.arange(o.shape[-1]) < max(o.shape[-1] // 16 * 16, 1)
        return super().write_rows(o, o_n * written, b, start, end)


@mutant(
    "output",
    "key channels past a multiple of 16 are not read",
    link="flash-linear-attention #1134",
)
class TileOfK(Emulated):
    def scale_queries(self, q, call, v):
        return super().scale_queries(q, call, v) * (torch.arange(q.shape[-1]) < max(q.shape[-1] // 16 * 16, 1))


@mutant("output", "the last token of a ragged tail is not written", link=TAIL)
class TailToken(Emulated):
    def write_rows(self, o, o_n, b, start, end):
        ragged = (end - start) % self.contract.chunk_size
        return (
            super().write_rows(o, o_n[:, :-1], b, start, end - 1)
            if ragged
            else super().write_rows(o, o_n, b, start, end)
        )


@mutant("packing", "a ragged last segment is not written")
class LastSegmentDropped(Emulated):
    def write_rows(self, o, o_n, b, start, end):
        last = self.packed and end == self.end and (end - start) % self.contract.chunk_size
        return o if last else super().write_rows(o, o_n, b, start, end)

    def segments(self, call):
        found = super().segments(call)
        self.packed, self.end = call.cu_seqlens is not None and len(found) > 1, found[-1][2] if found else 0
        return found


@mutant("packing", "packed segments but the first lose their first token")
class SegmentsOneLate(Emulated):
    def segments(self, call):
        found = super().segments(call)
        return (
            [(b, min(start + (n > 0), end), end) for n, (b, start, end) in enumerate(found)]
            if call.cu_seqlens is not None
            else found
        )


@mutant("packing", "rows past the last segment belong to it", link="vllm-ascend #15553")
class SegmentsToCapacity(Emulated):
    def segments(self, call):
        found = super().segments(call)
        if call.cu_seqlens is None:
            return found
        b, start, _ = found[-1]
        return [*found[:-1], (b, start, call.q.shape[1])]


@mutant("packing", "empty segments are skipped, and the states move up", link="FlashKDA #24")
class EmptySegmentsSkipped(Emulated):
    def segments(self, call):
        found = super().segments(call)
        self.missing = (
            [n for n, (_, start, end) in enumerate(found) if start == end] if call.cu_seqlens is not None else []
        )
        return [segment for n, segment in enumerate(found) if n not in self.missing]

    def final_state(self, S, call):
        pad = S.new_zeros(len(self.missing), call.v.shape[2], call.q.shape[-1], call.v.shape[-1])
        return torch.cat([S, pad])


@mutant("heads", "value heads take key heads in turn instead of in groups", link="vllm-ascend #3309")
class HeadsInTurn(Emulated):
    def heads(self, call):
        q, k, v, g, beta = super().heads(call)
        group = call.v.shape[2] // call.q.shape[2]
        q, k = (x[:, :, ::group].repeat(1, 1, group, 1) for x in (q, k))
        return q, k, v, g, beta


@mutant("heads", "the first key head for all", link="flash-linear-attention #1115")
class HeadsFirst(Emulated):
    def heads(self, call):
        q, k, v, g, beta = super().heads(call)
        return q[:, :, :1].expand_as(q), k[:, :, :1].expand_as(k), v, g, beta


@mutant("heads", "the first batch item's keys for all")
class BatchFirst(Emulated):
    def heads(self, call):
        q, k, v, g, beta = super().heads(call)
        return q, k[:1].expand_as(k), v, g, beta


@mutant("host", "chunks of 32 with a table made for 64", link="flash-linear-attention #876")
class ChunkTable(Emulated):
    def segment(self, rows, S):
        o, after = super().segment(rows, S)
        return torch.cat([o[:, :64], 0 * o[:, 64:]], 1), after


@mutant(
    "race",
    "now and then a chunk reads the state of the chunk before",
    link="sglang #37289",
)
class RaceOnState(Emulated):
    calls = 0

    def run(self, call, want):
        self.calls += 1
        return super().run(call, want)

    def output(self, q, Aqk, S, v_new, G):
        stale = 1 - 2.0**-6 if self.calls % 3 == 0 else 1.0
        return super().output(q, Aqk, stale * S, v_new, G)


@mutant("race", "sums in an order that changes from run to run", link="flash-linear-attention #953")
class SumOrder(Emulated):
    calls = 0

    def run(self, call, want):
        self.calls += 1
        return super().run(call, want)

    def final_state(self, S, call):
        return S * (1 + 2.0**-23 * (self.calls % 2))


@mutant("host", "write strengths are kept, by shape, from the first call of that shape")
class StaleCache(Emulated):
    @cached_property
    def kept(self):
        return {}

    def strength(self, beta):
        return self.kept.setdefault(tuple(beta.shape), beta.detach().clone())


@mutant(
    "host",
    "where segments start is kept until cu_seqlens is another tensor",
    link="flash-linear-attention #770",
)
class SegmentsByAddress(Emulated):
    known = None

    def segments(self, call):
        if call.cu_seqlens is None:
            return super().segments(call)
        if self.known is not call.cu_seqlens:
            self.known, self.kept = call.cu_seqlens, super().segments(call)
        return self.kept


@mutant("contract", "tf32 operands where fp32 is declared", on="fp32", link="cudnn-frontend #596")
class OperandsTf32(Emulated):
    def product(self, x, y):
        return to_format(x, "tf32") @ to_format(y, "tf32")


@mutant("contract", "bf16 operands where fp32 is declared", on="fp32", link="cudnn-frontend #596")
class OperandsBf16(Emulated):
    def product(self, x, y):
        return to_format(x, "bf16") @ to_format(y, "bf16")


@mutant("contract", "sums in bf16, four terms at a time")
class AccumulateBf16(Emulated):
    def product(self, x, y):
        total = torch.zeros(())
        for left, right in zip(x.split(4, -1), y.split(4, -2), strict=True):
            total = to_format(total + super().product(left, right), "bf16")
        return total


@mutant("contract", "the final state comes in the output's format")
class StateDtype(Emulated):
    def final_state(self, S, call):
        return S.to(torch.bfloat16)


@mutant("contract", "the final state comes in V x K where it is not square", link="vllm #41292")
class StateShape(Emulated):
    def final_state(self, S, call):
        return S.transpose(-1, -2).contiguous() if call.do is None else S
