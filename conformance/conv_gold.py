"""The truth of a short convolution in fp64, and how far from it roundings may lead."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from .adapter import ConvCall
from .capabilities import Contract
from .gold import ContractRounding, Results, row_envelope
from .limits import SAMPLES

Activation = Callable[[Tensor], Tensor]


def gated(y: Tensor) -> Tensor:
    """silu(y) = y sigmoid(y)."""
    return y * torch.sigmoid(y)


def rectified(y: Tensor) -> Tensor:
    """What silu rounds to where y is 0 or far from it."""
    return y.clamp(min=0)


def conv_truth(call: ConvCall, state: Tensor | None, activation: Activation) -> Results:
    """y [B, T, D] and the final state [N, W - 1, D], window by window; the state given is [N, W - 1, D]."""
    x, weight = call.x.double(), call.weight.double()
    W = weight.shape[1]
    N = len(x) if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    before = x.new_zeros(N, W - 1, x.shape[-1]) if state is None else state.double()
    seen = [torch.cat([before[n], piece]) for n, piece in enumerate(_pieces(call, x))]
    taps = [[weight[:, j] * window[j : len(window) - W + 1 + j] for j in range(W)] for window in seen]
    rows = [activation(torch.stack(terms).sum(0)) for terms in taps]
    y = torch.stack(rows) if call.cu_seqlens is None else torch.cat(rows)[None]
    return {"y": y, "final_state": torch.stack([window[len(window) - W + 1 :] for window in seen])}


def conv_bounds(call: ConvCall, state: Tensor, contract: Contract) -> Tensor:
    """The allowed error of each token's y."""
    exact, runs = conv_truth(call, state, gated)["y"], []
    for seed in range(SAMPLES):
        rounding = ContractRounding(contract, seed)
        with rounding:
            runs.append(rounding.to(conv_truth(call, state, gated)["y"], contract.io))
    return row_envelope(exact, runs, "o", contract)


def _pieces(call: ConvCall, x: Tensor) -> list[Tensor]:
    if call.cu_seqlens is None:
        return list(x)
    return [x[0, start:end] for start, end in pairwise(call.cu_seqlens.tolist())]
