"""Bugs of the triangular inverse."""

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
