"""Inputs as a model makes them: a text through one KDA layer's projections, with fixed-seed weights.

    bytes -> embedding -> RMSNorm -> q, k, v projections -> causal convolution of 4 tokens, SiLU
                                  -> gate (low rank, raw) and beta (raw)

Neighbouring tokens share a convolution window and equal bytes share an embedding, so keys repeat and resemble
each other as they do in a real model and never do in random draws. Weights follow the initialisation of the
published layer: A_log = log U(1, 16), dt_bias the inverse softplus of log-uniform steps in [1e-3, 1e-1].
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from ..reference import BoundedGate, FrontEnd, SoftplusGate

HIDDEN = 256  # channels of the embedding
HEADS = 2
HEAD_DIM = 128  # that of the released checkpoint
GATE_RANK = 128  # as there: the gate's projection goes through one head's width
CONV_WIDTH = 4  # tokens, as there
STEP_RANGE = (1e-3, 1e-1)  # softplus(dt_bias): decay a token before the input moves it
RATE_RANGE = (1.0, 16.0)  # exp(A_log)


class LayerInputs(NamedTuple):
    """What the operator gets from a layer: raw q, k, v, gate and beta in fp32, and the two front ends."""

    q: Float[Tensor, "1 T H K"]
    k: Float[Tensor, "1 T H K"]
    v: Float[Tensor, "1 T H V"]
    g: Float[Tensor, "1 T H K"]
    beta: Float[Tensor, "1 T H"]
    softplus: FrontEnd
    bounded: FrontEnd


def shipped_text() -> bytes:
    """The text in this package: prose, code, rules and repeated words."""
    return files(__package__).joinpath("text.txt").read_bytes()


def layer_inputs(text: bytes, seed: int = 0) -> LayerInputs:
    """Run a text through a fixed-seed KDA layer, up to the operator."""
    rng = torch.Generator().manual_seed(seed)
    width = HEADS * HEAD_DIM
    embedding = torch.randn(256, HIDDEN, generator=rng)
    x = rms_norm(embedding[torch.tensor(list(text))])[None]
    q, k, v = (short_conv(x @ _weight(rng, HIDDEN, width), _weight(rng, CONV_WIDTH, width)) for _ in range(3))
    g = x @ _weight(rng, HIDDEN, GATE_RANK) @ _weight(rng, GATE_RANK, width)
    beta = x @ _weight(rng, HIDDEN, HEADS)
    A_log, dt_bias = _gate_parameters(rng, width)
    q, k, v, g = (rearrange(y, "b t (h d) -> b t h d", h=HEADS) for y in (q, k, v, g))
    return LayerInputs(
        q, k, v, g, beta, FrontEnd(gate=SoftplusGate(A_log, dt_bias)), FrontEnd(gate=BoundedGate(A_log, dt_bias))
    )


def rms_norm(x: Float[Tensor, "*batch D"], eps: float = 1e-5) -> Float[Tensor, "*batch D"]:
    """x / sqrt(mean(x^2) + eps)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def short_conv(x: Float[Tensor, "B T D"], weight: Float[Tensor, "W D"]) -> Float[Tensor, "B T D"]:
    """Causal convolution of each channel over its last W tokens, then SiLU; zeros stand before the text."""
    padded = torch.nn.functional.pad(x, (0, 0, len(weight) - 1, 0))
    windows = padded.unfold(1, len(weight), 1)  # [B, T, D, W]
    return torch.nn.functional.silu((windows * weight.T).sum(-1))


def _weight(rng: torch.Generator, fan_in: int, fan_out: int) -> Float[Tensor, "fan_in fan_out"]:
    return torch.randn(fan_in, fan_out, generator=rng) * fan_in**-0.5


def _gate_parameters(rng: torch.Generator, width: int) -> tuple[Float[Tensor, H], Float[Tensor, width]]:
    rate = torch.empty(HEADS).uniform_(*RATE_RANGE, generator=rng)
    low, high = (torch.tensor(step).log().item() for step in STEP_RANGE)
    step = torch.empty(width).uniform_(low, high, generator=rng).exp()
    return rate.log(), step + torch.log(-torch.expm1(-step))  # the inverse of softplus
