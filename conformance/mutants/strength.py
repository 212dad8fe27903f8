"""Bugs of write strengths."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

import torch

from ..emulated import Emulated
from ..precision import to_format
from .registry import mutant


@mutant("strength", "beta is rounded to bf16", link="sglang #40362")
class BetaBf16(Emulated):
    def strength(self, beta):
        return to_format(beta, "bf16")


@mutant("strength", "beta is applied twice")
class BetaSquared(Emulated):
    def strength(self, beta):
        return beta * beta


@mutant("strength", "beta goes through a sigmoid again", link="sglang #17508")
class BetaSigmoidTwice(Emulated):
    def strength(self, beta):
        return torch.sigmoid(beta)


@mutant("strength", "beta is clamped to 1")
class BetaClamped(Emulated):
    def strength(self, beta):
        return beta.clamp(max=1.0)


@mutant("strength", "beta of the column instead of the row in A")
class BetaOfColumn(Emulated):
    def key_products(self, k, beta, G):
        return torch.tril(beta[:, None] * self.decayed(k, k, G), -1)


@mutant("strength", "no beta in A")
class KeysWithoutBeta(Emulated):
    def key_products(self, k, beta, G):
        return super().key_products(k, torch.ones_like(beta), G)


@mutant("strength", "no beta on v")
class ValuesWithoutBeta(Emulated):
    def u_vectors(self, T, v, beta):
        return super().u_vectors(T, v, torch.ones_like(beta))


@mutant("strength", "no beta on w")
class WWithoutBeta(Emulated):
    def w_vectors(self, T, k, beta, G):
        return super().w_vectors(T, k, torch.ones_like(beta), G)


@mutant("strength", "the heads' betas in reverse order")
class BetaHeadsReversed(Emulated):
    def strength(self, beta):
        return beta.flip(2)


@mutant("strength", "the first head's beta for all heads", link="flash-linear-attention #1115")
class BetaFirstHead(Emulated):
    def strength(self, beta):
        return beta[..., :1].expand_as(beta)
