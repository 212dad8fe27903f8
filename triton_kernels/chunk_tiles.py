"""Stages 1 to 3 inside tiles of 16 tokens: front end, decays, diagonal blocks of A and Aqk, their inverse.

One program of one warp a tile and head. It walks twice over the key channels: for the norms, so that k and q leave
it normalised and rounded once, and in slices, so that registers stay few, for all that a decay has part in. Three
things leave it for the chunk: k and q times their decay inside the tile, the tile's whole decay, and the 16 x 16
blocks of T and Aqk. Few programs hide little of the memory's latency, so each asks for all that it will read before
it reads the first of it (`prefetch_rows`). The arithmetic is in `chunk_products`, a slice's way in and out in
`chunk_slices`.
"""

import triton
import triton.language as tl

from .chunk_products import AT_MIDDLE, add_products_by_halving, diagonal, invert_tile, products_from_middle
from .chunk_slices import load_slice, redo_faint_rows, store_slice
from .chunk_table import locate_chunk
from .gate_math import GATE_BOUNDED_MILD, GATE_NONE, write_strength


@triton.jit
def prefetch_rows(x, rows, stride, CHANNELS: tl.constexpr):
    """Bring rows of adjacent channels into the L2 cache; x points at row 0. NVIDIA only."""
    SPAN: tl.constexpr = 128 * 8 // x.dtype.element_ty.primitive_bitwidth  # elements of a cache line
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(CHANNELS, SPAN))
    first = tl.minimum(tl.arange(0, LINES) * SPAN, CHANNELS - 1)
    lines = x + rows.to(tl.int64)[:, None] * stride + first[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def zero_rows(o, token, valid, hv, HV: tl.constexpr, V: tl.constexpr, VP: tl.constexpr):
    """o is dense, [T, HV, V] of one packed row."""
    rows = tl.arange(0, valid.shape[0])[:, None]
    value = tl.arange(0, VP)[None, :]
    at = ((token.to(tl.int64) + rows) * HV + hv) * V + value
    tl.store(o + at, tl.zeros([valid.shape[0], VP], o.dtype.element_ty), mask=valid[:, None] & (value < V))


@triton.jit(do_not_specialize=["odd"])
def kda_tiles_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    o,
    k_start,
    k_end,
    q_start,
    tile_decay,
    strength,
    T_tile,
    Aqk_tile,
    cu_seqlens,
    first_chunk,
    scale,
    lower_bound,
    l2norm_eps,
    T,
    N,
    odd,
    q_sb,
    q_st: tl.constexpr,
    q_sh,
    k_sb,
    k_st: tl.constexpr,
    k_sh,
    g_sb,
    g_st: tl.constexpr,
    g_sh,
    beta_sb,
    beta_st,
    beta_sh,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BK: tl.constexpr,
    BN: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA: tl.constexpr,
    PACKED: tl.constexpr,
    STEPS: tl.constexpr,
    DOT: tl.constexpr,
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
    PREFETCH: tl.constexpr,
    FROM_MIDDLE: tl.constexpr,
):
    pid = tl.program_id(0)
    hv = pid % HV
    tile = pid // HV % (CHUNK // TILE)
    chunk = pid // (HV * (CHUNK // TILE))
    row, segment, token, end = locate_chunk(chunk, cu_seqlens, first_chunk, T, N, PACKED, STEPS, CHUNK)
    if segment > N:
        return
    rows = tl.arange(0, TILE)
    token += tile * TILE
    valid = rows < end - token
    if segment == N:  # rows past the last segment
        zero_rows(o, token, valid, hv, HV, V, VP)
        return
    n = row.to(tl.int64)
    t = token.to(tl.int64)
    h = (hv // (HV // H)).to(tl.int64)
    q += n * q_sb + t * q_st + h * q_sh
    k += n * k_sb + t * k_st + h * k_sh
    g += n * g_sb + t * g_st + hv.to(tl.int64) * g_sh
    beta += n * beta_sb + t * beta_st + hv.to(tl.int64) * beta_sh
    r = rows.to(tl.int64)[:, None]
    if PREFETCH:
        inside = tl.minimum(token + rows, T - 1) - token
        prefetch_rows(k, inside, k_st, K)
        prefetch_rows(q, inside, q_st, K)
        prefetch_rows(g, inside, g_st, K)

    # where the tile's rows go: chunks are dense, [chunk, HV, 64, ..]
    cell = chunk.to(tl.int64) * HV + hv
    out_row = cell * CHUNK + tile * TILE
    k_end += out_row * KP
    k_start += out_row * KP
    q_start += out_row * KP
    tile_decay += (cell * (CHUNK // TILE) + tile) * KP
    rate = 0.0  # as its logarithm
    if GATE != GATE_NONE:
        rate = tl.load(A_log + hv).to(tl.float32)
        dt_bias += hv * K
    inputs = (q, k, g, dt_bias)
    strides = (q_st, k_st, g_st)
    gate = (rate, lower_bound)
    outputs = (k_start, k_end, q_start)

    kk = tl.zeros([TILE, TILE], tl.float32)
    qq = tl.zeros([TILE, TILE], tl.float32)
    qk = tl.zeros([TILE, TILE], tl.float32)
    for k0 in tl.range(0, KP, BN, disable_licm=True):
        channel = k0 + tl.arange(0, BN)
        if not FROM_MIDDLE:
            channel += 2 * odd
        mask = valid[:, None] & (channel < K)[None, :]
        x_k = tl.load(k + r * k_st + channel[None, :], mask=mask, other=0.0).to(DOT)
        x_q = tl.load(q + r * q_st + channel[None, :], mask=mask, other=0.0).to(DOT)
        k_t = tl.trans(x_k)
        qk += tl.dot(x_q, k_t, input_precision=PRECISION)
        if L2NORM:
            kk += tl.dot(x_k, k_t, input_precision=PRECISION)
            qq += tl.dot(x_q, tl.trans(x_q), input_precision=PRECISION)
    k_norm = tl.full([TILE], 1.0, tl.float32)
    q_norm = k_norm * scale
    if L2NORM:
        k_norm = tl.rsqrt(diagonal(kk) + l2norm_eps)
        q_norm = scale * tl.rsqrt(diagonal(qq) + l2norm_eps)

    # fp16 has little below 1e-5: there rows are normalised before they meet a decay, at the price of fp32 products
    FIRST: tl.constexpr = tl.float16 == DOT
    one = tl.full([TILE], 1.0, tl.float32)
    left = (one, one) if FIRST else (k_norm, q_norm)  # what still has to be applied
    A = tl.zeros([TILE, TILE], tl.float32)
    Aqk = tl.zeros([TILE, TILE], tl.float32)
    for k0 in tl.range(0, KP, BK, disable_licm=True):
        # odd is 0, which the compiler cannot know: it sees pairs of channels, no longer runs, and so lays
        # them out two to a thread with all rows of a channel in one thread, where sums over rows cost least
        channel = k0 + 2 * odd + tl.arange(0, BK)
        x_q, x_k, x_g = load_slice(inputs, strides, gate, channel, valid, K, GATE)
        at = rows[:, None] * KP + channel[None, :]
        if FROM_MIDDLE:
            A_k, Aqk_k, k_s, k_e, q_s, total = products_from_middle(x_q, x_k, x_g, PRECISION)
            store_slice(outputs, at, k_s, k_e, q_s, left, None, FROM_START=AT_MIDDLE)
            if GATE != GATE_BOUNDED_MILD:
                A_k, Aqk_k = redo_faint_rows(
                    A_k, Aqk_k, total, inputs, strides, gate, outputs, channel, k0, left, valid,
                    KP, K, GATE, PRECISION,
                )  # fmt: skip
            A += A_k
            Aqk += Aqk_k
        else:
            if FIRST:
                x_k = x_k * k_norm[:, None]
                x_q = x_q * q_norm[:, None]
            k_s, k_e, q_s, A, Aqk = add_products_by_halving(x_q, x_k, x_g, A, Aqk, DOT, PRECISION)
            store_slice(outputs, at, k_s, k_e, q_s, left, None)
            total = tl.sum(x_g, axis=0)
        tl.store(tile_decay + channel, tl.exp2(total))

    x_beta = tl.load(beta + rows.to(tl.int64) * beta_st, mask=valid, other=0.0)
    b = tl.where(valid, write_strength(x_beta.to(tl.float32), BETA), 0.0)
    tl.store(strength + cell * CHUNK + tile * TILE + rows, b)

    i = rows[:, None]
    j = rows[None, :]
    k_left, q_left = left
    A = tl.where(j < i, A * (b * k_left)[:, None] * k_left[None, :], 0.0)
    qk = tl.where(j == i, qk * q_norm[:, None] * k_norm[None, :], 0.0)
    Aqk = tl.where(j < i, Aqk * q_left[:, None] * k_left[None, :], qk)
    X = invert_tile(A, SOLVE, PRECISION)
    tl.store(T_tile + out_row * TILE + i * TILE + j, X.to(T_tile.dtype.element_ty))
    tl.store(Aqk_tile + out_row * TILE + i * TILE + j, Aqk.to(Aqk_tile.dtype.element_ty))
