"""Input that is not checked."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

from ..emulated import Emulated
from .registry import changed, mutant


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


@mutant("refusal", "a positive gate is clamped", link="vllm-ascend #14192")
class GateUnchecked(Emulated):
    def check_gate(self, call):
        pass

    def gate(self, g):
        return g.clamp(max=0)


@mutant("refusal", "cu_seqlens is not checked", link="vllm-ascend #14192")
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
