"""The front end of the emulated kernels, step by step: fp32 activations, normalised q and k stored rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from .adapter import Call, Contract, FrontForm
from .precision import to_format

FRONT_ENDS = (
    FrontForm(gate="softplus", beta="sigmoid"),
    FrontForm(gate="bounded", beta="double_sigmoid", lower_bound=-3.0),
    FrontForm(),
)
FAINT = -80.0  # softplus(x) is exp(x) long before


class FrontSteps:
    """Steps that turn raw projections into the recurrence's inputs; a bug is a subclass that overrides one."""

    contract: Contract

    def front_end(self, call: Call) -> tuple[Tensor, ...]:
        """q, k, v, g, beta in fp32, each after the step that the call asks for."""
        q, k, v, g, beta = (x.float() for x in call.inputs())
        front = call.front
        if front is None:
            return q, k, v, g, beta
        if front.l2norm_eps is not None:
            q, k = (to_format(self.l2norm(x, front.l2norm_eps), self.contract.operand) for x in (q, k))
        if front.gate is not None:
            assert call.A_log is not None
            assert call.dt_bias is not None
            activation = self.softplus_gate if front.gate == "softplus" else self.bounded_gate
            g = activation(g, call.A_log[:, None], call.dt_bias, front.lower_bound)
        if front.beta is not None:
            beta = self.beta_activation(beta, front.beta)
        return q, k, v, g, beta

    def l2norm(self, x: Tensor, eps: float) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)

    def softplus_gate(self, x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
        """exp(A_log + min(x, 0)) as its root, twice, and softplus(x) without that factor: none is ever inf or 0."""
        x = x + dt_bias
        root = torch.exp((A_log + x.clamp(max=0)) / 2)
        x = x.clamp(min=FAINT)
        return -root * (root * (self.softplus(x) * torch.exp(-x.clamp(max=0))))

    def softplus(self, x: Tensor) -> Tensor:
        return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))

    def bounded_gate(self, x: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
        return lower_bound * torch.sigmoid(torch.exp(A_log) * (x + dt_bias))

    def beta_activation(self, x: Tensor, form: str) -> Tensor:
        return torch.sigmoid(x) * (2 if form == "double_sigmoid" else 1)
