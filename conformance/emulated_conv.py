"""The short convolution of the emulated kernels, step by step: sums in fp32, raw inputs as state."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .adapter import ConvCall, ShortConv
from .gold import Results

CONV = ShortConv()


class ConvSteps:
    """Steps of a convolution over sequences or one token; a bug is a subclass that overrides one."""

    def convolve(self, call: ConvCall, want: frozenset[str]) -> Results:
        if call.operation == "short_conv_update":
            return {"y": self.conv_step(call)}
        y, states = torch.zeros_like(call.x), call.x.new_zeros(0, call.x.shape[-1], call.weight.shape[1] - 1)
        for n, (b, start, end) in enumerate(self.conv_segments(call)):
            window = torch.cat([self.conv_start(call, n, states), call.x[b, start:end].T], 1)
            y[b, start:end] = self.conv_activation(self.conv_sums(window, call.weight)).to(y.dtype).T
            states = torch.cat([states, self.conv_state(window, call)[None]])
        return {"y": y, "final_state": states}

    def conv_segments(self, call: ConvCall) -> list[tuple[int, int, int]]:
        """Batch item, first token, end of each segment."""
        if call.cu_seqlens is None:
            return [(b, 0, call.x.shape[1]) for b in range(len(call.x))]
        return [(0, start, end) for start, end in pairwise(call.cu_seqlens.tolist())]

    def conv_start(self, call: ConvCall, n: int, states: Tensor) -> Tensor:
        """What lies before a segment, [D, W - 1]; `states` are those of segments before it."""
        if call.initial_state is None:
            return call.x.new_zeros(call.x.shape[-1], call.weight.shape[1] - 1)
        return call.initial_state[n]

    def conv_sums(self, window: Tensor, weight: Tensor) -> Tensor:
        """[D, T] in fp32 of a window [D, W - 1 + T]."""
        W, window, weight = weight.shape[1], window.float(), weight.float()
        return torch.stack([weight[:, j, None] * window[:, j : window.shape[1] - W + 1 + j] for j in range(W)]).sum(0)

    def conv_activation(self, y: Tensor) -> Tensor:
        return y * torch.sigmoid(y)

    def conv_state(self, window: Tensor, call: ConvCall) -> Tensor:
        return window[:, window.shape[1] - call.weight.shape[1] + 1 :]

    def conv_step(self, call: ConvCall) -> Tensor:
        """One token a sequence; the pool advances."""
        assert call.state_pool is not None
        assert call.slot_indices is not None
        y = torch.zeros_like(call.x)
        for n, slot in enumerate(call.slot_indices.tolist()):
            if self.conv_seated(slot):
                window = torch.cat([call.state_pool[slot], call.x[n][:, None]], 1)
                y[n] = self.conv_step_activation(self.conv_sums(window, call.weight))[:, 0].to(y.dtype)
                self.conv_keep(call.state_pool, slot, window)
        return y

    def conv_seated(self, slot: int) -> bool:
        return slot not in CONV.nobody

    def conv_step_activation(self, y: Tensor) -> Tensor:
        return self.conv_activation(y)

    def conv_keep(self, pool: Tensor, slot: int, window: Tensor) -> None:
        pool[slot] = window[:, 1:]
