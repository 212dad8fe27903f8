"""Bugs of memory: strides, offsets, what is overwritten, what is never written."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

import torch

from ..emulated import Emulated
from .registry import changed, mutant


@mutant("memory", "strides are ignored")
class StridesIgnored(Emulated):
    def run(self, call, want):
        flat = {
            name: torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())
            for name, x in call.tensors().items()
            if x.is_floating_point() and x.numel()
        }
        return super().run(changed(call, **flat), want)


@mutant(
    "memory",
    "the output is new memory whose rows past the end are never written",
    link="flash-linear-attention-npu #266",
)
class OutputUnwritten(Emulated):
    def allocate(self, v):
        return torch.empty_like(v)

    def write_rows(self, o, o_n, b, start, end):
        return (
            torch.cat([o[:, :start], o_n.transpose(0, 1)[None], o[:, end:]], 1)
            if len(o) == 1
            else super().write_rows(o, o_n, b, start, end)
        )


@mutant("memory", "the queries are scaled in place")
class QueriesOverwritten(Emulated):
    def scale_queries(self, q, call, v):
        if not call.q.requires_grad:
            call.q.mul_(call.scale)
        return super().scale_queries(q, call, v)


@mutant("memory", "the state is updated in place and returned", link="sglang #29472")
class StateInPlace(Emulated):
    def run(self, call, want):
        results = super().run(call, want)
        if call.do is None and call.initial_state is not None:
            results["final_state"] = call.initial_state.copy_(results["final_state"])
        return results


@mutant("memory", "a mask that multiplies: 0 * NaN of a neighbour")
class MaskMultiplies(Emulated):
    def heads(self, call):
        q, k, v, g, beta = super().heads(call)
        return q, k, v + 0 * v.sum(dim=(0, 1), keepdim=True), g, beta


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
