"""Stages 2 to 4 of a chunk of 64 tokens, made from its four tiles.

One program a chunk and head. Inside a tile everything is done (`chunk_tiles`); between tiles a decay is that
from the left tile's row to its end, the tiles between, and that from the right tile's start:

    tiles (1, 0), (3, 2)                  k_start_i . k_end_j                      nothing between
    tiles (2, 0), (2, 1), (3, 0), (3, 1)  k_start_i d_2  .  d_1 k_end_j            split at the middle of the chunk

with d_2 for rows of tile 3 and d_1 for those of tile 0 only. Stage 3 merges at 32 and at 64: T <- T - T A_h T.
Stage 4 writes w and u, and beside them the same products for the output. With v_new = u - w S, stage 6 is affine
in the state the chunk starts from,

    o = (q exp(G)) S + Aqk v_new = (q exp(G) - Aqk w) S + Aqk u

so the serial kernel takes both from one product: [v_new; o] = uo - wq S, wq = [w; Aqk w - q exp(G)], uo = [u; Aqk u].

The kernel waits for memory, so what it holds decides its speed: at 168 registers three programs of four warps
share a multiprocessor. Hence row factors are loaded again where they are used, decays multiply in the dtype of
the operands, kg leaves while k_end is at hand, and u comes last, so that k_start and q_start are still in the
cache when stage 4 reads them again.
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
def add_between_tiles(M, x_start, k_end, gates, KP: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Stage 2: M + <x_i, k_j decay(j -> i)> for i and j in different tiles, for one slice of channels."""
    tile = tl.arange(0, CHUNK) // (CHUNK // 4)
    neighbours = (tile % 2 == 1)[:, None] & (tile[:, None] == tile[None, :] + 1)
    M += tl.where(neighbours, tl.dot(x_start, tl.trans(k_end), input_precision=PRECISION), 0.0)
    d_1 = tl.exp2(tl.load(gates + KP))[None, :]
    d_2 = tl.exp2(tl.load(gates + 2 * KP))[None, :]
    x_far = (x_start * by_tile(0.0, 0.0, 1.0, d_2, CHUNK).to(x_start.dtype)).to(x_start.dtype)
    k_far = (k_end * by_tile(d_1, 1.0, 0.0, 0.0, CHUNK).to(k_end.dtype)).to(k_end.dtype)
    return tl.dot(x_far, tl.trans(k_far), M, input_precision=PRECISION)


@triton.jit
def decay_before(gates, KP: tl.constexpr, CHUNK: tl.constexpr):
    """From the chunk's start to each row's tile."""
    g0 = tl.load(gates)
    g1 = g0 + tl.load(gates + KP)
    g2 = g1 + tl.load(gates + 2 * KP)
    return by_tile(1.0, tl.exp2(g0)[None, :], tl.exp2(g1)[None, :], tl.exp2(g2)[None, :], CHUNK)


