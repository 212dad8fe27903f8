"""The short causal convolution in front of KDA's queries, keys and values, with its state."""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..contract import compute_dtype
from .parts import Where, silu
from .segments import Segments


def short_convolution(
    x: Float[Tensor, "*batch T P"],
    weight: Float[Tensor, "P 1 W"],
    state: Float[Tensor, "*batch W_minus_1 P"],
) -> tuple[Float[Tensor, "*batch T P"], Float[Tensor, "*batch W_minus_1 P"]]:
    """Each channel's weighted sum over the last W tokens, then SiLU.

        y_t = silu(sum_w weight_w x_{t - W + 1 + w}),    the last tap reads x_t itself

    `state` holds the W - 1 inputs before the first token (zeros at a text's start); returned is y, and the
    state for the token after the last. T = 0 returns an empty y and the state as it was. Sums in fp32.
    Section 4, arXiv:2510.26692.
    """
    T, wide = x.shape[-2], compute_dtype(x.dtype)
    seen = torch.cat([state, x], dim=-2)
    taps = rearrange(weight.to(wide), "p 1 w -> w p")
    terms = [tap * seen[..., w : w + T, :].to(wide) for w, tap in enumerate(taps)]
    y = torch.stack(terms).sum(0)
    return silu(y).to(x.dtype), seen[..., T:, :]


class ShortConvolution(nn.Module):
    """`short_convolution` of every sequence, with the checkpoint's weight [P, 1, W]."""

    def __init__(self, channels: int, taps: int, dtype: torch.dtype, device: Where = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps, dtype=dtype, device=device))

    def forward(
        self, x: Float[Tensor, "B T P"], state: Float[Tensor, "N W_minus_1 P"], segments: Segments
    ) -> tuple[Float[Tensor, "B T P"], Float[Tensor, "N W_minus_1 P"]]:
        """A batch at once, packed segments one by one."""
        if not segments.packed:
            return short_convolution(x, self.weight, state)
        pieces = zip(segments.split(x), state, strict=True)
        outputs, states = zip(*(short_convolution(piece, self.weight, s) for piece, s in pieces), strict=True)
        return segments.join(outputs), torch.stack(states)
