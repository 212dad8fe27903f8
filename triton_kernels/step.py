"""One token of the recurrence on the device, and its launch: what the recurrent and the decode kernel share.

A program owns the value columns [c, c + BV) of one head's state and all its K rows, so both contractions with
the state (over K) stay inside the program, and programs never speak to each other.

    S   = diag(exp(g_t)) S
    u_t = beta_t (v_t - S^T k_t)
    S   = S + k_t u_t^T
    o_t = scale * S^T q_t              Eq. (1), arXiv:2510.26692
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..reference.contract import Dims
from .gate import l2norm, log_decay
from .gate_math import write_strength
from .support import Launch, cdiv


def dims_of(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Dims:
    """Sizes of a call that has been checked."""
    B, T, H, K = q.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return Dims(B, T, H, v.shape[2], K, v.shape[3], N)


def strides(state: Tensor | None) -> tuple[int, ...]:
    """Strides of a state that may not be there."""
    return (0, 0, 0, 0) if state is None else state.stride()


def settled(x: Tensor) -> tuple[int, ...]:
    """Strides, 0 along a batch or token axis of length 1: they say nothing there, and must not compile anew."""
    B, T = x.shape[:2]
    sb, st, *inner = x.stride()
    return (sb if B > 1 else 0, st if T > 1 else 0, *inner)


def token_launch(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    tile: tuple[int, int, int],
    **own: Any,
) -> Launch:
    """One program a sequence, head and slice of V. tile: BK, BV and warps; own: what only this kernel takes.

    Token and head counts stay run-time values: another of them compiles nothing.
    """
    dims = dims_of(q, v, cu_seqlens)
    BK, BV, num_warps = tile
    tokens = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    arguments: dict[str, Any] = {**tokens, **{f"{name}_strides": settled(x) for name, x in tokens.items()}, **own}
    sizes = {"T": dims.T, "N": dims.N, "HV": dims.HV, "GROUP": dims.HV // dims.H, "K": dims.K, "V": dims.V}
    arguments |= {"cu_seqlens": cu_seqlens, "scale": scale, "BK": BK, "BV": BV, **sizes}
    return Launch(kernel, (dims.N * dims.HV * cdiv(dims.V, BV),), arguments, num_warps)


@triton.jit
def own_part(HV, GROUP, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """This program's sequence n, value head hv, its key head h, key channels and value columns; n and lanes int64."""
    slices: tl.constexpr = (V + BV - 1) // BV
    n = (tl.program_id(0) // (HV * slices)).to(tl.int64)
    hv = (tl.program_id(0) // slices) % HV
    h = hv // GROUP
    channels = tl.arange(0, BK).to(tl.int64)
    columns = (tl.program_id(0) % slices) * BV + tl.arange(0, BV).to(tl.int64)
    return n, hv, h, channels, columns


@triton.jit
def segment(cu_seqlens, n, T):
    """First token, end and batch row of sequence n (int64): row n of a batch, or a packed segment of row 0.

    Offsets are read on the device, so nobody has checked them: clamped, they can be wrong but never lead
    outside the tensors. n is int64.
    """
    if cu_seqlens is None:
        first = tl.zeros((), tl.int64)
        end = first + T
        row = n
    else:
        first = tl.minimum(tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0), T)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1).to(tl.int64), first), T)
        row = tl.zeros((), tl.int64)
    return first, end, row


@triton.jit
def token_offset(strides, row, t, head):
    """Where token t of a head begins in a [B, T, heads, ..] tensor; row and t are int64."""
    return row * strides[0] + t * strides[1] + head.to(tl.int64) * strides[2]


@triton.jit
def state_offsets(strides, n, hv, channels, columns):
    """Where a program's slice of state n, head hv lies in [N, HV, K, V]; n, channels and columns are int64."""
    base = n * strides[0] + hv.to(tl.int64) * strides[1]
    return base + channels[:, None] * strides[2] + columns[None, :] * strides[3]


@triton.jit
def read_channels(pointers, mask):
    """A token's channels in fp32; lanes past the last channel read nothing and are 0."""
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def first_token(
    q, k, v, g, beta, q_strides, k_strides, v_strides, g_strides, beta_strides, row, first, h, hv, channels, columns
):
    """Pointers to token `first` of batch row `row`, for this program's head, channels and columns."""
    q += token_offset(q_strides, row, first, h) + channels * q_strides[3]
    k += token_offset(k_strides, row, first, h) + channels * k_strides[3]
    v += token_offset(v_strides, row, first, hv) + columns * v_strides[3]
    g += token_offset(g_strides, row, first, hv) + channels * g_strides[3]
    beta += token_offset(beta_strides, row, first, hv)
    return q, k, v, g, beta


@triton.jit
def next_token(q, k, v, g, beta, q_strides, k_strides, v_strides, g_strides, beta_strides):
    """The pointers, a token on."""
    return q + q_strides[1], k + k_strides[1], v + v_strides[1], g + g_strides[1], beta + beta_strides[1]


@triton.jit
def read_token(q, k, v, g, beta, channels, columns, there, K: tl.constexpr, V: tl.constexpr):
    """The raw operands of the token that the pointers stand at; zeros, and no access, where it is not `there`."""
    in_k = channels < tl.where(there, K, 0)
    in_v = columns < tl.where(there, V, 0)
    beta_t = tl.load(beta, mask=there, other=0.0).to(tl.float32)
    return read_channels(q, in_k), read_channels(k, in_k), read_channels(v, in_v), read_channels(g, in_k), beta_t


@triton.jit
def kda_step(S, q_t, k_t, v_t, g_t, beta_t, scale):
    """One token on S [BK, BV]: return o_t [BV] and S. Lanes past K hold 0 in S, q_t, k_t and g_t, and keep it."""
    S = S * tl.exp(g_t)[:, None]
    pred = tl.sum(S * k_t[:, None], axis=0)
    u_t = beta_t * (v_t - pred)
    S = S + k_t[:, None] * u_t[None, :]
    o_t = tl.sum(S * (scale * q_t)[:, None], axis=0)
    return o_t, S


@triton.jit
def prepare_token(q_t, k_t, g_t, beta_t, A_log, dt_bias, lower_bound, l2norm_eps, BETA: tl.constexpr):
    """Front end of one token: raw projections in, operator inputs out."""
    q_t = l2norm(q_t, l2norm_eps)
    k_t = l2norm(k_t, l2norm_eps)
    g_t = log_decay(g_t, A_log, dt_bias, lower_bound)
    return q_t, k_t, g_t, write_strength(beta_t, BETA)


@triton.jit
def write_zero_rows(o, stride, first, end, step, mask):
    """Write 0 into o's rows first, first + step, .. before end; o points to this program's columns of row 0."""
    for t in range(first, end, step):
        tl.store(o + t * stride, tl.zeros(mask.shape, tl.float32), mask=mask)


@triton.jit
def write_rows_past_the_end(o, stride, cu_seqlens, n, N, T, mask):
    """Rows past the last offset hold 0: sequence n writes every N-th of them, so that nobody walks them alone."""
    if cu_seqlens is not None:
        last = tl.minimum(tl.maximum(tl.load(cu_seqlens + N).to(tl.int64), 0), T)
        write_zero_rows(o, stride, last + n, T, N, mask)
