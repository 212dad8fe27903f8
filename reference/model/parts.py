"""The small parts: a linear map, the two norms, the dense MLP.

Weights are left uninitialised: they come from a checkpoint (`names.load_tensors`).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..contract import compute_dtype

Where = torch.device | str | None


class Linear(nn.Module):
    """y = W x without a bias; no linear map of this model has one."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, device: Where = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """Apply the map to the last dimension."""
        return nn.functional.linear(x, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension."""

    def __init__(self, channels: int, eps: float, dtype: torch.dtype, device: Where = None) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(channels, dtype=dtype, device=device))

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Normalise in fp32 (fp64 for fp64 inputs) and round once."""
        return rms_norm(x, self.weight, self.eps).to(x.dtype)


def rms_norm(x: Float[Tensor, "*batch D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*batch D"]:
    """x / sqrt(mean(x^2) + eps) * weight in the compute dtype: fp32, or fp64 for fp64 inputs."""
    x = x.to(compute_dtype(x.dtype))
    inverse_rms = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return x * inverse_rms * weight.to(x.dtype)


def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x sigmoid(x)."""
    return x * torch.sigmoid(x)


def gated_mlp(
    x: Float[Tensor, "*batch D"],
    gate: Float[Tensor, "I D"],
    up: Float[Tensor, "I D"],
    down: Float[Tensor, "D I"],
) -> Float[Tensor, "*batch D"]:
    """down (silu(gate x) * up x): the MLP of dense layers, of the shared expert and of every routed one."""
    hidden = silu(nn.functional.linear(x, gate)) * nn.functional.linear(x, up)
    return nn.functional.linear(hidden, down)


class MLP(nn.Module):
    """The dense MLP: `gated_mlp` with the checkpoint's names for its three weights."""

    def __init__(self, channels: int, width: int, dtype: torch.dtype, device: Where = None) -> None:
        super().__init__()
        self.gate_proj = Linear(channels, width, dtype, device)
        self.up_proj = Linear(channels, width, dtype, device)
        self.down_proj = Linear(width, channels, dtype, device)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Apply the MLP to each token."""
        return gated_mlp(x, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight)
