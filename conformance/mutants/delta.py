"""Bugs of the delta rule and of the output."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

import torch

from ..emulated import Emulated
from .registry import mutant


@mutant("delta", "no delta correction: plain linear attention")
class NoDelta(Emulated):
    def key_products(self, k, beta, G):
        return 0 * super().key_products(k, beta, G)

    def writes(self, u, w, S):
        return u


@mutant("delta", "the state is not asked before a write")
class NoPrediction(Emulated):
    def writes(self, u, w, S):
        return u


@mutant("delta", "the prediction is added")
class PredictionAdded(Emulated):
    def writes(self, u, w, S):
        return u + self.product(w, S)


@mutant("delta", "A keeps its diagonal")
class KeysDiagonal(Emulated):
    def key_products(self, k, beta, G):
        return torch.tril(beta[..., None] * self.decayed(k, k, G))

    def inverse(self, A):
        eye = torch.eye(A.shape[-1]).expand_as(A)
        return torch.linalg.solve_triangular(eye + A, eye, upper=False)


@mutant("delta", "A's mask is one row too strict")
class KeysMaskStrict(Emulated):
    def key_products(self, k, beta, G):
        return torch.tril(super().key_products(k, beta, G), -2)


@mutant("delta", "keys of A are queries")
class KeysAreQueries(Emulated):
    def chunk(self, rows, S, length):
        self.q = rows[0]
        return super().chunk(rows, S, length)

    def key_products(self, k, beta, G):
        return torch.tril(beta[..., None] * self.decayed(self.q, k, G), -1)


@mutant("delta", "no gate in w: the prediction comes from the state before its decay")
class WUngated(Emulated):
    def w_vectors(self, T, k, beta, G):
        return super().w_vectors(T, k, beta, torch.zeros_like(G))


@mutant("delta", "w's gate excludes the token itself")
class WGateShifted(Emulated):
    def w_vectors(self, T, k, beta, G):
        return super().w_vectors(T, k, beta, torch.cat([torch.zeros_like(G[:, :1]), G[:, :-1]], 1))


@mutant("delta", "w is stored in steps of 1/16")
class WShort(Emulated):
    def w_vectors(self, T, k, beta, G):
        w = super().w_vectors(T, k, beta, G)
        return torch.round(w * 16) / 16


@mutant("output", "the output is read before the token's own write")
class OutputBefore(Emulated):
    def query_products(self, q, k, G):
        return torch.tril(self.decayed(q, k, G), -1)


@mutant("output", "no gate on the queries of earlier chunks")
class OutputUngated(Emulated):
    def output(self, q, Aqk, S, v_new, G):
        return super().output(q, Aqk, S, v_new, torch.zeros_like(G))


@mutant("output", "a token sees one token ahead", link="attention-gym #337")
class OutputAhead(Emulated):
    def query_products(self, q, k, G):
        return torch.tril(self.pairwise_all(q, k, G), 1)

    def pairwise_all(self, x, y, G):
        apart = (G[:, :, None] - G[:, None]).clamp(max=0.0)
        return (x[:, :, None] * y[:, None] * torch.exp(apart)).sum(-1)


@mutant("output", "2^-12 of the chunk's last write leaks into every row", link="attention-gym #337")
class OutputLeak(Emulated):
    def output(self, q, Aqk, S, v_new, G):
        return super().output(q, Aqk, S, v_new, G) + 2.0**-12 * v_new[:, -1:]


@mutant("output", "what earlier chunks answer is dropped")
class OutputIntraOnly(Emulated):
    def output(self, q, Aqk, S, v_new, G):
        return self.product(Aqk, v_new)


@mutant("output", "the output of earlier chunks is read from the state after this chunk")
class OutputNextState(Emulated):
    def output(self, q, Aqk, S, v_new, G):
        self.pending = q * self.exp(G), Aqk, v_new
        return super().output(q, Aqk, S, v_new, G)

    def chunk(self, rows, S, length):
        _, after = super().chunk(rows, S, length)
        decayed, Aqk, v_new = self.pending
        return self.product(decayed, after) + self.product(Aqk, v_new), after


@mutant("output", "u in place of v_new inside the chunk")
class OutputOldValues(Emulated):
    def writes(self, u, w, S):
        self.u = u
        return super().writes(u, w, S)

    def output(self, q, Aqk, S, v_new, G):
        return super().output(q, Aqk, S, self.u, G)


@mutant("output", "no scale", link="mlx-lm #1799")
class ScaleNone(Emulated):
    def scale_queries(self, q, call, v):
        return q


@mutant("output", "the scale is V ** -0.5")
class ScaleOfV(Emulated):
    def scale_queries(self, q, call, v):
        return q * v.shape[-1] ** -0.5


@mutant("output", "the scale is applied twice", link="mlx-lm #1799")
class ScaleTwice(Emulated):
    def scale_queries(self, q, call, v):
        return q * call.scale**2


@mutant("output", "the scale argument is ignored")
class ScaleIgnored(Emulated):
    def scale_queries(self, q, call, v):
        return q * q.shape[-1] ** -0.5
