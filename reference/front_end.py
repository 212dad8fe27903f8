"""From raw projections to the operator's inputs: normalised q and k, a log decay, a write strength."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from .activations import sigmoid
from .contract import check_choice, check_positive
from .gates import BoundedGate, SoftplusGate

L2NORM_EPS = 1e-6  # what every released KDA checkpoint was trained with
BETA_ACTIVATIONS = ("sigmoid", "double_sigmoid", None)


def l2norm(x: Float[Tensor, "*batch D"], eps: float = L2NORM_EPS) -> Float[Tensor, "*batch D"]:
    """x / sqrt(sum(x^2) + eps) over the last dimension; eps stands inside the root, so that 0 stays 0."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


@dataclass(frozen=True)
class FrontEnd:
    """Which steps turn raw projections into operator inputs; None leaves an input as it is.

    gate         SoftplusGate or BoundedGate: g is a raw projection [B, T, HV, K], of any sign
    l2norm_eps   q and k are divided by sqrt(sum(x^2) + eps)
    beta         "sigmoid": beta = sigmoid(b), in (0, 1); "double_sigmoid": 2 sigmoid(b), in (0, 2), which
                 lets the state's transition have negative eigenvalues

    All in the tier's compute dtype, after the cast from the inputs' dtype.
    """

    gate: SoftplusGate | BoundedGate | None = None
    l2norm_eps: float | None = L2NORM_EPS
    beta: Literal["sigmoid", "double_sigmoid"] | None = "sigmoid"

    def __post_init__(self) -> None:
        check_choice("beta", self.beta, BETA_ACTIVATIONS)
        if self.l2norm_eps is not None:
            check_positive("l2norm_eps", self.l2norm_eps)
        if self.gate is not None and not isinstance(self.gate, SoftplusGate | BoundedGate):
            raise TypeError(f"gate must be a SoftplusGate, a BoundedGate or None; got {type(self.gate).__name__}")

    def __call__(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T H K"],
        g: Float[Tensor, "B T HV K"],
        beta: Float[Tensor, "B T HV"],
    ) -> tuple[
        Float[Tensor, "B T H K"],
        Float[Tensor, "B T H K"],
        Float[Tensor, "B T HV K"],
        Float[Tensor, "B T HV"],
    ]:
        """Return q, k, g (log decay, natural log) and beta (write strength) for the operator."""
        if self.l2norm_eps is not None:
            q, k = l2norm(q, self.l2norm_eps), l2norm(k, self.l2norm_eps)
        if self.gate is not None:
            g = self.gate(g)
        if self.beta is not None:
            beta = sigmoid(beta)
        if self.beta == "double_sigmoid":
            beta = 2 * beta
        return q, k, g, beta
