"""Bugs of the delta rule, of the triangular inverse and of the output."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

import torch

from ..emulated import Emulated
from ..precision import to_format
from .registry import mutant

TT_INVERSE = "tt-metal #54813"


def neumann(A, terms):
    """I - A + A^2 - .. with so many powers of A."""
    total = power = torch.eye(A.shape[-1]).expand_as(A)
    for _ in range(terms):
        power = -power @ A
        total = total + power
    return total


def doubling(A, format):
    """(I - A)(I + A^2)(I + A^4).., every product rounded to a format."""
    eye = torch.eye(A.shape[-1]).expand_as(A)
    result, power = eye - A, to_format(A @ A, format)
    for _ in range(A.shape[-1].bit_length() - 2):
        result = to_format(result @ (eye + power), format)
        power = to_format(power @ power, format)
    return result


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


@mutant("inverse", "the inverse is I - A")
class Neumann1(Emulated):
    def inverse(self, A):
        return neumann(A, 1)


@mutant("inverse", "a series to A^3")
class Neumann3(Emulated):
    def inverse(self, A):
        return neumann(A, 3)


@mutant("inverse", "a series to A^7")
class Neumann7(Emulated):
    def inverse(self, A):
        return neumann(A, 7)


@mutant("inverse", "a series to A^15 where the chunk has 32 rows")
class Neumann15(Emulated):
    def inverse(self, A):
        return neumann(A, 15)


@mutant("inverse", "the inverse of I - A")
class InverseSign(Emulated):
    def inverse(self, A):
        return super().inverse(-A)


@mutant("inverse", "the transposed inverse")
class InverseTransposed(Emulated):
    def inverse(self, A):
        return super().inverse(A).transpose(1, 2)


@mutant("inverse", "doubling products in fp16", on="chunk16", link=TT_INVERSE)
class InverseDoublingFp16(Emulated):
    def inverse(self, A):
        return doubling(A, "fp16")


@mutant("inverse", "doubling products in bf16", link=TT_INVERSE)
class InverseDoublingBf16(Emulated):
    def inverse(self, A):
        return doubling(A, "bf16")


@mutant("inverse", "doubling products in fp32", link="tt-metal #54839")
class InverseDoublingFp32(Emulated):
    def inverse(self, A):
        return doubling(A, "fp32")


@mutant("inverse", "blocks of 16 rows by powers of A^4, stored in bf16", on="chunk16", link="tt-metal #55420")
class InverseByPowers(Emulated):
    def inverse(self, A):
        N, eye = -A, torch.eye(A.shape[-1]).expand_as(A)
        N2 = to_format(N @ N, "bf16")
        N4 = to_format(N2 @ N2, "bf16")
        low = to_format(eye + N + N2 + N2 @ N, "bf16")
        result = low
        for _ in range(A.shape[-1] // 4 - 1):
            result = to_format(low + N4 @ result, "bf16")
        return result


@mutant("inverse", "A is rounded to bf16 before it is inverted")
class InverseOfBf16(Emulated):
    def inverse(self, A):
        return super().inverse(to_format(A, "bf16"))


@mutant("inverse", "sub-chunks are inverted, the blocks between them are left out")
class InverseBlocks(Emulated):
    def inverse(self, A):
        block = torch.arange(A.shape[-1]) // 16
        return super().inverse(A * (block[:, None] == block))


@mutant("inverse", "the last row of a chunk is not eliminated")
class InverseLastRow(Emulated):
    def inverse(self, A):
        rows = torch.arange(A.shape[-1]) < A.shape[-1] - 1
        return super().inverse(A * rows[:, None])


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
