"""Sums and products over a chunk by recursive halving, so that no exponent is ever positive.

A chunk's tokens are the leaves of a binary tree. Two sibling blocks of h tokens meet at the first token m of
the right one; a token i on the right and a token j on the left are apart by the decay

    exp(g_{j+1} + .. + g_i) = exp(g_m + .. + g_i) * exp(g_{j+1} + .. + g_{m-1})

one factor for each side, both sums of gates and so at most 1. Each level is then one batch of [h, h] products

    < x_i * into_right_i , y_j * out_of_left_j >

and the levels h = 1, 2, .. C/2 fill a strictly lower triangular [C, C] matrix from its diagonal outwards.
The usual exp(G_i) * exp(-G_j) overflows at the second factor, and exp(G_i - G_j) is inf - inf for a gate
of -inf; here -inf is a gate like any other, in values and in gradients.

Shapes: a level's blocks are [..., C/h, h, K]; `siblings` pairs them. All functions are exact over any ring.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor


class Level(NamedTuple):
    """Decays between sibling blocks of h tokens: pairs p = C / 2h."""

    into_right: Float[Tensor, "*batch p h K"]  # exp(g_m + .. + g_i), from the right block's start
    out_of_left: Float[Tensor, "*batch p h K"]  # exp(g_{j+1} + .. + g_{m-1}), to the left block's end


class Decays(NamedTuple):
    """Every decay inside a chunk. G is a log decay (natural log), the rest are factors in [0, 1]."""

    G: Float[Tensor, "*batch C K"]  # g_1 + .. + g_i
    from_start: Float[Tensor, "*batch C K"]  # exp(G_i)
    to_end: Float[Tensor, "*batch C K"]  # exp(g_{j+1} + .. + g_C)
    levels: tuple[Level, ...]  # h = 1, 2, .. C/2


def siblings(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[..., 2p, h, *] to the left and the right block of each pair, [..., p, h, *]."""
    left, right = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
    return left, right


def cut(x: Float[Tensor, "*batch C K"], h: int) -> Float[Tensor, "*batch C//{h} {h} K"]:
    """Cut a chunk into blocks of h tokens."""
    return rearrange(x, "... (b h) k -> ... b h k", h=h)


def cumulative_gate(g: Float[Tensor, "*batch C K"]) -> Decays:
    """Stage 1: the cumulative gate G, and all decays between tokens of a chunk.

    Going up the tree, a block's prefix sums (from its start) and suffix sums (to its end, the token itself
    excluded) are its halves' sums, plus the sibling's total where the sibling lies between.
    """
    prefix = rearrange(g, "... c k -> ... c 1 k")
    suffix = torch.zeros_like(prefix)
    levels = []
    while prefix.shape[-3] > 1:
        prefix_left, prefix_right = siblings(prefix)
        suffix_left, suffix_right = siblings(suffix)
        levels.append(Level(torch.exp(prefix_right), torch.exp(suffix_left)))
        total_left, total_right = prefix_left[..., -1:, :], prefix_right[..., -1:, :]
        prefix = torch.cat([prefix_left, total_left + prefix_right], dim=-2)
        suffix = torch.cat([suffix_left + total_right, suffix_right], dim=-2)
    G, rest = prefix.squeeze(-3), suffix.squeeze(-3)
    return Decays(G, torch.exp(G), torch.exp(rest), tuple(levels))


def cumulative_gate_backward(
    dG: Float[Tensor, "*batch C K"],
    drest: Float[Tensor, "*batch C K"],
    dlevels: list[Level],
) -> Float[Tensor, "*batch C K"]:
    """Adjoint of stage 1, down the tree; all arguments are gradients of sums of gates (log decays).

    drest belongs to the log of `to_end`. Contributions are added, never subtracted, so that gradients
    of strong gates keep their digits.
    """
    dprefix, dsuffix = rearrange(dG, "... c k -> ... 1 c k"), rearrange(drest, "... c k -> ... 1 c k")
    for dlevel in reversed(dlevels):
        dprefix_left, dprefix_right = dprefix.chunk(2, dim=-2)
        dsuffix_left, dsuffix_right = dsuffix.chunk(2, dim=-2)
        dtotal_left = dprefix_right.sum(-2, keepdim=True)
        dtotal_right = dsuffix_left.sum(-2, keepdim=True)
        dprefix_left = _add_to_last_row(dprefix_left, dtotal_left)
        dprefix_right = _add_to_last_row(dprefix_right + dlevel.into_right, dtotal_right)
        dprefix = rearrange([dprefix_left, dprefix_right], "two ... p h k -> ... (p two) h k")
        dsuffix = rearrange([dsuffix_left + dlevel.out_of_left, dsuffix_right], "two ... p h k -> ... (p two) h k")
    return dprefix.squeeze(-2)


