"""What the emulated kernels refuse: one method a declared refusal, so that a bug is a subclass that skips one."""

from __future__ import annotations

from itertools import pairwise

from .adapter import Call

REFUSES = (
    *("shapes", "groups", "dtypes", "state", "positive_gate"),
    *("packed_batch", "packed_start", "packed_order", "packed_end", "slots"),
)


class HostChecks:
    """Checks of a call; each raises ValueError or TypeError with the argument's name."""

    def check(self, call: Call) -> None:
        self.check_shapes(call)
        self.check_groups(call)
        self.check_dtypes(call)
        self.check_gate(call)
        if call.cu_seqlens is not None:
            self.check_packed(call.cu_seqlens.tolist(), *call.q.shape[:2])
        self.check_state(call)
        self.check_slots(call)

    def check_shapes(self, call: Call) -> None:
        B, T, H, K = call.q.shape
        HV = call.v.shape[2]
        wanted = {"k": (B, T, H, K), "v": (B, T, HV, call.v.shape[-1]), "g": (B, T, HV, K), "beta": (B, T, HV)}
        for name, shape in wanted.items():
            self.check_shape(name, tuple(getattr(call, name).shape), shape)

    def check_shape(self, name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if got != wanted:
            raise ValueError(f"{name} must be {list(wanted)}; got {list(got)}")

    def check_groups(self, call: Call) -> None:
        if call.v.shape[2] % call.q.shape[2]:
            raise ValueError(f"v must have a multiple of {call.q.shape[2]} heads; got {call.v.shape[2]}")

    def check_dtypes(self, call: Call) -> None:
        if call.k.dtype != call.q.dtype:
            raise TypeError(f"k must be {call.q.dtype}; got {call.k.dtype}")

    def check_gate(self, call: Call) -> None:
        raw = call.front is not None and call.front.gate is not None
        if not raw and call.cu_seqlens is None and call.g.numel() and call.g.detach().max() > 0:
            raise ValueError("g must be a log decay, at most 0")

    def check_packed(self, offsets: list[int], B: int, T: int) -> None:
        if B != 1:
            raise ValueError(f"cu_seqlens needs a batch of 1; got {B}")
        if offsets[0] != 0:
            raise ValueError(f"cu_seqlens must start at 0; got {offsets[0]}")
        if any(end < start for start, end in pairwise(offsets)):
            raise ValueError(f"cu_seqlens must not decrease; got {offsets}")
        if offsets[-1] > T:
            raise ValueError(f"cu_seqlens must end at {T} at most; got {offsets[-1]}")

    def check_state(self, call: Call) -> None:
        N = call.q.shape[0] if call.cu_seqlens is None else len(call.cu_seqlens) - 1
        if call.initial_state is not None and len(call.initial_state) != N:
            raise ValueError(f"initial_state must have {N} rows; got {len(call.initial_state)}")

    def check_slots(self, call: Call) -> None:
        if call.slot_indices is not None and len(call.slot_indices) != len(call.q):
            raise ValueError(f"slot_indices must name {len(call.q)} slots; got {len(call.slot_indices)}")
