"""Stages 5 and 6: carry the state over a segment's chunks, and write the output on the way.

One program a segment, head and slice of value channels, with the state [K, slice] in fp32 registers:

    [v_new; o] = uo - wq S                      v_new = u - w S; the output's rows are made likewise
    S_next     = exp(G_C) S + kg^T v_new

The only serial part, so everything that can be computed without S was: a chunk is two products, one after
the other.
"""

import triton
import triton.language as tl

from .chunk_table import load_offset


@triton.jit
def kda_state_kernel(
    wq,
    uo,
    kg,
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

    DOT: tl.constexpr = wq.dtype.element_ty
    channel = tl.arange(0, KP)
    rows = tl.arange(0, CHUNK)
    state_at = ((segment.to(tl.int64) * HV + hv) * K + channel[:, None]) * V + value[None, :]
    state_mask = (channel < K)[:, None] & (value < V)[None, :]
    S = tl.zeros([KP, BV], tl.float32)
    if HAS_INITIAL:
        S = tl.load(initial_state + state_at, mask=state_mask, other=0.0)

    # scalar pointers walk, offsets stay: one addition a tensor and chunk, instead of one an element
    cell = first.to(tl.int64) * HV + hv
    wq += cell * 2 * CHUNK * KP
    uo += cell * 2 * CHUNK * VP
    kg += cell * CHUNK * KP
    chunk_decay += cell * KP
    o += (start * HV + hv) * V
    both = tl.arange(0, 2 * CHUNK)[:, None]
    o_at = rows[:, None] * (HV * V) + value[None, :]
    for n in tl.range(0, chunks, num_stages=STAGES):
        x_wq = tl.load(wq + both * KP + channel[None, :])
        x_uo = tl.load(uo + both * VP + value[None, :])
        x_kg = tl.load(kg + rows[:, None] * KP + channel[None, :])
        decay = tl.load(chunk_decay + channel)
        x_vo = x_uo - tl.dot(x_wq, S.to(DOT), input_precision=PRECISION)
        v_new, x_o = tl.split(tl.permute(tl.reshape(x_vo, [2, CHUNK, BV]), [1, 2, 0]))
        S = S * decay[:, None] + tl.dot(tl.trans(x_kg), v_new.to(DOT), input_precision=PRECISION)
        tl.store(
            o + o_at, x_o.to(o.dtype.element_ty), mask=(rows < length - n * CHUNK)[:, None] & (value < V)[None, :]
        )
        wq += HV * 2 * CHUNK * KP
        uo += HV * 2 * CHUNK * VP
        kg += HV * CHUNK * KP
        chunk_decay += HV * KP
        o += CHUNK * HV * V
    if HAS_FINAL:
        tl.store(final_state + state_at, S, mask=state_mask)