def decayed_products(
    x: Float[Tensor, "*batch C K"],
    y: Float[Tensor, "*batch C K"],
    decays: Decays,
    diagonal: Float[Tensor, "*batch C"],
) -> Float[Tensor, "*batch C C"]:
    """M_ij = <x_i, y_j exp(G_i - G_j)> for j < i, the given diagonal, and 0 above it."""
    M = rearrange(diagonal, "... c -> ... c 1 1")
    for level in decays.levels:
        h = level.into_right.shape[-2]
        _, x_right = siblings(cut(x, h))
        y_left, _ = siblings(cut(y, h))
        cross = einsum(x_right * level.into_right, y_left * level.out_of_left, "... p i k, ... p j k -> ... p i j")
        M = merge(M, cross)
    return M.squeeze(-3)


def decayed_products_backward(
    dM: Float[Tensor, "*batch C C"],
    x: Float[Tensor, "*batch C K"],
    y: Float[Tensor, "*batch C K"],
    decays: Decays,
) -> tuple[Float[Tensor, "*batch C K"], Float[Tensor, "*batch C K"], list[Level]]:
    """Adjoint of `decayed_products` below the diagonal: dx, dy, and the gradients of each level's log decays."""
    dx, dy, dlevels = torch.zeros_like(cut(x, 1)), torch.zeros_like(cut(y, 1)), []
    for level in decays.levels:
        h = level.into_right.shape[-2]
        x_right = siblings(cut(x, h))[1] * level.into_right
        y_left = siblings(cut(y, h))[0] * level.out_of_left
        dcross = cross_blocks(dM, h)
        dx_right = einsum(dcross, y_left, "... p i j, ... p j k -> ... p i k")
        dy_left = einsum(dcross, x_right, "... p i j, ... p i k -> ... p j k")
        dlevels.append(Level(x_right * dx_right, y_left * dy_left))
        left, right = siblings(dx)
        dx = torch.cat([left, right + dx_right * level.into_right], dim=-2)
        left, right = siblings(dy)
        dy = torch.cat([left + dy_left * level.out_of_left, right], dim=-2)
    return dx.squeeze(-3), dy.squeeze(-3), dlevels


def invert_unit_lower(A: Float[Tensor, "*batch C C"]) -> Float[Tensor, "*batch C C"]:
    """(I + A)^-1 for strictly lower A, by merging inverses of the diagonal blocks over the same levels.

    With X and Y the inverses of a left and a right block, and R the block of A below the left one,

        [ I + A_left     0      ]^-1   [    X      0 ]
        [     R      I + A_right]    = [ -Y R X    Y ]

    which is forward substitution by blocks. A power series I - A + A^2 - .. is the same in exact
    arithmetic, and loses everything on keys that repeat: its terms grow before they cancel.
    """
    X = torch.ones_like(rearrange(A[..., 0], "... c -> ... c 1 1"))
    while X.shape[-3] > 1:
        left, right = siblings(X)
        R = cross_blocks(A, X.shape[-1])
        Y_R = einsum(right, R, "... p i j, ... p j l -> ... p i l")
        X = merge(X, -einsum(Y_R, left, "... p i j, ... p j l -> ... p i l"))
    return X.squeeze(-3)


def cross_blocks(M: Float[Tensor, "*batch C C"], h: int) -> Float[Tensor, "*batch p h h"]:
    """The blocks of M whose rows are a right block of h tokens and whose columns its left sibling."""
    pairs = rearrange(M, "... (p i) (q j) -> ... i j p q", i=2 * h, j=2 * h)
    on_diagonal = rearrange(pairs.diagonal(dim1=-2, dim2=-1), "... i j p -> ... p i j")
    return on_diagonal[..., h:, :h]


def merge(blocks: Float[Tensor, "*batch two_p h h"], cross: Float[Tensor, "*batch p h h"]) -> Tensor:
    """[[left, 0], [cross, right]] for each pair of diagonal blocks: [..., p, 2h, 2h]."""
    left, right = siblings(blocks)
    top = torch.cat([left, torch.zeros_like(cross)], dim=-1)
    bottom = torch.cat([cross, right], dim=-1)
    return torch.cat([top, bottom], dim=-2)


def _add_to_last_row(x: Tensor, row: Tensor) -> Tensor:
    return torch.cat([x[..., :-1, :], x[..., -1:, :] + row], dim=-2)
