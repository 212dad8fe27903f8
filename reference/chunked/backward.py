"""The adjoint of the chunk form, stage by stage in reverse: the map for a backward kernel.

    stage 6'  d(qG)   = do S^T                         dAqk = lower(do v_new^T)       dv_new = Aqk^T do
    stage 5'  dv_new += kE dS                          dkE  = v_new dS^T              dw     = -dv_new S^T
              dS      = exp(G_C) dS + qG^T do - w^T dv_new                            (chunks in reverse)
    stage 4'  dx      = T^T dw                         dy   = T^T du,  du = dv_new    (x = beta k exp(G), y = beta v)
    stage 3'  dA      = -strict_lower(dx w^T + dy u^T)
    stage 2'  dq, dk, dbeta and the log decays of every level, from dA and dAqk
    stage 1'  dg      from the gradients of all log decays

with qG = scale q exp(G) and kE = k exp(G_C - G). dT is never formed: dA = -T^T dT T^T and T x = w, T y = u.
No gradient divides by a decay and none is a difference of long sums, so a gate of -inf gives dg = 0.

Not here: gradients of the front end. It acts on each token alone, so autograd is no loss there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..contract import check_chunk_size, check_output_grads
from ..operands import KDAGradients, prepare, sum_over_group
from .forward import CHUNK_SIZE, ChunkStages, run_all_stages
from .halving import Level, cumulative_gate_backward, decayed_products_backward


class OutputGradients(NamedTuple):
    """Stage 6': what the output asks of the queries, of Aqk, of the writes and of the state."""

    dq_decayed: Float[Tensor, "HV N C K"]
    dAqk: Float[Tensor, "HV N C C"]
    dv_new: Float[Tensor, "HV N C V"]
    dS: Float[Tensor, "HV N K V"]


class StatePassGradients(NamedTuple):
    """Stage 5': gradients of the writes, of w and of the keys at the chunk's end; dS after each chunk."""

    dv_new: Float[Tensor, "HV N C V"]
    dw: Float[Tensor, "HV N C K"]
    dk_to_end: Float[Tensor, "HV N C K"]
    dS_next: Float[Tensor, "HV N K V"]
    dh0: Float[Tensor, "segments HV K V"]


def chunk_output_backward(do: Float[Tensor, "HV N C V"], x: ChunkStages) -> OutputGradients:
    """Stage 6': adjoint of o = (q exp(G)) S + Aqk v_new, q already scaled."""
    q_decayed = x.inputs.q * x.decays.from_start
    dq_decayed = einsum(do, x.S, "h n c v, h n k v -> h n c k")
    dAqk = torch.tril(einsum(do, x.v_new, "h n i v, h n j v -> h n i j"))
    dv_new = einsum(x.Aqk, do, "h n i j, h n i v -> h n j v")
    dS = einsum(q_decayed, do, "h n c k, h n c v -> h n k v")
    return OutputGradients(dq_decayed, dAqk, dv_new, dS)


def state_pass_backward(
    out: OutputGradients, dht: Float[Tensor, "segments HV K V"], x: ChunkStages
) -> StatePassGradients:
    """Stage 5': from the last chunk to the first; a segment joins the pass at its own last chunk."""
    k_to_end = x.inputs.k * x.decays.to_end
    chunk_decay = rearrange(x.decays.from_start[..., -1, :], "h n k -> h n k 1")
    waiting = x.layout.longest_first(dht)
    dS = waiting[:, :0]
    dv_news, dS_nexts = [out.dv_new[:, :0]], [dS]
    for chunks in reversed(x.layout.steps):
        dS = torch.cat([dS, waiting[:, dS.shape[1] : chunks.stop - chunks.start]], dim=1)
        dS_nexts.append(dS)
        dv_new = out.dv_new[:, chunks] + einsum(k_to_end[:, chunks], dS, "h n c k, h n k v -> h n c v")
        dS = chunk_decay[:, chunks] * dS + out.dS[:, chunks]
        dS = dS - einsum(x.w[:, chunks], dv_new, "h n c k, h n c v -> h n k v")
        dv_news.append(dv_new)
    dv_new, dS_next = torch.cat(dv_news[::-1], dim=1), torch.cat(dS_nexts[::-1], dim=1)
    dw = -einsum(dv_new, x.S, "h n c v, h n k v -> h n c k")
    dk_to_end = einsum(x.v_new, dS_next, "h n c v, h n k v -> h n c k")
    dh0 = x.layout.segment_order([waiting[:, dS.shape[1] :], dS])
    return StatePassGradients(dv_new, dw, dk_to_end, dS_next, dh0)


