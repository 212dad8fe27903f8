"""Stages 5 and 6: carry the state over a segment's chunks, and write the output on the way.

One program a segment, head and slice of value channels, with the state [K, slice] in fp32 registers:

    stage 5   v_new  = u - w S
              S_next = exp(G_C) S + kg^T v_new
    stage 6   o      = qg S + Aqk v_new

The only serial part: everything it reads was computed without knowing S.
"""

import triton
import triton.language as tl

from .chunk_table import load_offset


@triton.jit
def kda_state_kernel(
    w,
    u,
    qg,
    kg,
    Aqk,
    chunk_decay,
    o,
    initial_state,
    final_state,
    cu_seqlens,
    first_chunk,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    SLICES: tl.constexpr = VP // BV
    value = pid % SLICES * BV + tl.arange(0, BV)
    hv = pid // SLICES % HV
    segment = pid // (SLICES * HV)
    if PACKED:
        start = load_offset(cu_seqlens, segment, True, T).to(tl.int64)
        length = load_offset(cu_seqlens, segment + 1, True, T).to(tl.int64) - start
        first = tl.load(first_chunk + segment)
        chunks = tl.load(first_chunk + segment + 1) - first
    else:
        start = segment.to(tl.int64) * T
        length = T
        chunks = tl.cdiv(T, CHUNK)
        first = segment * chunks

    DOT: tl.constexpr = w.dtype.element_ty
    channel = tl.arange(0, KP)
    rows = tl.arange(0, CHUNK)
    state_at = ((segment.to(tl.int64) * HV + hv) * K + channel[:, None]) * V + value[None, :]
    state_mask = (channel < K)[:, None] & (value < V)[None, :]
    S = tl.zeros([KP, BV], tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial_state + state_at, mask=state_mask, other=0.0)

    cell = first.to(tl.int64) * HV + hv
    by_key = cell * CHUNK * KP + rows[:, None] * KP + channel[None, :]
    w += by_key
    qg += by_key
    kg += by_key
    u += cell * CHUNK * VP + rows[:, None] * VP + value[None, :]
    Aqk += cell * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
    chunk_decay += cell * KP + channel
    o += ((start + rows[:, None]) * HV + hv) * V + value[None, :]
    for n in tl.range(0, chunks, num_stages=STAGES):
        S_half = S.to(DOT)
        x_w = tl.load(w)
        x_u = tl.load(u)
        x_q = tl.load(qg)
        x_k = tl.load(kg)
        x_A = tl.load(Aqk)
        decay = tl.load(chunk_decay)
        v_new = (x_u - tl.dot(x_w, S_half, input_precision=PRECISION)).to(DOT)
        x_o = tl.dot(x_q, S_half, input_precision=PRECISION) + tl.dot(x_A, v_new, input_precision=PRECISION)
        S = S * decay[:, None] + tl.dot(tl.trans(x_k), v_new, input_precision=PRECISION)
        tl.store(o, x_o.to(o.dtype.element_ty), mask=(rows < length - n * CHUNK)[:, None] & (value < V)[None, :])
        w += HV * CHUNK * KP
        qg += HV * CHUNK * KP
        kg += HV * CHUNK * KP
        u += HV * CHUNK * VP
        Aqk += HV * CHUNK * CHUNK
        chunk_decay += HV * KP
        o += CHUNK * HV * V
    if HAS_FINAL:
        tl.store(final_state + state_at, S, mask=state_mask)
