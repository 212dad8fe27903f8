"""Bugs of a backward through the front end; the forward is untouched.

A wrong slope is planted by replacing x with something of the same value and another gradient.
"""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

import torch

from ..emulated import Emulated
from .registry import mutant

GATES_TRAIN_ON_NOISE = "FlashQLA #28"
FLA_RATE = "flash-linear-attention #1007"
GROUP = "front backward"


def with_gradient(x, factor):
    """x, with its gradient times a factor."""
    factor = torch.as_tensor(factor).detach()
    return x.detach() + factor * (x - x.detach())


def where_trained(mask, x):
    """x, without a gradient where the mask is false."""
    return torch.where(mask, x, x.detach())


class GateParameters(Emulated):
    """A kernel whose gates read A_log [.., HV, 1] and dt_bias [.., HV, K] as `parameters` gives them."""

    def parameters(self, x, A_log, dt_bias):
        return A_log, dt_bias

    def softplus_gate(self, x, A_log, dt_bias, lower_bound):
        A_log, dt_bias = self.parameters(x, A_log, dt_bias)
        return super().softplus_gate(x, A_log, dt_bias, lower_bound)

    def bounded_gate(self, x, A_log, dt_bias, lower_bound):
        A_log, dt_bias = self.parameters(x, A_log, dt_bias)
        return super().bounded_gate(x, A_log, dt_bias, lower_bound)


@mutant(GROUP, "dA_log is summed over the first batch item alone", link=GATES_TRAIN_ON_NOISE)
class GradRateOfBatch(GateParameters):
    def parameters(self, x, A_log, dt_bias):
        first = torch.arange(x.shape[0])[:, None, None, None] == 0
        return where_trained(first, A_log), dt_bias


@mutant(GROUP, "dA_log misses the ragged last block of 16 tokens")
class GradRateOfTokens(GateParameters):
    def parameters(self, x, A_log, dt_bias):
        whole = torch.arange(x.shape[1])[:, None, None] < x.shape[1] // 16 * 16
        return where_trained(whole, A_log), dt_bias


@mutant(GROUP, "dA_log misses the channels after the last whole block of 16")
class GradRateOfChannels(GateParameters):
    def parameters(self, x, A_log, dt_bias):
        return where_trained(torch.arange(x.shape[-1]) < x.shape[-1] // 16 * 16, A_log), dt_bias


@mutant(GROUP, "dA_log sums rows past the last segment too", link=FLA_RATE)
class GradRateOfPadding(Emulated):
    def host_gradients(self, grads, call):
        if "dA_log" not in grads or call.cu_seqlens is None:
            return grads
        past = call.g[:, int(call.cu_seqlens[-1]) :].float()
        return {**grads, "dA_log": grads["dA_log"] + past.sum((0, 1, 3))}


@mutant(GROUP, "dA_log of all heads is that of the first in their group")
class GradRateOfGroup(Emulated):
    def host_gradients(self, grads, call):
        if "dA_log" not in grads:
            return grads
        group = call.v.shape[2] // call.q.shape[2]
        heads = torch.arange(call.v.shape[2])
        return {**grads, "dA_log": grads["dA_log"][heads // group * group]}


@mutant(GROUP, "dA_log without the rate that the chain rule brings")
class GradRateOfRate(GateParameters):
    def parameters(self, x, A_log, dt_bias):
        return with_gradient(A_log, torch.exp(-A_log)), dt_bias


@mutant(GROUP, "ddt_bias is summed over heads as well")
class GradBiasOfHeads(Emulated):
    def host_gradients(self, grads, call):
        if "ddt_bias" not in grads:
            return grads
        return {**grads, "ddt_bias": grads["ddt_bias"].sum(0, keepdim=True).expand_as(grads["ddt_bias"]).clone()}


@mutant(GROUP, "ddt_bias is summed over the first batch item alone", link=GATES_TRAIN_ON_NOISE)
class GradBiasOfBatch(GateParameters):
    def parameters(self, x, A_log, dt_bias):
        first = torch.arange(x.shape[0])[:, None, None, None] == 0
        return A_log, where_trained(first, dt_bias)


@mutant(GROUP, "ddt_bias is a sum of dg rounded to bf16", on="fp32")
class GradBiasBf16(GateParameters):
    def parameters(self, x, A_log, dt_bias):
        each = dt_bias.expand_as(x)
        rounded = each.to(torch.bfloat16).float()  # its gradient is rounded too
        return A_log, each.detach() + (rounded - rounded.detach())


@mutant(GROUP, "the softplus gate's slope is 1 for every x")
class GradSoftplusSlope(Emulated):
    def softplus(self, x):
        return super().softplus(x).detach() + x - x.detach()


@mutant(GROUP, "dg of the softplus gate is a gradient of the decay: the raw projection's slope is missing")
class GradGateRaw(Emulated):
    def softplus_gate(self, x, A_log, dt_bias, lower_bound):
        return super().softplus_gate(x.detach(), A_log, dt_bias, lower_bound) + x - x.detach()


@mutant(GROUP, "the bounded gate's slope has the sign of the softplus gate's")
class GradBoundedSign(Emulated):
    def bounded_gate(self, x, A_log, dt_bias, lower_bound):
        x, A_log, dt_bias = (with_gradient(y, -1.0) for y in (x, A_log, dt_bias))
        return super().bounded_gate(x, A_log, dt_bias, lower_bound)


@mutant(GROUP, "the bounded gate's slope without its rate")
class GradBoundedRate(Emulated):
    def bounded_gate(self, x, A_log, dt_bias, lower_bound):
        x, dt_bias = (with_gradient(y, torch.exp(-A_log)) for y in (x, dt_bias))
        return super().bounded_gate(x, A_log, dt_bias, lower_bound)


@mutant(GROUP, "the normalisation's gradient without its projection")
class GradNormProjection(Emulated):
    def l2norm(self, x, eps):
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps).detach()


@mutant(GROUP, "the normalisation's gradient without the length")
class GradNormLength(Emulated):
    def l2norm(self, x, eps):
        return super().l2norm(with_gradient(x, (x.square().sum(-1, keepdim=True) + eps).sqrt()), eps)


@mutant(GROUP, "dbeta after the sigmoid, not before it")
class GradAfterSigmoid(Emulated):
    def beta_activation(self, x, form):
        return super().beta_activation(x, form).detach() + x - x.detach()


@mutant(GROUP, "dbeta of the double sigmoid without its 2")
class GradDoubleForgotten(Emulated):
    def beta_activation(self, x, form):
        return super().beta_activation(with_gradient(x, 0.5 if form == "double_sigmoid" else 1.0), form)