def wy_backward(
    dw: Float[Tensor, "HV N C K"], du: Float[Tensor, "HV N C V"], x: ChunkStages
) -> tuple[Float[Tensor, "HV N C K"], Float[Tensor, "HV N C V"], Float[Tensor, "HV N C C"]]:
    """Stages 4' and 3': gradients of beta k exp(G), of beta v, and of A."""
    dbeta_k_decayed = einsum(x.T, dw, "h n i j, h n i k -> h n j k")
    dbeta_v = einsum(x.T, du, "h n i j, h n i v -> h n j v")
    dA = einsum(dbeta_k_decayed, x.w, "h n i k, h n j k -> h n i j")
    dA = dA + einsum(dbeta_v, x.u, "h n i v, h n j v -> h n i j")
    return dbeta_k_decayed, dbeta_v, -torch.tril(dA, diagonal=-1)


def inputs_backward(
    out: OutputGradients, carried: StatePassGradients, x: ChunkStages
) -> tuple[list[Tensor], Float[Tensor, "HV N C K"]]:
    """Stages 4' to 1': [dq, dk, dv, dbeta] of the chunked inputs (dq of scale * q), and dg."""
    y, decays = x.inputs, x.decays
    dbeta_k_decayed, dbeta_v, dA = wy_backward(carried.dw, carried.dv_new, x)
    dbeta_k, dk_A, levels_A = decayed_products_backward(dA, y.beta_k, y.k, decays)
    dq, dk_Aqk, levels_Aqk = decayed_products_backward(out.dAqk, y.q, y.k, decays)

    diagonal = rearrange(out.dAqk.diagonal(dim1=-2, dim2=-1), "h n c -> h n c 1")
    dbeta_k = dbeta_k + dbeta_k_decayed * decays.from_start
    dq = dq + out.dq_decayed * decays.from_start + diagonal * y.k
    dk = dk_A + dk_Aqk + carried.dk_to_end * decays.to_end + diagonal * y.q + y.beta * dbeta_k
    dbeta = (dbeta_k * y.k).sum(-1) + (dbeta_v * y.v).sum(-1)

    dG = decays.from_start * (y.q * out.dq_decayed + y.beta_k * dbeta_k_decayed)
    dG_end = decays.from_start[..., -1, :] * (x.S * carried.dS_next).sum(-1)
    dG = torch.cat([dG[..., :-1, :], dG[..., -1:, :] + rearrange(dG_end, "h n k -> h n 1 k")], dim=-2)
    drest = y.k * decays.to_end * carried.dk_to_end
    dlevels = [
        Level(a.into_right + b.into_right, a.out_of_left + b.out_of_left)
        for a, b in zip(levels_A, levels_Aqk, strict=True)
    ]
    return [dq, dk, y.beta * dbeta_v, dbeta], cumulative_gate_backward(dG, drest, dlevels)


def chunk_kda_backward(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    do: Float[Tensor, "B T HV V"],
    dht: Float[Tensor, "N HV K V"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> KDAGradients:
    """Gradients of <o, do> + <final_state, dht> for the operator's inputs, from the chunk form.

    Shapes and errors as for `chunk_kda`, without a front end, g in natural log; do like o, dht like final_state
    (None: zero). The forward stages are recomputed. Gradients come in the compute dtype (fp32, or fp64 for fp64
    inputs); dh0 is given also where initial_state is None, as the gradient at a zero state. Rows past the last
    offset give 0. The adjoint of section 3, arXiv:2510.26692.
    """
    check_chunk_size(chunk_size)
    x = prepare(q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    check_output_grads(do, dht, q, x.dims)
    stages = run_all_stages(x, chunk_size)
    out = chunk_output_backward(stages.layout.split(do.to(x.q.dtype)), stages)
    carried = state_pass_backward(out, torch.zeros_like(x.h0) if dht is None else dht, stages)
    chunked, dg = inputs_backward(out, carried, stages)
    dq, dk, dv, dbeta = (stages.layout.join(dx) for dx in chunked)
    H = x.dims.H
    return KDAGradients(
        sum_over_group(x.scale * dq, H),
        sum_over_group(dk, H),
        dv,
        stages.layout.join(dg),
        dbeta,
        carried.dh0,
    )
