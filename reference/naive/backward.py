"""The adjoint of the recurrence, written by hand: what a backward kernel has to compute.

Forward, with decay a = exp(g):       Adjoint, from the last token to the first; dS arrives from token t + 1:

    D    = diag(a) S_prev                 dS    += scale q do^T              dq    = scale S do
    pred = D^T k                          du     = dS^T k                    dk    = dS u
    u    = beta (v - pred)                dv     = beta du                   dbeta = <du, v - pred>
    S    = D + k u^T                      dD     = dS - k dv^T               dk   -= D dv
    o    = scale S^T q                    dg     = rowsum(D * dD)            dS    = diag(a) dD

dg needs no division by the decay: d/dg = a d/da, and a S_prev is D. Where g = -inf, D = 0 and dg = 0.

Not here: gradients of the front end. It acts on each token alone, so autograd is no loss there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..contract import check_output_grads
from ..operands import KDAGradients, prepare, sum_over_group, zero_rows_after
from .recurrent import kda_step, segments


class StepGradients(NamedTuple):
    """Gradients of one token's inputs, and dS on its way to the token before."""

    dq: Float[Tensor, "B HV K"]
    dk: Float[Tensor, "B HV K"]
    dv: Float[Tensor, "B HV V"]
    dg: Float[Tensor, "B HV K"]
    dbeta: Float[Tensor, "B HV"]
    dS: Float[Tensor, "B HV K V"]


def kda_step_backward(
    S_prev: Float[Tensor, "B HV K V"],
    q_t: Float[Tensor, "B HV K"],
    k_t: Float[Tensor, "B HV K"],
    v_t: Float[Tensor, "B HV V"],
    g_t: Float[Tensor, "B HV K"],
    beta_t: Float[Tensor, "B HV"],
    *,
    scale: float,
    do_t: Float[Tensor, "B HV V"],
    dS: Float[Tensor, "B HV K V"],
) -> StepGradients:
    """Adjoint of `kda_step`: from do_t and the gradient dS of the state it left, to that of S_prev."""
    decay = rearrange(torch.exp(g_t), "b h k -> b h k 1")
    beta_t = rearrange(beta_t, "b h -> b h 1")
    D = decay * S_prev
    error = v_t - einsum(D, k_t, "b h k v, b h k -> b h v")
    u_t = beta_t * error
    S = D + einsum(k_t, u_t, "b h k, b h v -> b h k v")

    dq = scale * einsum(S, do_t, "b h k v, b h v -> b h k")
    dS = dS + scale * einsum(q_t, do_t, "b h k, b h v -> b h k v")
    du = einsum(dS, k_t, "b h k v, b h k -> b h v")
    dv = beta_t * du
    dbeta = (du * error).sum(-1)
    dk = einsum(dS, u_t, "b h k v, b h v -> b h k")
    dk = dk - einsum(D, dv, "b h k v, b h v -> b h k")
    dD = dS - einsum(k_t, dv, "b h k, b h v -> b h k v")
    dg = (D * dD).sum(-1)
    return StepGradients(dq, dk, dv, dg, dbeta, decay * dD)


def kda_scan_backward(
    q: Float[Tensor, "B T HV K"],
    k: Float[Tensor, "B T HV K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    *,
    scale: float,
    S: Float[Tensor, "B HV K V"],
    do: Float[Tensor, "B T HV V"],
    dS: Float[Tensor, "B HV K V"],
) -> tuple[list[Tensor], Float[Tensor, "B HV K V"]]:
    """Adjoint of `kda_scan`: the loop from the last token to the first. Return [dq, dk, dv, dg, dbeta], dS.

    It keeps the state before every token, T * K * V numbers a head; a kernel keeps one a chunk and
    recomputes the rest.
    """
    states = [S]
    for t in range(q.shape[1]):
        _, S = kda_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], scale)
        states.append(S)
    grads = []
    for t in reversed(range(q.shape[1])):
        inputs = (x[:, t] for x in (q, k, v, g, beta))
        step = kda_step_backward(states[t], *inputs, scale=scale, do_t=do[:, t], dS=dS)
        grads.append(step[:-1])
        dS = step.dS
    if not grads:
        return [torch.zeros_like(x) for x in (q, k, v, g, beta)], dS
    return [torch.stack(column[::-1], dim=1) for column in zip(*grads, strict=True)], dS


def recurrent_kda_backward(
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
) -> KDAGradients:
    """Gradients of <o, do> + <final_state, dht> for the operator's inputs, by the reverse recurrence.

    Shapes and errors as for `recurrent_kda`, without a front end, g in natural log; do like o, dht like
    final_state (None: zero). Gradients come in the compute dtype (fp32, or fp64 for fp64 inputs). dh0 is given
    also where initial_state is None, as the gradient at a zero state. Rows past the last offset give 0.
    The adjoint of Eq. (1), arXiv:2510.26692.
    """
    x = prepare(q, k, v, g, beta, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    check_output_grads(do, dht, q, x.dims)
    do = do.to(x.q.dtype)
    dht = torch.zeros_like(x.h0) if dht is None else dht
    pieces, dstates = [], []
    for tokens, rows in segments(x):
        inputs = (y[:, tokens] for y in (x.q, x.k, x.v, x.g, x.beta))
        grads, dS = kda_scan_backward(*inputs, scale=x.scale, S=x.h0[rows], do=do[:, tokens], dS=dht[rows])
        pieces.append(grads)
        dstates.append(dS)
    columns = (torch.cat(column, dim=1) for column in zip(*pieces, strict=True))
    dq, dk, dv, dg, dbeta = (zero_rows_after(column, x.dims.T) for column in columns)
    return KDAGradients(sum_over_group(dq, x.dims.H), sum_over_group(dk, x.dims.H), dv, dg, dbeta, torch.cat(dstates))
