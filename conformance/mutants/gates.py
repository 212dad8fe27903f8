"""Bugs of gates."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

import torch

from ..emulated import Emulated
from ..precision import to_format
from .registry import mutant

LOG2_E, LOG2_E_BF16 = 1.4426950408889634, 1.4453125
LOG2_E_ERROR = LOG2_E_BF16 / LOG2_E


@mutant(
    "gate",
    "one gate a head: the mean over key channels (a Gated DeltaNet gate)",
    link="mlx-lm #1792",
)
class GateMean(Emulated):
    def gate(self, g):
        return g.mean(-1, keepdim=True).expand_as(g)


@mutant("gate", "the first key channel's gate for all channels", link="mlx-lm #1792")
class GateFirstChannel(Emulated):
    def gate(self, g):
        return g[..., :1].expand_as(g)


@mutant("gate", "the gate is taken for one in log2 units", link="flashinfer #2490")
class GateLog2(Emulated):
    def exp(self, x):
        return torch.exp2(x)


@mutant("gate", "a gate in natural log is scaled by log2(e) twice", link="flashinfer #2490")
class GateLog2Twice(Emulated):
    def exp(self, x):
        return torch.exp(x * LOG2_E)


@mutant("gate", "the gate is clamped at -5: a bounded gate taken for a clamp", link="tokenspeed #847")
class GateClamp(Emulated):
    def gate(self, g):
        return g.clamp(min=-5.0)


@mutant("gate", "a gate of exactly 0 is taken for a missing one, and -1 for it")
class GateZeroSkipped(Emulated):
    def gate(self, g):
        return torch.where(g == 0, torch.full_like(g, -1.0), g)


@mutant("gate", "the gate of the token before")
class GateShift(Emulated):
    def gate(self, g):
        return torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1)


@mutant("gate", "the gate is rounded to bf16")
class GateBf16(Emulated):
    def gate(self, g):
        return to_format(g, "bf16")


@mutant("gate", "gates below -20 wrap around")
class GateWraps(Emulated):
    def gate(self, g):
        return torch.where(g < -20, g + 20, g)


@mutant("gate", "the gates of the heads are in reverse order")
class GateHeadsReversed(Emulated):
    def gate(self, g):
        return g.flip(2)


@mutant("gate", "the first head's gate for all heads", link="flash-linear-attention #1115")
class GateFirstHead(Emulated):
    def gate(self, g):
        return g[:, :, :1].expand_as(g)


@mutant("gate", "the cumulative gate in bf16")
class CumulativeBf16(Emulated):
    def cumulative(self, g):
        return to_format(super().cumulative(g), "bf16")


@mutant("gate", "the cumulative gate in fp16")
class CumulativeFp16(Emulated):
    def cumulative(self, g):
        return to_format(super().cumulative(g), "fp16")


@mutant("gate", "the cumulative gate excludes the token itself")
class CumulativeExclusive(Emulated):
    def cumulative(self, g):
        return super().cumulative(g) - g


@mutant("gate", "the cumulative gate is not reset at a chunk's start")
class CumulativeNoReset(Emulated):
    def segment(self, rows, S):
        self.carry = torch.zeros_like(rows[3][:, :1])
        return super().segment(rows, S)

    def cumulative(self, g):
        G = super().cumulative(g) + self.carry
        self.carry = G[:, -1:]
        return G


@mutant("gate", "padding rows repeat the last gate instead of 0", link="cuLA #43")
class PaddingRepeatsGate(Emulated):
    def pad(self, x, C):
        padded = super().pad(x, C)
        if x.dim() == 2 or x.shape[1] == C or not (x <= 0).all():
            return padded
        return torch.cat([x, x[:, -1:].expand(-1, C - x.shape[1], -1)], 1)


@mutant("gate", "the decay to the chunk's end is read one row early", link="cuLA #38")
class LastGateEarly(Emulated):
    def last_gate(self, G, length):
        return G[:, max(length - 2, 0) : max(length - 2, 0) + 1]


@mutant("gate", "the gate at the chunk's end is read at the first row")
class LastGateFirst(Emulated):
    def last_gate(self, G, length):
        return G[:, :1]


@mutant(
    "gate",
    "exp(G) exp(-G) from the chunk's start: overflows for strong gates",
    on="chunk64",
    link="flash-linear-attention-npu #448",
)
class DecayFactored(Emulated):
    def decayed(self, x, y, G):
        return (x * torch.exp(G)) @ (y * torch.exp(-G)).transpose(1, 2)


@mutant(
    "gate",
    "exp(G) exp(-G) with the second factor clamped at exp(80)",
    on="chunk64",
    link="megagdn-pto #26",
)
class DecayClamped(Emulated):
    def decayed(self, x, y, G):
        return (x * torch.exp(G)) @ (y * torch.exp((-G).clamp(max=80.0))).transpose(1, 2)


@mutant(
    "gate",
    "the gate of a middle token as reference for a whole sub-chunk, then masked",
    link="flash-linear-attention #1240",
)
class ReferenceMiddle(Emulated):
    def pairwise(self, x, y, G):
        reference = G[:, G.shape[1] // 2 : G.shape[1] // 2 + 1]
        return self.product(x * torch.exp(G - reference), (y * torch.exp(reference - G)).transpose(1, 2))


@mutant(
    "gate",
    "the exponential before the causal mask, which multiplies",
    on="pairwise",
    link="tilelang-ascend #1460",
)
class MaskAfterExp(Emulated):
    def pair_decay(self, G):
        return torch.exp(G[:, :, None] - G[:, None])

    def key_products(self, k, beta, G):
        past = torch.tril(torch.ones(G.shape[1], G.shape[1]), -1)
        return beta[..., None] * self.decayed(k, k, G) * past

    def query_products(self, q, k, G):
        return self.decayed(q, k, G) * torch.tril(torch.ones(G.shape[1], G.shape[1]))


@mutant(
    "gate",
    "the exponential before the causal mask, which selects: a right output, and gradients of NaN",
    on="pairwise",
    link="transformers #48455",
)
class MaskSelectsAfterExp(Emulated):
    def pair_decay(self, G):
        causal = torch.tril(torch.ones(G.shape[1], G.shape[1], dtype=torch.bool))[None, :, :, None]
        return torch.where(causal, torch.exp(G[:, :, None] - G[:, None]), 0.0)


@mutant("gate", "an exponential with a relative error of 2^-7")
class ExpApproximate(Emulated):
    def exp(self, x):
        return torch.exp(x) * (1 + 2.0**-7 * torch.sin(64 * x))


@mutant("gate", "decays below 2^-6 are flushed to zero")
class ExpFlushed(Emulated):
    def exp(self, x):
        y = torch.exp(x)
        return torch.where(y < 2.0**-6, torch.zeros_like(y), y)


@mutant("gate", "no gate between keys of a chunk")
class KeysUngated(Emulated):
    def key_products(self, k, beta, G):
        return super().key_products(k, beta, torch.zeros_like(G))


@mutant("gate", "no gate between queries and keys of a chunk")
class QueriesUngated(Emulated):
    def query_products(self, q, k, G):
        return super().query_products(q, k, torch.zeros_like(G))


@mutant("gate", "log2(e) rounded to bf16")
class Log2eBf16(Emulated):
    def exp(self, x):
        return torch.exp2(x * LOG2_E_BF16)


@mutant("gate", "log2(e) rounded to bf16 in the state's decay alone")
class Log2eOfState(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        return super().next_state(S, k, v_new, G * LOG2_E_ERROR, G_last * LOG2_E_ERROR)
