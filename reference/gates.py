"""From a raw projection to a log decay: the two gates that KDA checkpoints use.

    softplus   g = -exp(A_log) * softplus(x + dt_bias)                 in (-inf, 0]
    bounded    g = lower_bound * sigmoid(exp(A_log) * (x + dt_bias))   in [lower_bound, 0]

g is in natural log: the channel's decay is exp(g). The bounded gate is no clamp of the softplus gate: A_log
sets its steepness, not its rate.
"""

from __future__ import annotations

from dataclasses import dataclass

from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from .activations import rate_times, rate_times_softplus, sigmoid
from .contract import check_gate_parameters, check_lower_bound


@dataclass(frozen=True)
class SoftplusGate:
    """g = -exp(A_log) * softplus(x + dt_bias): the gate of Kimi-Linear-48B (arXiv:2510.26692, section 4).

    A_log is [HV] or [1, 1, HV, 1], dt_bias [HV, K] or flat; both fp32 (fp64 beside fp64 inputs).
    Called with x [B, T, HV, K] it returns g, natural log, of the same shape and dtype.
    """

    A_log: Tensor
    dt_bias: Tensor

    def __post_init__(self) -> None:
        check_gate_parameters(self.A_log, self.dt_bias)

    def __call__(self, x: Float[Tensor, "B T HV K"]) -> Float[Tensor, "B T HV K"]:
        x = x + _per_channel(self.dt_bias, x)
        return -rate_times_softplus(_per_head(self.A_log, x), x)


@dataclass(frozen=True)
class BoundedGate:
    """g = lower_bound * sigmoid(exp(A_log) * (x + dt_bias)): the gate of Kimi K3, called "safe" elsewhere.

    Parameters as for `SoftplusGate`; lower_bound is finite and negative, in natural log.
    """

    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float = -5.0

    def __post_init__(self) -> None:
        check_gate_parameters(self.A_log, self.dt_bias)
        check_lower_bound(self.lower_bound)

    def __call__(self, x: Float[Tensor, "B T HV K"]) -> Float[Tensor, "B T HV K"]:
        x = x + _per_channel(self.dt_bias, x)
        return self.lower_bound * sigmoid(rate_times(_per_head(self.A_log, x), x))


def _per_head(A_log: Tensor, like: Tensor) -> Float[Tensor, "HV 1"]:
    return rearrange(A_log.to(like.dtype).flatten(), "hv -> hv 1")


def _per_channel(dt_bias: Tensor, like: Tensor) -> Float[Tensor, "HV K"]:
    return dt_bias.to(like.dtype).reshape(like.shape[-2:])
