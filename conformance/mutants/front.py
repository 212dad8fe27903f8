"""Bugs of front ends: normalisation, gate and beta activations."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch

from ..emulated import Emulated
from ..precision import to_format
from .registry import mutant

EPS = "Rapid-MLX #1817"
RAW_ZERO = 0.6931  # softplus(0)


@mutant("front", "eps stands outside the root", link=EPS)
class EpsOutsideRoot(Emulated):
    def l2norm(self, x, eps):
        return x / (x.norm(dim=-1, keepdim=True) + eps)


@mutant("front", "eps is 1e-5 where 1e-6 is meant", link=EPS)
class EpsTenfold(Emulated):
    def l2norm(self, x, eps):
        return super().l2norm(x, 10 * eps)


@mutant("front", "eps is a floor of the length and not a term of it", link=EPS)
class EpsAsFloor(Emulated):
    def l2norm(self, x, eps):
        return x / x.norm(dim=-1, keepdim=True).clamp(min=eps)


@mutant("front", "eps is added to the mean of squares and not to their sum", link=EPS)
class EpsOfMean(Emulated):
    def l2norm(self, x, eps):
        return super().l2norm(x, eps * x.shape[-1])


@mutant("front", "no eps: a row of 0 becomes NaN")
class EpsForgotten(Emulated):
    def l2norm(self, x, eps):
        return super().l2norm(x, 0.0)


@mutant("front", "the bounded gate is a clamp of the softplus gate", link="tokenspeed #847")
class BoundedAsClamp(Emulated):
    def bounded_gate(self, x, A_log, dt_bias, lower_bound):
        return self.softplus_gate(x, A_log, dt_bias, lower_bound).clamp(min=lower_bound)


@mutant("front", "the softplus gate where the bounded one is asked for", link="tokenspeed #847")
class SoftplusForBounded(Emulated):
    def bounded_gate(self, x, A_log, dt_bias, lower_bound):
        return self.softplus_gate(x, A_log, dt_bias, lower_bound)


@mutant("front", "the bounded gate where the softplus one is asked for", link="FlashKDA #3")
class BoundedForSoftplus(Emulated):
    def softplus_gate(self, x, A_log, dt_bias, lower_bound):
        return self.bounded_gate(x, A_log, dt_bias, -5.0)


@mutant("front", "the form of the gate is that of the first call of a size", link="aiter #4577")
class GateFormKept(Emulated):
    @cached_property
    def kept(self):
        return {}

    def front_end(self, call):
        if call.front is not None and call.front.gate is not None:
            gate = self.kept.setdefault(tuple(call.g.shape), call.front.gate)
            call = replace(call, front=replace(call.front, gate=gate))
        return super().front_end(call)


@mutant("front", "the lower bound is always -5")
class BoundFixed(Emulated):
    def bounded_gate(self, x, A_log, dt_bias, lower_bound):
        return super().bounded_gate(x, A_log, dt_bias, -5.0)


@mutant("front", "the bounded gate's rate multiplies x and not the bias")
class BiasOutsideRate(Emulated):
    def bounded_gate(self, x, A_log, dt_bias, lower_bound):
        return lower_bound * torch.sigmoid(torch.exp(A_log) * x + dt_bias)


@mutant("front", "dt_bias is read per head", link="mlx-lm #1792")
class BiasPerHead(Emulated):
    def softplus_gate(self, x, A_log, dt_bias, lower_bound):
        return super().softplus_gate(x, A_log, dt_bias[:, :1], lower_bound)


@mutant("front", "the bounded gate forgets its bias")
class BiasForgotten(Emulated):
    def bounded_gate(self, x, A_log, dt_bias, lower_bound):
        return super().bounded_gate(x, A_log, 0 * dt_bias, lower_bound)


@mutant("front", "the first head's rate for all", link="flash-linear-attention #1115")
class RateFirstHead(Emulated):
    def softplus_gate(self, x, A_log, dt_bias, lower_bound):
        return super().softplus_gate(x, A_log[:1], dt_bias, lower_bound)


@mutant("front", "A_log is taken for the rate itself")
class RateLogTaken(Emulated):
    def softplus_gate(self, x, A_log, dt_bias, lower_bound):
        return -A_log * self.softplus(x + dt_bias)


@mutant("front", "exp(A_log) is inf before it meets a softplus of 0", link="lattice #314")
class RateOverflows(Emulated):
    def softplus_gate(self, x, A_log, dt_bias, lower_bound):
        return -torch.exp(A_log) * self.softplus(x + dt_bias)


@mutant("front", "softplus as log(1 + exp(x)), with no branch for large x: inf above 89", link="1bit-MONSTER #628")
class SoftplusOverflows(Emulated):
    def softplus(self, x):
        return torch.log(1 + torch.exp(x))


@mutant("front", "softplus as log(1 + exp(x)): 0 below -17", on="fp32")
class SoftplusNaive(Emulated):
    def softplus(self, x):
        return torch.where(x < 20, torch.log(1 + torch.exp(x.clamp(max=20))), x)


@mutant("front", "a gate's result is rounded to bf16", on="fp32")
class GateActivationBf16(Emulated):
    def softplus_gate(self, x, A_log, dt_bias, lower_bound):
        return to_format(super().softplus_gate(x, A_log, dt_bias, lower_bound), "bf16")


@mutant("front", "a raw gate is rounded to bf16 before its activation", on="fp32")
class RawGateBf16(Emulated):
    def bounded_gate(self, x, A_log, dt_bias, lower_bound):
        return super().bounded_gate(to_format(x, "bf16"), A_log, dt_bias, lower_bound)


@mutant("front", "a raw gate of 0 is taken for no gate", link="mamba #368")
class RawZeroNoGate(Emulated):
    def softplus_gate(self, x, A_log, dt_bias, lower_bound):
        return torch.where(x == 0, 0 * x, super().softplus_gate(x, A_log, dt_bias, lower_bound))


@mutant("front", "padded rows of a chunk hold a raw 0, and their activation decays the state", link="mamba #368")
class PaddingActivated(Emulated):
    raw = False

    def front_end(self, call):
        self.raw = call.front is not None and call.front.gate is not None
        return super().front_end(call)

    def chunk(self, rows, S, length):
        padded = self.raw * (torch.arange(rows[3].shape[1]) >= length)
        return super().chunk([*rows[:3], rows[3] - RAW_ZERO * padded[:, None], rows[4]], S, length)


@mutant("front", "beta goes through its sigmoid twice", link="sglang #17508")
class SigmoidTwice(Emulated):
    def beta_activation(self, x, form):
        return super().beta_activation(super().beta_activation(x, form), form)


@mutant("front", "a logit is taken for a write strength")
class LogitAsStrength(Emulated):
    def beta_activation(self, x, form):
        return x.clamp(0, 1)


@mutant("front", "the double sigmoid is a single one")
class DoubleForgotten(Emulated):
    def beta_activation(self, x, form):
        return super().beta_activation(x, "sigmoid")


@mutant("front", "a sigmoid's result is rounded to bf16", on="fp32", link="sglang #38975")
class SigmoidBf16(Emulated):
    def beta_activation(self, x, form):
        return to_format(super().beta_activation(x, form), "bf16")


@mutant("front", "logits are clamped to +-8", on="fp32")
class LogitClamped(Emulated):
    def beta_activation(self, x, form):
        return super().beta_activation(x.clamp(-8, 8), form)
