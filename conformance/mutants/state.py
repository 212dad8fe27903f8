"""Bugs of the state: its update, its layout, its way in and out."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

import torch

from ..emulated import Emulated
from ..precision import to_format
from .registry import mutant

LAYOUT = "vllm #41292"


@mutant("state", "keys are not decayed to the chunk's end")
class StateKeysUndecayed(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        return self.exp(G_last).transpose(1, 2) * S + self.product(k.transpose(1, 2), v_new)


@mutant("state", "the state is not decayed")
class StateUndecayed(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        return S + self.product((k * self.exp(G_last - G)).transpose(1, 2), v_new)


@mutant("state", "what is written is decayed with the state")
class StateDecayedAfter(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        return self.exp(G_last).transpose(1, 2) * (
            S + self.product((k * self.exp(G_last - G)).transpose(1, 2), v_new)
        )


@mutant("state", "the state is replaced, not updated")
class StateReplaced(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        return super().next_state(0 * S, k, v_new, G, G_last)


@mutant("state", "the last chunk is not in the final state", link="sglang #31474")
class StateStale(Emulated):
    def segment(self, rows, S):
        C, T = self.contract.chunk_size, rows[0].shape[1]
        o, after = super().segment(rows, S)
        whole = max(T - 1, 0) // C * C
        return (o, super().segment([x[:, :whole] for x in rows], S)[1]) if T else (o, after)


@mutant("state", "ragged tails are not in the final state", link="sglang #31474")
class StateWithoutTail(Emulated):
    def segment(self, rows, S):
        T, C = rows[0].shape[1], self.contract.chunk_size
        o, _ = super().segment(rows, S)
        return o, super().segment([x[:, : T // C * C] for x in rows], S)[1]


@mutant("state", "the state is kept in bf16")
class StateBf16(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        return to_format(super().next_state(S, k, v_new, G, G_last), "bf16")


@mutant("state", "the state is read in bf16 by the next chunk, though it is returned in fp32")
class StateBf16Between(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        return super().next_state(to_format(S, "bf16"), k, v_new, G, G_last)


@mutant("state", "the final state is rounded to bf16")
class FinalStateBf16(Emulated):
    def final_state(self, S, call):
        return to_format(S, "bf16")


@mutant("state", "the final state is rounded to fp16", link="attention-gym #464")
class FinalStateFp16(Emulated):
    def final_state(self, S, call):
        return to_format(S, "fp16")


@mutant("state", "the final state is transposed where K = V", link=LAYOUT)
class FinalStateTransposed(Emulated):
    def final_state(self, S, call):
        return S.transpose(-1, -2).contiguous() if S.shape[-1] == S.shape[-2] else S


@mutant("state", "the initial state is transposed where K = V", link=LAYOUT)
class InitialStateTransposed(Emulated):
    def initial_state(self, call, v, n, states):
        S = super().initial_state(call, v, n, states)
        return S.transpose(-1, -2) if S.shape[-1] == S.shape[-2] else S


@mutant("state", "the initial state is read in the wrong order of elements", link="vllm #41292")
class InitialStateReinterpreted(Emulated):
    def initial_state(self, call, v, n, states):
        S = super().initial_state(call, v, n, states)
        return S.reshape(S.shape[0], S.shape[2], S.shape[1]).transpose(1, 2)


@mutant("state", "the initial state is rounded to bf16")
class InitialStateBf16(Emulated):
    def initial_state(self, call, v, n, states):
        return to_format(super().initial_state(call, v, n, states), "bf16")


@mutant("state", "the initial state is ignored")
class InitialStateIgnored(Emulated):
    def initial_state(self, call, v, n, states):
        return 0 * super().initial_state(call, v, n, states)


@mutant("state", "the first segment's initial state for all")
class InitialStateFirst(Emulated):
    def initial_state(self, call, v, n, states):
        return super().initial_state(call, v, 0, states)


@mutant("state", "the initial state is added twice")
class InitialStateDouble(Emulated):
    def initial_state(self, call, v, n, states):
        return 2 * super().initial_state(call, v, n, states)


@mutant("state", "the heads of the initial state in reverse order", link="vllm-ascend #3309")
class InitialStateHeads(Emulated):
    def initial_state(self, call, v, n, states):
        return super().initial_state(call, v, n, states).flip(0)


@mutant(
    "state",
    "the state carries on into the next packed segment",
    link="flash-linear-attention #1184",
)
class StateLeaks(Emulated):
    def initial_state(self, call, v, n, states):
        S = super().initial_state(call, v, n, states)
        return states[-1] if n and call.cu_seqlens is not None else S


@mutant(
    "state",
    "the state carries on into the next packed segment where no initial state is passed",
    link="flash-linear-attention #1184",
)
class StateLeaksUnlessPassed(Emulated):
    def initial_state(self, call, v, n, states):
        S = super().initial_state(call, v, n, states)
        return states[-1] if n and call.cu_seqlens is not None and call.initial_state is None else S


@mutant("state", "an empty segment's state stays unwritten", link="FlashKDA #24")
class StateOfEmptyUnwritten(Emulated):
    def segment(self, rows, S):
        o, after = super().segment(rows, S)
        return (o, after) if rows[0].shape[1] else (o, 0 * after)


@mutant("state", "the state is clamped to the range of fp16", link="attention-gym #464")
class StateClamped(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        return super().next_state(S, k, v_new, G, G_last).clamp(-60000.0, 60000.0)


@mutant("state", "states below 2^-10 are flushed to zero", link="attention-gym #464")
class StateFlushed(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        S = super().next_state(S, k, v_new, G, G_last)
        return torch.where(S.abs() < 2.0**-10, torch.zeros_like(S), S)
