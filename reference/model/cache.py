"""What a sequence leaves behind for its next token: per layer a KDA state or MLA's latents.

    KDA   the last W - 1 inputs of the three convolutions, and S [HV, K, V] in fp32: a constant size
    MLA   R + P numbers a token: the normalised latent, and the key channels that all heads share

A cache is never changed: a call takes one and returns another. So a prompt can be continued in two ways
from one cache. Appending to MLA's latents copies them; a serving engine would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ..contract import compute_dtype
from .config import KimiLinearConfig


class KDAState(NamedTuple):
    """A KDA layer's memory of N sequences."""

    conv_q: Float[Tensor, "N W_minus_1 P"]
    conv_k: Float[Tensor, "N W_minus_1 P"]
    conv_v: Float[Tensor, "N W_minus_1 P"]
    S: Float[Tensor, "N H K V"]  # fp32, or fp64 for an fp64 model

    def select(self, rows: Sequence[int]) -> KDAState:
        """The memory of some of the sequences."""
        return KDAState(*(x[list(rows)] for x in self))


class MLAState(NamedTuple):
    """An MLA layer's memory of N sequences: [L_n, R + P] for each, of its own length."""

    latents: tuple[Float[Tensor, "L R_plus_P"], ...]

    def select(self, rows: Sequence[int]) -> MLAState:
        """The memory of some of the sequences."""
        return MLAState(tuple(self.latents[n] for n in rows))


LayerState = KDAState | MLAState


@dataclass(frozen=True)
class Cache:
    """The memory of N sequences in every layer, and how many tokens each of them has had."""

    layers: tuple[LayerState, ...]
    lengths: tuple[int, ...]

    def select(self, rows: Sequence[int]) -> Cache:
        """Some of the sequences, in the order given; one may come twice."""
        layers = tuple(layer.select(rows) for layer in self.layers)
        return Cache(layers, tuple(self.lengths[n] for n in rows))

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors take."""
        tensors = [x for layer in self.layers for x in (layer.latents if isinstance(layer, MLAState) else layer)]
        return sum(x.numel() * x.element_size() for x in tensors)


def empty_cache(config: KimiLinearConfig, N: int, dtype: torch.dtype, device: torch.device | str) -> Cache:
    """The cache of N sequences that have had no token: zero states, latents of length 0."""
    P, W, H, K = config.kda_width, config.short_conv_kernel_size, config.kda_num_heads, config.kda_head_dim
    conv = torch.zeros(N, W - 1, P, dtype=dtype, device=device)
    S = torch.zeros(N, H, K, K, dtype=compute_dtype(dtype), device=device)
    latent = torch.zeros(0, config.kv_lora_rank + config.qk_rope_head_dim, dtype=dtype, device=device)
    kda, mla = KDAState(conv, conv, conv, S), MLAState((latent,) * N)
    layers = tuple(mla if config.is_mla(i) else kda for i in range(config.num_hidden_layers))
    return Cache(layers, (0,) * N)