@triton.jit
def decay_after(gates, KP: tl.constexpr, CHUNK: tl.constexpr):
    """From each row's tile to the chunk's end, and the decay of the whole chunk."""
    g3 = tl.load(gates + 3 * KP)
    g2 = g3 + tl.load(gates + 2 * KP)
    g1 = g2 + tl.load(gates + KP)
    after = by_tile(tl.exp2(g1)[None, :], tl.exp2(g2)[None, :], tl.exp2(g3)[None, :], 1.0, CHUNK)
    return after, tl.exp2(g1 + tl.load(gates))


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
    k_start,
    k_end,
    q_start,
    tile_gate,
    row_factors,
    T_tile,
    Aqk_tile,
    wq,
    uo,
    kg,
    chunk_decay,
    cu_seqlens,
    first_chunk,
    T,
    N,
    v_sb,
    v_st: tl.constexpr,
    v_sh,
    v_sv: tl.constexpr,
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
    if segment >= N:
        return
    rows = tl.arange(0, CHUNK)
    valid = rows < end - token

    DOT: tl.constexpr = k_start.dtype.element_ty
    cell = chunk.to(tl.int64) * HV + hv
    strength = row_factors + cell * 3 * CHUNK + rows
    k_norm = strength + CHUNK
    q_norm = strength + 2 * CHUNK
    k_start += cell * CHUNK * KP
    k_end += cell * CHUNK * KP
    q_start += cell * CHUNK * KP
    kg += cell * CHUNK * KP
    wq += cell * 2 * CHUNK * KP
    uo += cell * 2 * CHUNK * VP
    chunk_decay += cell * KP
    tile_gate += cell * (CHUNK // TILE) * KP
    T_tile += cell * CHUNK * TILE
    Aqk_tile += cell * CHUNK * TILE
    tile = rows // TILE
    same_tile = tile[:, None] == tile[None, :]
    tile_at = rows[:, None] * TILE + (rows % TILE)[None, :]

    # stage 2: A between tiles; kg on the way
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k0 in range(0, KP, BK):
        channel = k0 + tl.arange(0, BK)
        at = rows[:, None] * KP + channel[None, :]
        x_end = tl.load(k_end + at)
        A = add_between_tiles(A, tl.load(k_start + at), x_end, tile_gate + channel, KP, CHUNK, PRECISION)
        after, whole = decay_after(tile_gate + channel, KP, CHUNK)
        tl.store(kg + at, (x_end * after.to(DOT) * tl.load(k_norm)[:, None]).to(DOT))
        tl.store(chunk_decay + channel, whole)
    x_norm = tl.load(k_norm)
    A = (A * (tl.load(strength) * x_norm)[:, None] * x_norm[None, :]).to(SOLVE)

    # stage 3
    X = tl.load(T_tile + tile_at, mask=same_tile, other=0.0).to(tl.float32)
    X = merge_inverses(X, A, TILE, CHUNK, SOLVE, PRECISION)
    X = merge_inverses(X, A, 2 * TILE, CHUNK, SOLVE, PRECISION)
    X = (X * tl.load(strength)[None, :]).to(DOT)

    # stage 2: Aqk between tiles; and its product with T, the only way that it is used
    Aqk = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k0 in range(0, KP, BK):
        channel = k0 + tl.arange(0, BK)
        at = rows[:, None] * KP + channel[None, :]
        x_q = tl.load(q_start + at)
        Aqk = add_between_tiles(Aqk, x_q, tl.load(k_end + at), tile_gate + channel, KP, CHUNK, PRECISION)
    Aqk *= tl.load(q_norm)[:, None] * tl.load(k_norm)[None, :]
    Aqk += tl.load(Aqk_tile + tile_at, mask=same_tile, other=0.0).to(tl.float32)
    M = tl.dot(Aqk.to(DOT), X, input_precision=PRECISION).to(DOT)

    # stage 4
    for k0 in tl.range(0, KP, BK, disable_licm=True):
        channel = k0 + tl.arange(0, BK)
        at = rows[:, None] * KP + channel[None, :]
        before = decay_before(tile_gate + channel, KP, CHUNK).to(DOT)
        beta_k = (tl.load(k_start + at) * before * tl.load(k_norm)[:, None]).to(DOT)
        qg = tl.load(q_start + at) * before * tl.load(q_norm)[:, None]
        tl.store(wq + at, tl.dot(X, beta_k, input_precision=PRECISION).to(DOT))
        tl.store(wq + CHUNK * KP + at, (tl.dot(M, beta_k, input_precision=PRECISION) - qg).to(DOT))
    v += row.to(tl.int64) * v_sb + hv.to(tl.int64) * v_sh + token.to(tl.int64) * v_st
    r = rows.to(tl.int64)[:, None]
    for v0 in tl.range(0, VP, BV, disable_licm=True):
        value = v0 + tl.arange(0, BV)
        mask = valid[:, None] & (value < V)[None, :]
        x_v = tl.load(v + r * v_st + value.to(tl.int64)[None, :] * v_sv, mask=mask, other=0.0).to(DOT)
        v_at = rows[:, None] * VP + value[None, :]
        tl.store(uo + v_at, tl.dot(X, x_v, input_precision=PRECISION).to(DOT))
        tl.store(uo + CHUNK * VP + v_at, tl.dot(M, x_v, input_precision=PRECISION).to(DOT))
