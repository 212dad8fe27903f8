"""The kernel of `decode`: a program walks a sequence's tokens with a slice of its state in registers.

It reads q, k, v, g and beta of each token once a slice, the state once and writes it once (with speculation once a
token); the state is nearly all of the bytes.
"""

import triton
import triton.language as tl

from .pool import read_slot
from .step import (
    first_token,
    kda_step,
    next_token,
    own_part,
    prepare_token,
    read_channels,
    read_token,
    segment,
    write_rows_past_the_end,
    write_zero_rows,
)

ONCE = tl.constexpr("evict_first")  # a state is read and written once a step: let it not push others out of L2


@triton.jit(do_not_specialize=["N"])
def decode_kernel(
    q,
    k,
    v,
    g,
    beta,
    q_strides: tl.constexpr,
    k_strides: tl.constexpr,
    v_strides: tl.constexpr,
    g_strides: tl.constexpr,
    beta_strides: tl.constexpr,
    o,
    pool,
    pool_strides: tl.constexpr,
    slots,
    pad_slot,
    slot_indices,
    slot_strides: tl.constexpr,
    accepted,
    cu_seqlens,
    T,
    N,
    HV,
    GROUP,
    scale,
    A_log,
    dt_bias,
    lower_bound,
    l2norm_eps,
    BETA: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    M: tl.constexpr,
    SEVERAL: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Program (n, hv, slice of V): load the state of sequence n from its slot, walk its tokens, store the state.

    M is the number of slots a sequence has, one a token; 0 where it has a single slot for its last state. Strides
    are compiled in: addresses cost less, on the device and at every launch, and a server has few layouts.
    """
    n, hv, h, channels, columns = own_part(HV, GROUP, V, BK, BV)
    in_k, in_v = channels < K, columns < V

    kept = 1
    if accepted is not None:
        kept = tl.load(accepted + n)
    slot = read_slot(slot_indices, slot_strides, n, kept - 1, M, slots, pad_slot)
    first, end, row = segment(cu_seqlens, n, T)
    o += hv * V + columns
    write_rows_past_the_end(o, HV * V, cu_seqlens, n, N, T, in_v)
    if (slot < 0) | (first == end):
        write_zero_rows(o, HV * V, row * T + first, row * T + end, 1, in_v)
        return

    pool += hv.to(tl.int64) * pool_strides[1]
    here = channels[:, None] * pool_strides[2] + columns[None, :] * pool_strides[3]
    in_state = in_k[:, None] & in_v[None, :]
    S = tl.load(pool + slot * pool_strides[0] + here, mask=in_state, other=0.0, eviction_policy=ONCE).to(tl.float32)

    rate = A_log
    bias = dt_bias
    if A_log is not None:
        rate = tl.load(A_log + hv).to(tl.float32)
        bias = read_channels(dt_bias + hv * K + channels, in_k)
    q, k, v, g, beta = first_token(
        q, k, v, g, beta, q_strides, k_strides, v_strides, g_strides, beta_strides,
        row, first, h, hv, channels, columns,
    )  # fmt: skip
    q_t, k_t, v_t, g_t, beta_t = read_token(q, k, v, g, beta, channels, columns, first < end, K, V)
    for t in range(first, end):
        q_t, k_t, g_t, beta_t = prepare_token(q_t, k_t, g_t, beta_t, rate, bias, lower_bound, l2norm_eps, BETA)
        v_now = v_t
        q_now, k_now, g_now, beta_now = q_t, k_t, g_t, beta_t
        if SEVERAL:  # ask for the next token while this one is computed with
            q, k, v, g, beta = next_token(q, k, v, g, beta, q_strides, k_strides, v_strides, g_strides, beta_strides)
            q_t, k_t, v_t, g_t, beta_t = read_token(q, k, v, g, beta, channels, columns, t + 1 < end, K, V)
        o_t, S = kda_step(S, q_now, k_now, v_now, g_now, beta_now, scale)
        tl.store(o + (row * T + t) * HV * V, o_t, mask=in_v)
        if M > 0:
            slot_t = read_slot(slot_indices, slot_strides, n, t - first, M, slots, pad_slot)
            there = pool + slot_t * pool_strides[0] + here
            stored = (channels < tl.where(slot_t >= 0, K, 0))[:, None] & in_v[None, :]
            tl.store(there, S.to(pool.dtype.element_ty), mask=stored, eviction_policy=ONCE)
    if M == 0:
        there = pool + slot * pool_strides[0] + here
        tl.store(there, S.to(pool.dtype.element_ty), mask=in_state, eviction_policy=ONCE)
