"""A deliberately wrong kernel, to see what a failure looks like."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract, ConvCall
from kimi_linear.conformance.emulated import Emulated


class Wrong(Emulated):
    """An emulated chunk kernel whose w has no gate from the ninth row of each chunk on."""

    def w_vectors(self, T: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> Tensor:
        late = torch.arange(G.shape[1]) >= 8
        return super().w_vectors(T, k, beta, torch.where(late[:, None], 0 * G, G))


_kernel = Wrong(Contract(chunk_size=32))


def capabilities() -> Capabilities:
    return _kernel.capabilities()


def identity() -> str:
    return "a deliberately wrong kernel"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    return _kernel.run(call, want)


def convolve(call: ConvCall, want: frozenset[str]) -> dict[str, Tensor]:
    return _kernel.convolve(call, want)
