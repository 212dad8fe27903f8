"""Stages 5 and 6: carry the state over a segment's chunks, and write the output on the way.

One program a segment, head and slice of value channels, with its columns of the state in fp32 registers:

    v_new  = u - w S
    S_next = exp(G_C) S + kg^T v_new
    o      = qg S + Aqk v_new

The only serial part, so everything that can be computed without S was: from one state to the next it is two
products, one after the other. A program reads w, qg, kg and Aqk whole, whatever its slice, at about 50 bytes a
nanosecond; so slices are as narrow as the GPU has multiprocessors for. Two forms of the same:

    narrow  S [K, slice], slices of 16 or 32       S and v_new go to shared memory, as right operands
    wide    S^T [slice, K], slices of 64 or 128    S^T and v_new^T are left operands, which a matrix unit takes
                                                   from the registers that hold them; u comes transposed
"""

import triton
import triton.language as tl

from .chunk_table import load_offset


@triton.jit
def kda_state_kernel(
    wq,
    u,
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
    WIDE: tl.constexpr,
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

    DOT: tl.constexpr = wq.dtype.element_ty
    channel = tl.arange(0, KP)
    rows = tl.arange(0, CHUNK)
    state_cell = (segment.to(tl.int64) * HV + hv) * K * V
    state_at = channel[:, None] * V + value[None, :]
    state_mask = (channel < K)[:, None] & (value < V)[None, :]
    if WIDE:
        state_at = tl.trans(state_at)
        state_mask = tl.trans(state_mask)
    S = tl.zeros(state_at.shape, tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial_state + state_cell + state_at, mask=state_mask, other=0.0)

    # scalar pointers walk, offsets stay: one addition a tensor and chunk, instead of one an element
    cell = first.to(tl.int64) * HV + hv
    wq += cell * 2 * CHUNK * KP
    u += cell * CHUNK * VP
    kg += cell * CHUNK * KP
    Aqk += cell * CHUNK * CHUNK
    chunk_decay += cell * KP
    o += (start * HV + hv) * V
    o_at = rows[:, None] * (HV * V) + value[None, :]
    k_at = rows[:, None] * KP + channel[None, :]
    both_at = tl.arange(0, 2 * CHUNK)[:, None] * KP + channel[None, :]
    for n in tl.range(0, chunks, num_stages=STAGES):
        if WIDE:
            x_w = tl.load(wq + k_at)
            x_qg = tl.load(wq + CHUNK * KP + k_at)
            x_u = tl.load(u + value[:, None] * CHUNK + rows[None, :])
        else:
            x_wq = tl.load(wq + both_at)
            x_u = tl.load(u + rows[:, None] * VP + value[None, :])
        x_kg = tl.load(kg + k_at)
        x_Aqk = tl.load(Aqk + rows[:, None] * CHUNK + rows[None, :])
        decay = tl.load(chunk_decay + channel)
        S_dot = S.to(DOT)
        if WIDE:
            wS = tl.dot(S_dot, tl.trans(x_w), input_precision=PRECISION)
            qS = tl.dot(S_dot, tl.trans(x_qg), input_precision=PRECISION)
            v_new = (x_u - wS).to(DOT)
            S = tl.dot(v_new, x_kg, S * decay[None, :], input_precision=PRECISION)
            x_o = tl.trans(tl.dot(v_new, tl.trans(x_Aqk), qS, input_precision=PRECISION))
        else:
            wqS = tl.dot(x_wq, S_dot, input_precision=PRECISION)
            wS, qS = tl.split(tl.permute(tl.reshape(wqS, [2, CHUNK, BV]), [1, 2, 0]))
            v_new = (x_u - wS).to(DOT)
            S = S * decay[:, None] + tl.dot(tl.trans(x_kg), v_new, input_precision=PRECISION)
            x_o = tl.dot(x_Aqk, v_new, qS, input_precision=PRECISION)
        mask = (rows < length - n * CHUNK)[:, None] & (value < V)[None, :]
        tl.store(o + o_at, x_o.to(o.dtype.element_ty), mask=mask)
        wq += HV * 2 * CHUNK * KP
        u += HV * CHUNK * VP
        kg += HV * CHUNK * KP
        Aqk += HV * CHUNK * CHUNK
        chunk_decay += HV * KP
        o += CHUNK * HV * V
    if HAS_FINAL:
        tl.store(final_state + state_cell + state_at, S, mask=state_mask)
