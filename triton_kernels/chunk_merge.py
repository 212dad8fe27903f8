"""Stages 2 to 4 of a chunk of 64 tokens, made from its four tiles.

One program a chunk and head. Inside a tile everything is done (`chunk_tiles`); between tiles a decay is that
from the left tile's row to its end, the tiles between, and that from the right tile's start:

    tiles (1, 0), (3, 2)                  x_start_i . k_end_j                      nothing between
    tiles (2, 0), (2, 1), (3, 0), (3, 1)  x_start_i d_2  .  d_1 k_end_j            split at the middle of the chunk

with d_2 for rows of tile 3 and d_1 for those of tile 0 only. Stage 3 merges at 32 and at 64: T <- T - T A_h T.
Stage 4 writes w and u; qg = q exp(G) lies below w, because the serial kernel multiplies both by the same state.

The kernel waits for memory, so what it holds decides its speed: at 168 registers three programs of four warps
share a multiprocessor. Hence the queries come first, whole, and leave nothing behind; kg leaves while k_end is at
hand; and small loads go before the products that would make them wait.
"""

import triton
import triton.language as tl

from .chunk_table import locate_chunk


@triton.jit
def by_tile(f0, f1, f2, f3, CHUNK: tl.constexpr):
    """To each row the factors of its tile."""
    tile = (tl.arange(0, CHUNK) // (CHUNK // 4))[:, None]
    return tl.where(tile < 2, tl.where(tile == 0, f0, f1), tl.where(tile == 2, f2, f3))


@triton.jit
def decay_before(d_0, d_1, d_2, CHUNK: tl.constexpr):
    """From the chunk's start to that of each row's tile."""
    return by_tile(1.0, d_0[None, :], (d_0 * d_1)[None, :], (d_0 * d_1 * d_2)[None, :], CHUNK)


@triton.jit
def add_between_tiles(M, x_start, k_end, d_1, d_2, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Stage 2: M + <x_i, k_j decay(j -> i)> for i and j in different tiles, for one slice of channels."""
    tile = tl.arange(0, CHUNK) // (CHUNK // 4)
    neighbours = (tile % 2 == 1)[:, None] & (tile[:, None] == tile[None, :] + 1)
    M += tl.where(neighbours, tl.dot(x_start, tl.trans(k_end), input_precision=PRECISION), 0.0)
    right = tile[:, None] >= 2  # selected, not multiplied by 0: a thread knows which tile its rows are of
    x_far = tl.where(right, (x_start * by_tile(1.0, 1.0, 1.0, d_2[None, :], CHUNK)).to(x_start.dtype), 0.0)
    k_far = tl.where(right, 0.0, (k_end * by_tile(d_1[None, :], 1.0, 1.0, 1.0, CHUNK)).to(k_end.dtype))
    return tl.dot(x_far, tl.trans(k_far), M, input_precision=PRECISION)


@triton.jit
def merge_inverses(X, A, h: tl.constexpr, CHUNK: tl.constexpr, SOLVE: tl.constexpr, PRECISION: tl.constexpr):
    """Stage 3: inverses of diagonal blocks of h rows to those of 2 h rows, X - X A_h X."""
    block = tl.arange(0, CHUNK) // h
    siblings = (block % 2 == 1)[:, None] & (block[:, None] == block[None, :] + 1)
    X_A = tl.dot(X.to(SOLVE), tl.where(siblings, A, 0.0).to(SOLVE), input_precision=PRECISION)
    return X - tl.dot(X_A.to(SOLVE), X.to(SOLVE), input_precision=PRECISION)


@triton.jit
def apply_inverse(X, X_rest, y, TWICE: tl.constexpr, PRECISION: tl.constexpr):
    """Stage 4: T y. With X_rest, what X was rounded by, where keys may cancel: one and its negative, beta = 2."""
    product = tl.dot(X, y, input_precision=PRECISION)
    if TWICE:
        product += tl.dot(X_rest, y, input_precision=PRECISION)
    return product


@triton.jit
def kda_chunks_kernel(
    v,
    k_start,
    k_end,
    q_start,
    tile_decay,
    strength,
    T_tile,
    Aqk_tile,
    wq,
    u,
    kg,
    Aqk,
    chunk_decay,
    cu_seqlens,
    first_chunk,
    T,
    N,
    v_sb,
    v_st: tl.constexpr,
    v_sh,
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
    WIDE: tl.constexpr,
):
    pid = tl.program_id(0)
    hv = pid % HV
    chunk = pid // HV
    row, segment, token, end = locate_chunk(chunk, cu_seqlens, first_chunk, T, N, PACKED, STEPS, CHUNK)
    if segment >= N:
        return
    rows = tl.arange(0, CHUNK)
    valid = rows < end - token

    DOT: tl.constexpr = k_start.dtype.element_ty
    cell = chunk.to(tl.int64) * HV + hv
    k_start += cell * CHUNK * KP
    k_end += cell * CHUNK * KP
    q_start += cell * CHUNK * KP
    kg += cell * CHUNK * KP
    wq += cell * 2 * CHUNK * KP
    u += cell * CHUNK * VP
    Aqk += cell * CHUNK * CHUNK
    chunk_decay += cell * KP
    tile_decay += cell * (CHUNK // TILE) * KP
    T_tile += cell * CHUNK * TILE
    Aqk_tile += cell * CHUNK * TILE
    tile = rows // TILE
    same_tile = tile[:, None] == tile[None, :]
    tile_at = rows[:, None] * TILE + (rows % TILE)[None, :]

    # stage 2: Aqk between tiles; qg on the way
    M_tile = tl.load(Aqk_tile + tile_at, mask=same_tile, other=0.0)
    M = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k0 in tl.range(0, KP, BK, loop_unroll_factor=2):
        channel = k0 + tl.arange(0, BK)
        at = rows[:, None] * KP + channel[None, :]
        d_0 = tl.load(tile_decay + channel)
        d_1 = tl.load(tile_decay + KP + channel)
        d_2 = tl.load(tile_decay + 2 * KP + channel)
        x_q = tl.load(q_start + at)
        x_end = tl.load(k_end + at)
        before = decay_before(d_0, d_1, d_2, CHUNK)
        tl.store(wq + CHUNK * KP + at, (x_q * before).to(DOT))
        M = add_between_tiles(M, x_q, x_end, d_1, d_2, CHUNK, PRECISION)
    M += M_tile.to(tl.float32)
    tl.store(Aqk + rows[:, None] * CHUNK + rows[None, :], M.to(DOT))

    # stage 2: A between tiles; kg on the way
    beta = tl.load(strength + cell * CHUNK + rows)
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k0 in tl.range(0, KP, BK, loop_unroll_factor=2):
        channel = k0 + tl.arange(0, BK)
        at = rows[:, None] * KP + channel[None, :]
        d_1 = tl.load(tile_decay + KP + channel)
        d_2 = tl.load(tile_decay + 2 * KP + channel)
        d_3 = tl.load(tile_decay + 3 * KP + channel)
        x_end = tl.load(k_end + at)
        x_start = tl.load(k_start + at)
        after = by_tile((d_1 * d_2 * d_3)[None, :], (d_2 * d_3)[None, :], d_3[None, :], 1.0, CHUNK)
        tl.store(kg + at, (x_end * after).to(DOT))
        tl.store(chunk_decay + channel, tl.load(tile_decay + channel) * d_1 * d_2 * d_3)
        A = add_between_tiles(A, x_start, x_end, d_1, d_2, CHUNK, PRECISION)
    A = (A * beta[:, None]).to(SOLVE)

    # stage 3
    X = tl.load(T_tile + tile_at, mask=same_tile, other=0.0).to(tl.float32)
    X = merge_inverses(X, A, TILE, CHUNK, SOLVE, PRECISION)
    X = merge_inverses(X, A, 2 * TILE, CHUNK, SOLVE, PRECISION)
    # its diagonal is 1: beta goes to the other operand, or all of its rounding would be seen
    X_dot = X.to(DOT)
    X_rest = (X - X_dot.to(tl.float32)).to(DOT)
    TWICE: tl.constexpr = SOLVE.primitive_bitwidth > DOT.primitive_bitwidth  # rows that the kernel did not normalise

    # stage 4
    v += row.to(tl.int64) * v_sb + hv.to(tl.int64) * v_sh + token.to(tl.int64) * v_st
    r = rows.to(tl.int64)[:, None]
    for v0 in tl.range(0, VP, BV, disable_licm=True):
        value = v0 + tl.arange(0, BV)
        mask = valid[:, None] & (value < V)[None, :]
        x_v = tl.load(v + r * v_st + value[None, :], mask=mask, other=0.0)
        x_v = (x_v * beta[:, None]).to(DOT)
        u_at = value[None, :] * CHUNK + rows[:, None] if WIDE else rows[:, None] * VP + value[None, :]
        tl.store(u + u_at, apply_inverse(X_dot, X_rest, x_v, TWICE, PRECISION).to(DOT))
    for k0 in tl.range(0, KP, BK, disable_licm=True):
        channel = k0 + tl.arange(0, BK)
        at = rows[:, None] * KP + channel[None, :]
        d_0 = tl.load(tile_decay + channel)
        d_1 = tl.load(tile_decay + KP + channel)
        d_2 = tl.load(tile_decay + 2 * KP + channel)
        before = decay_before(d_0, d_1, d_2, CHUNK)
        x_k = (tl.load(k_start + at) * (before * beta[:, None])).to(DOT)
        tl.store(wq + at, apply_inverse(X_dot, X_rest, x_k, TWICE, PRECISION).to(DOT))
