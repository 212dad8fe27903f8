"""KDA in chunks: six numbered stages, each a function of its own.

Within a chunk of C tokens, with G_i = g_1 + .. + g_i and S the state at the chunk's start:

    stage 1   G       cumulative gate, and the decays between tokens           Eq. (2)
    stage 2   A_ij    = beta_i <k_i, k_j exp(G_i - G_j)>           j < i       Eq. (6)
              Aqk_ij  = scale <q_i, k_j exp(G_i - G_j)>            j <= i      Eq. (9)
    stage 3   T       = (I + A)^-1                                             Eq. (6)
    stage 4   w       = T (beta k exp(G)),   u = T (beta v)                    Eq. (7)
    stage 5   v_new   = u - w S                                                Eq. (8)
              S_next  = exp(G_C) S + (k exp(G_C - G))^T v_new
    stage 6   o       = scale (q exp(G)) S + Aqk v_new                         Eq. (9)

Equations: arXiv:2510.26692. v_new_i is u_i of the recurrence, the write that token i makes; stages 1 to 4
solve the dependence of the writes on each other without knowing S, so that only stage 5 is serial.

Letters: h value heads, n chunks, c (or i, j) tokens of a chunk, k key and v value channels. Scale and beta
are folded into the rows they multiply: the functions take q as scale * q, and stage 2 takes beta * k.
All functions compute in the dtype they are given and are exact over any ring.

Not here: conversion of dtypes, argument checks, cutting tokens into chunks (`chunk_kda`, `ChunkLayout`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from .halving import Decays, decayed_products


class StatePass(NamedTuple):
    """What stage 5 leaves: the state at each chunk's start, each token's write, the states of the segments.

    `left` holds, step by step, the states of segments that have no chunk left; its last entry those that
    were in the pass to its end. Longest segment first in each.
    """

    S: Float[Tensor, "HV N K V"]
    v_new: Float[Tensor, "HV N C V"]
    left: list[Tensor]  # [HV, segments, K, V]


def key_products(
    beta_k: Float[Tensor, "HV N C K"], k: Float[Tensor, "HV N C K"], decays: Decays
) -> Float[Tensor, "HV N C C"]:
    """Stage 2: A_ij = beta_i <k_i, k_j exp(G_i - G_j)> for j < i, else 0."""
    return decayed_products(beta_k, k, decays, diagonal=torch.zeros_like(k[..., 0]))


def query_products(
    q: Float[Tensor, "HV N C K"], k: Float[Tensor, "HV N C K"], decays: Decays
) -> Float[Tensor, "HV N C C"]:
    """Stage 2: Aqk_ij = <q_i, k_j exp(G_i - G_j)> for j <= i, else 0; q is already scaled."""
    return decayed_products(q, k, decays, diagonal=(q * k).sum(-1))


def wy_vectors(
    T: Float[Tensor, "HV N C C"],
    beta_k: Float[Tensor, "HV N C K"],
    beta_v: Float[Tensor, "HV N C V"],
    decays: Decays,
) -> tuple[Float[Tensor, "HV N C K"], Float[Tensor, "HV N C V"]]:
    """Stage 4: w = T (beta k exp(G)) and u = T (beta v), so that each token's write is u - w S."""
    w = einsum(T, beta_k * decays.from_start, "h n i j, h n j k -> h n i k")
    u = einsum(T, beta_v, "h n i j, h n j v -> h n i v")
    return w, u


def state_pass(
    w: Float[Tensor, "HV N C K"],
    u: Float[Tensor, "HV N C V"],
    k: Float[Tensor, "HV N C K"],
    decays: Decays,
    S: Float[Tensor, "HV segments K V"],
    steps: Sequence[slice],
) -> StatePass:
    """Stage 5: carry the state from chunk to chunk, all segments side by side.

        v_new = u - w S
        S     = exp(G_C) S + (k exp(G_C - G))^T v_new

    S holds the states before the first step, longest segment first; a step is the slice of its chunks. A
    segment leaves when its chunks end, an empty one before the first step.
    """
    k_to_end = k * decays.to_end
    chunk_decay = rearrange(decays.from_start[..., -1, :], "h n k -> h n k 1")
    starts, writes, left = [S[:, :0]], [u[:, :0]], []
    for chunks in steps:
        live = chunks.stop - chunks.start
        left.append(S[:, live:])
        S = S[:, :live]
        starts.append(S)
        v_new = u[:, chunks] - einsum(w[:, chunks], S, "h n c k, h n k v -> h n c v")
        write = einsum(k_to_end[:, chunks], v_new, "h n c k, h n c v -> h n k v")
        S = chunk_decay[:, chunks] * S + write
        writes.append(v_new)
    return StatePass(torch.cat(starts, 1), torch.cat(writes, 1), [*left, S])


def chunk_output(
    q: Float[Tensor, "HV N C K"],
    Aqk: Float[Tensor, "HV N C C"],
    S: Float[Tensor, "HV N K V"],
    v_new: Float[Tensor, "HV N C V"],
    decays: Decays,
) -> tuple[Float[Tensor, "HV N C V"], Float[Tensor, "HV N C V"]]:
    """Stage 6: what the earlier chunks answer, (q exp(G)) S, and what this one does, Aqk v_new.

    The output is their sum. q is already scaled.
    """
    o_inter = einsum(q * decays.from_start, S, "h n c k, h n k v -> h n c v")
    o_intra = einsum(Aqk, v_new, "h n i j, h n j v -> h n i v")
    return o_inter, o_intra
