"""The steps of one chunk of the emulated kernels, rounded where hardware rounds.

    for each segment, for each chunk (padded to C rows):              tensors [H, C, ..], fp32
        G     = cumsum(g)                     cumulative
        A     = beta_i <k_i, k_j e^(G_i-G_j)> key_products            operands rounded
        Aqk   = <q_i, k_j e^(G_i-G_j)>        query_products          operands rounded
        T     = (I + A)^-1                    inverse                 fp32, forward substitution
        w, u  = T (beta k e^G), T (beta v)    w_vectors, u_vectors    stored rounded
        v_new = u - w S                       writes
        o     = (q e^G) S + Aqk v_new         output
        S     = e^(G_C) S + (k e^(G_C-G))^T v_new     next_state

Decays between tokens: "rebased" takes sub-chunks of 16 rows with the gate at their first row as reference (matrix
products off the diagonal blocks, differences on them), "pairwise" takes all differences one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .adapter import Contract
from .precision import to_format

SUBCHUNK = 16  # rows that share one reference gate


class ChunkSteps:
    """One chunk, padded to C rows; a bug is a subclass that overrides a step."""

    contract: Contract
    rebased: bool

    def chunk(self, rows: list[Tensor], S: Tensor, length: int) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = rows
        G = self.cumulative(g)
        A = self.key_products(k, beta, G)
        Aqk = self.query_products(q, k, G)
        T = self.inverse(A)
        w = self.stored(self.w_vectors(T, k, beta, G))
        u = self.stored(self.u_vectors(T, v, beta))
        v_new = self.writes(u, w, S)
        o = self.output(q, Aqk, S, v_new, G)
        return o, self.next_state(S, k, v_new, G, self.last_gate(G, length))

    def cumulative(self, g: Tensor) -> Tensor:
        return g.cumsum(1)

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def last_gate(self, G: Tensor, length: int) -> Tensor:
        return G[:, -1:]

    def key_products(self, k: Tensor, beta: Tensor, G: Tensor) -> Tensor:
        return torch.tril(beta[..., None] * self.decayed(k, k, G), -1)

    def query_products(self, q: Tensor, k: Tensor, G: Tensor) -> Tensor:
        return torch.tril(self.decayed(q, k, G))

    def decayed(self, x: Tensor, y: Tensor, G: Tensor) -> Tensor:
        """<x_i, y_j exp(G_i - G_j)> for j <= i; what stands above the diagonal does not matter."""
        C = x.shape[1]
        if not self.rebased or C <= SUBCHUNK:
            return self.pairwise(x, y, G)
        bands = []
        for start in range(0, C, SUBCHUNK):
            own = slice(start, start + SUBCHUNK)
            reference = G[:, start : start + 1]
            left = x[:, own] * self.exp(G[:, own] - reference)
            right = y[:, :start] * self.exp(reference - G[:, :start])
            before = self.product(left, right.transpose(1, 2))
            inside = self.pairwise(x[:, own], y[:, own], G[:, own])
            after = x.new_zeros(x.shape[0], SUBCHUNK, C - start - SUBCHUNK)
            bands.append(torch.cat([before, inside, after], -1))
        return torch.cat(bands, 1)

    def pairwise(self, x: Tensor, y: Tensor, G: Tensor) -> Tensor:
        return (x[:, :, None] * y[:, None] * self.pair_decay(G)).sum(-1)

    def pair_decay(self, G: Tensor) -> Tensor:
        """exp(G_i - G_j), masked before the exponential; the diagonal is 1 and has no gradient."""
        future = torch.triu(torch.ones(G.shape[1], G.shape[1], dtype=torch.bool), 1)[None, :, :, None]
        itself = torch.eye(G.shape[1], dtype=torch.bool)[None, :, :, None]
        apart = (G[:, :, None] - G[:, None]).masked_fill(itself, 0.0)
        return self.exp(apart.masked_fill(future, -torch.inf))

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return to_format(x, self.contract.operand) @ to_format(y, self.contract.operand)

    def stored(self, x: Tensor) -> Tensor:
        return to_format(x, self.contract.operand)

    def inverse(self, A: Tensor) -> Tensor:
        eye = torch.eye(A.shape[-1]).expand_as(A)
        return torch.linalg.solve_triangular(eye + A, eye, upper=False, unitriangular=True)

    def w_vectors(self, T: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> Tensor:
        return self.product(T, beta[..., None] * k * self.exp(G))

    def u_vectors(self, T: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return self.product(T, beta[..., None] * v)

    def writes(self, u: Tensor, w: Tensor, S: Tensor) -> Tensor:
        return u - self.product(w, S)

    def output(self, q: Tensor, Aqk: Tensor, S: Tensor, v_new: Tensor, G: Tensor) -> Tensor:
        return self.product(q * self.exp(G), S) + self.product(Aqk, v_new)

    def next_state(self, S: Tensor, k: Tensor, v_new: Tensor, G: Tensor, G_last: Tensor) -> Tensor:
        k_to_end = k * self.exp(G_last - G)
        return self.exp(G_last).transpose(1, 2) * S + self.product(k_to_end.transpose(1, 2), v_new)
