"""The reference's short convolution as an adapter: sequences, packed segments, and steps on a pool of states."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Capabilities, Contract, ConvCall, ShortConv
from kimi_linear.reference.model.convolution import short_convolution


def capabilities() -> Capabilities:
    return Capabilities(
        operations=("short_conv",),
        contracts=tuple(Contract(io=io, operand="fp32", chunk_size=None) for io in ("fp32", "bf16")),
        short_conv=ShortConv(layout="WD"),
    )


def identity() -> str:
    return "kimi_linear.reference.model.convolution.short_convolution"


def convolve(call: ConvCall, want: frozenset[str]) -> dict[str, Tensor]:
    weight, states = call.weight[:, None], call.initial_state
    if call.state_pool is not None and call.slot_indices is not None:
        return {"y": step(call.x, weight, call.state_pool, call.slot_indices)}
    ends = None if call.cu_seqlens is None else call.cu_seqlens.tolist()
    if states is None:
        N = len(call.x) if ends is None else len(ends) - 1
        states = call.x.new_zeros(N, call.weight.shape[1] - 1, call.x.shape[-1])
    if ends is None:
        y, left = short_convolution(call.x, weight, states)
        return {"y": y, "final_state": left.clone()}
    segments = zip(pairwise(ends), states, strict=True)
    pieces = [short_convolution(call.x[0, start:end], weight, state) for (start, end), state in segments]
    outputs, left_of = zip(*pieces, strict=True)
    return {"y": torch.cat(outputs)[None], "final_state": torch.stack(left_of)}


def step(x: Tensor, weight: Tensor, pool: Tensor, slots: Tensor) -> Tensor:
    """One token a sequence; rows of padding stay 0."""
    y, seated = torch.zeros_like(x), slots >= 0
    used = slots[seated].long()
    out, pool[used] = short_convolution(x[seated][:, None], weight, pool[used])
    y[seated] = out[:, 0]
    return y
