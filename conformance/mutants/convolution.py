"""Bugs of the short convolution: taps, windows, and the state between calls."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

import torch

from ..emulated import Emulated
from .registry import mutant

SHORT_SEQUENCE, SHORT_PIECE = "vllm #20838", "vllm #56196"


@mutant("short_conv", "the state is shifted by one")
class ConvStateShifted(Emulated):
    def conv_state(self, window, call):
        kept = call.weight.shape[1] - 1
        return window[:, max(window.shape[1] - kept - 1, 0) :][:, :kept]


@mutant("short_conv", "the taps are reversed")
class ConvTapsReversed(Emulated):
    def conv_sums(self, window, weight):
        return super().conv_sums(window, weight.flip(1))


@mutant("short_conv", "the state is not reset between segments", link=SHORT_SEQUENCE)
class ConvNotReset(Emulated):
    def conv_start(self, call, n, states):
        first = call.cu_seqlens is None or n == 0
        return super().conv_start(call, n, states) if first else states[-1]


@mutant("short_conv", "a step has no activation")
class ConvStepLinear(Emulated):
    def conv_step_activation(self, y):
        return y


@mutant("short_conv", "the state is kept in bf16", on="fp32")
class ConvStateBf16(Emulated):
    def conv_state(self, window, call):
        state = super().conv_state(window, call)
        return state.to(torch.bfloat16).to(state.dtype)


@mutant("short_conv", "a piece shorter than the state forgets what was before it", link=SHORT_PIECE)
class ConvShortPieceForgets(Emulated):
    def conv_state(self, window, call):
        state, kept = super().conv_state(window, call), call.weight.shape[1] - 1
        own = torch.arange(kept) >= kept - (window.shape[1] - kept)
        return torch.where(own, state, torch.zeros_like(state))


@mutant("short_conv", "the window is centred: it sees the next token")
class ConvCentred(Emulated):
    def conv_sums(self, window, weight):
        ahead = torch.cat([window[:, 1:], torch.zeros_like(window[:, :1])], 1)
        return super().conv_sums(ahead, weight)


@mutant("short_conv", "the state holds activated inputs")
class ConvStateActivated(Emulated):
    def conv_state(self, window, call):
        state = super().conv_state(window, call)
        return (state.float() * torch.sigmoid(state.float())).to(state.dtype)


@mutant("short_conv", "the initial state is ignored")
class ConvStateIgnored(Emulated):
    def conv_start(self, call, n, states):
        return torch.zeros_like(super().conv_start(call, n, states))


@mutant("short_conv", "a step keeps its inputs in a copy of the pool")
class ConvPoolCopied(Emulated):
    def conv_keep(self, pool, slot, window):
        super().conv_keep(pool.clone(), slot, window)


@mutant("short_conv", "a slot of -1 is the last one", link="flashinfer #5042")
class ConvPadWraps(Emulated):
    def conv_seated(self, slot):
        return True


@mutant("short_conv", "sums are in bf16", on="fp32")
class ConvSumsBf16(Emulated):
    def conv_sums(self, window, weight):
        return super().conv_sums(window, weight).to(torch.bfloat16).float()
