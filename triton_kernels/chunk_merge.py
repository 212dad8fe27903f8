"""Stages 2 to 4 of a chunk of 64 tokens, made from its four tiles.

One program a chunk and head. Inside a tile everything is done (`chunk_tiles`); between tiles a decay is that
from the left tile's row to its end, the tiles between, and that from the right tile's start:

    tiles (1, 0), (2, 1), (3, 2)   k_start_i . k_end_j                        nothing between
    tiles (2, 0), (3, 0), (3, 1)   k_start_i d_2  .  d_1 k_end_j              split at the middle of the chunk

Stage 3 merges at 32 and at 64: T <- T - T A_h T. Stage 4 writes w, u, and q and k with their decay from the
chunk's start and to its end.
"""

import triton
import triton.language as tl

from .chunk_table import locate_chunk


@triton.jit
def between_tiles(x_start, k_end, first_decay, second_decay, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Stage 2: <x_i, k_j decay(j -> i)> for i and j in different tiles of one slice of channels; 0 elsewhere."""
    tile = tl.arange(0, CHUNK) // (CHUNK // 4)
    near = tl.dot(x_start, tl.trans(k_end), input_precision=PRECISION)
    x_far = x_start * tl.where((tile == 3)[:, None], second_decay[None, :], 1.0)
    k_far = k_end * tl.where((tile == 0)[:, None], first_decay[None, :], 1.0)
    far = tl.dot(x_far.to(x_start.dtype), tl.trans(k_far.to(x_start.dtype)), input_precision=PRECISION)
    is_far = (tile >= 2)[:, None] & (tile < 2)[None, :]
    is_near = tile[:, None] == tile[None, :] + 1
    return tl.where(is_near, near, tl.where(is_far, far, 0.0))


@triton.jit
def merge_inverses(X, A, h: tl.constexpr, CHUNK: tl.constexpr, SOLVE: tl.constexpr, PRECISION: tl.constexpr):
    """Stage 3: inverses of diagonal blocks of h rows to those of 2 h rows, X - X A_h X."""
    block = tl.arange(0, CHUNK) // h
    siblings = (block % 2 == 1)[:, None] & (block[:, None] == block[None, :] + 1)
    X_A = tl.dot(X.to(SOLVE), tl.where(siblings, A, 0.0).to(SOLVE), input_precision=PRECISION)
    return X - tl.dot(X_A.to(SOLVE), X.to(SOLVE), input_precision=PRECISION)


@triton.jit
def kda_chunks_kernel(
    v,
    o,
    k_start,
    k_end,
    q_start,
    tile_decay,
    row_factors,
    T_tile,
    Aqk_out,
    w,
    u,
    qg,
    kg,
    chunk_decay,
    cu_seqlens,
    first_chunk,
    T,
    N,
    v_sb,
    v_st,
    v_sh,
    v_sv,
    HV: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    PACKED: tl.constexpr,
    STEPS: tl.constexpr,
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid = tl.program_id(0)
    hv = pid % HV
    chunk = pid // HV
    row, segment, token, end = locate_chunk(chunk, cu_seqlens, first_chunk, T, N, PACKED, STEPS, CHUNK)
    if segment > N:
        return
    rows = tl.arange(0, CHUNK)
    t = (token + rows).to(tl.int64)
    valid = t < end
    if segment == N:  # rows past the last segment
        for v0 in range(0, VP, BV):
            value = v0 + tl.arange(0, BV)
            zero = tl.zeros([CHUNK, BV], o.dtype.element_ty)
            tl.store(o + (t[:, None] * HV + hv) * V + value[None, :], zero, mask=valid[:, None] & (value < V)[None, :])
        return

    DOT: tl.constexpr = k_start.dtype.element_ty
    cell = chunk.to(tl.int64) * HV + hv
    cell_row = cell * CHUNK + rows
    tile = rows // TILE
    strength = tl.load(row_factors + (cell * 3 + 0) * CHUNK + rows)
    k_norm = tl.load(row_factors + (cell * 3 + 1) * CHUNK + rows)
    q_norm = tl.load(row_factors + (cell * 3 + 2) * CHUNK + rows)

    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    Aqk = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k0 in tl.static_range(0, KP, BK):
        channel = k0 + tl.arange(0, BK)
        at = cell_row[:, None] * KP + channel[None, :]
        first_decay = tl.load(tile_decay + (cell * 4 + 1) * KP + channel)
        second_decay = tl.load(tile_decay + (cell * 4 + 2) * KP + channel)
        x_end = tl.load(k_end + at)
        A += between_tiles(tl.load(k_start + at), x_end, first_decay, second_decay, CHUNK, PRECISION)
        Aqk += between_tiles(tl.load(q_start + at), x_end, first_decay, second_decay, CHUNK, PRECISION)
    A *= (strength * k_norm)[:, None] * k_norm[None, :]
    Aqk *= q_norm[:, None] * k_norm[None, :]
    same_tile = tile[:, None] == tile[None, :]
    tl.store(Aqk_out + cell_row[:, None] * CHUNK + rows[None, :], Aqk.to(Aqk_out.dtype.element_ty), mask=~same_tile)

    # stage 3
    X = tl.load(T_tile + cell_row[:, None] * TILE + (rows % TILE)[None, :], mask=same_tile, other=0.0).to(tl.float32)
    X = merge_inverses(X, A, TILE, CHUNK, SOLVE, PRECISION)
    X = merge_inverses(X, A, 2 * TILE, CHUNK, SOLVE, PRECISION)

    # stage 4
    X_beta = (X * strength[None, :]).to(DOT)
    for v0 in tl.static_range(0, VP, BV):
        value = v0 + tl.arange(0, BV)
        at = row.to(tl.int64) * v_sb + hv.to(tl.int64) * v_sh + t[:, None] * v_st + value[None, :] * v_sv
        x_v = tl.load(v + at, mask=valid[:, None] & (value < V)[None, :], other=0.0).to(DOT)
        x_u = tl.dot(X_beta, x_v, input_precision=PRECISION)
        tl.store(u + cell_row[:, None] * VP + value[None, :], x_u.to(u.dtype.element_ty))
    X_beta = (X * (strength * k_norm)[None, :]).to(DOT)
    for k0 in tl.static_range(0, KP, BK):
        channel = k0 + tl.arange(0, BK)
        at = cell_row[:, None] * KP + channel[None, :]
        d = tile_decay + cell * 4 * KP + channel
        d0 = tl.load(d)
        d1 = tl.load(d + KP)
        d2 = tl.load(d + 2 * KP)
        d3 = tl.load(d + 3 * KP)
        before = tl.where((tile >= 1)[:, None], d0[None, :], 1.0)
        before *= tl.where((tile >= 2)[:, None], d1[None, :], 1.0)
        before *= tl.where((tile >= 3)[:, None], d2[None, :], 1.0)
        after = tl.where((tile < 1)[:, None], d1[None, :], 1.0)
        after *= tl.where((tile < 2)[:, None], d2[None, :], 1.0)
        after *= tl.where((tile < 3)[:, None], d3[None, :], 1.0)
        x_w = tl.dot(X_beta, (tl.load(k_start + at) * before).to(DOT), input_precision=PRECISION)
        tl.store(w + at, x_w.to(w.dtype.element_ty))
        tl.store(qg + at, (tl.load(q_start + at) * before * q_norm[:, None]).to(qg.dtype.element_ty))
        tl.store(kg + at, (tl.load(k_end + at) * after * k_norm[:, None]).to(kg.dtype.element_ty))
        tl.store(chunk_decay + cell * KP + channel, d0 * d1 * d2 * d3)
