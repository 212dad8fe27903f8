"""Stages 2 to 4 of a chunk of 64 tokens, made from its four tiles.

One program a chunk and head. Inside a tile everything is done (`chunk_tiles`); between tiles a decay is that
from the left tile's row to its end, the tiles between, and that from the right tile's start:

    tiles (1, 0), (2, 1), (3, 2)   k_start_i . k_end_j                        nothing between
    tiles (2, 0), (3, 0), (3, 1)   k_start_i d_2  .  d_1 k_end_j              split at the middle of the chunk

Stage 3 merges at 32 and at 64: T <- T - T A_h T. Stage 4 writes w and u, and beside them the same products
for the output. With v_new = u - w S, stage 6 is affine in the state the chunk starts from,

    o = (q exp(G)) S + Aqk v_new = (q exp(G) - Aqk w) S + Aqk u

so the serial kernel takes both from one product: [v_new; o] = uo - wq S, wq = [w; Aqk w - q exp(G)], uo = [u; Aqk u].
"""

import triton
import triton.language as tl

from .chunk_table import locate_chunk


@triton.jit
def between_tiles(x_start, k_end, gates, KP: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Stage 2: <x_i, k_j decay(j -> i)> for i and j in different tiles of one slice of channels; 0 elsewhere."""
    tile = tl.arange(0, CHUNK) // (CHUNK // 4)
    near = tl.dot(x_start, tl.trans(k_end), input_precision=PRECISION)
    is_near = tile[:, None] == tile[None, :] + 1
    M = tl.where(is_near, near, 0.0)
    x_far = x_start * tl.where((tile == 3)[:, None], tl.exp2(tl.load(gates + 2 * KP))[None, :], 1.0)
    k_far = k_end * tl.where((tile == 0)[:, None], tl.exp2(tl.load(gates + KP))[None, :], 1.0)
    far = tl.dot(x_far.to(x_start.dtype), tl.trans(k_far.to(x_start.dtype)), input_precision=PRECISION)
    is_far = (tile >= 2)[:, None] & (tile < 2)[None, :] & ~is_near
    return tl.where(is_far, far, M)


@triton.jit
def decay_before(gates, tile, KP: tl.constexpr):
    """From the chunk's start to each row's tile."""
    g0 = tl.load(gates)
    g1 = g0 + tl.load(gates + KP)
    g2 = g1 + tl.load(gates + 2 * KP)
    late = tl.where((tile == 2)[:, None], tl.exp2(g1)[None, :], tl.exp2(g2)[None, :])
    return tl.where((tile == 0)[:, None], 1.0, tl.where((tile == 1)[:, None], tl.exp2(g0)[None, :], late))


@triton.jit
def decay_after(gates, tile, KP: tl.constexpr):
    """From each row's tile to the chunk's end, and the decay of the whole chunk."""
    g3 = tl.load(gates + 3 * KP)
    g2 = g3 + tl.load(gates + 2 * KP)
    g1 = g2 + tl.load(gates + KP)
    whole = tl.exp2(g1 + tl.load(gates))
    early = tl.where((tile == 0)[:, None], tl.exp2(g1)[None, :], tl.exp2(g2)[None, :])
    late = tl.where((tile == 2)[:, None], tl.exp2(g3)[None, :], 1.0)
    return tl.where((tile <= 1)[:, None], early, late), whole


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
    tile = rows // TILE
    row_factors += cell * 3 * CHUNK + rows
    strength = tl.load(row_factors)
    k_norm = tl.load(row_factors + CHUNK)
    q_norm = tl.load(row_factors + 2 * CHUNK)
    k_start += cell * CHUNK * KP
    k_end += cell * CHUNK * KP
    q_start += cell * CHUNK * KP
    kg += cell * CHUNK * KP
    wq += cell * 2 * CHUNK * KP
    uo += cell * 2 * CHUNK * VP
    chunk_decay += cell * KP
    channel = tl.arange(0, BK)
    gates = tile_gate + cell * (CHUNK // TILE) * KP + channel
    at = rows[:, None] * KP + channel[None, :]
    same_tile = tile[:, None] == tile[None, :]
    tile_at = cell * CHUNK * TILE + rows[:, None] * TILE + (rows % TILE)[None, :]

    # stage 2: A between tiles
    A = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k0 in range(0, KP, BK):
        A += between_tiles(tl.load(k_start + at + k0), tl.load(k_end + at + k0), gates + k0, KP, CHUNK, PRECISION)
    A *= (strength * k_norm)[:, None] * k_norm[None, :]

    # stage 3
    X = tl.load(T_tile + tile_at, mask=same_tile, other=0.0).to(tl.float32)
    X = merge_inverses(X, A, TILE, CHUNK, SOLVE, PRECISION)
    X = merge_inverses(X, A, 2 * TILE, CHUNK, SOLVE, PRECISION)
    X *= strength[None, :]
    T_k = (X * k_norm[None, :]).to(DOT)
    T_v = X.to(DOT)

    # stage 2: Aqk between tiles; and its product with T, the only way that it is used
    Aqk = tl.zeros([CHUNK, CHUNK], tl.float32)
    for k0 in range(0, KP, BK):
        Aqk += between_tiles(tl.load(q_start + at + k0), tl.load(k_end + at + k0), gates + k0, KP, CHUNK, PRECISION)
    Aqk *= q_norm[:, None] * k_norm[None, :]
    Aqk = tl.where(same_tile, tl.load(Aqk_tile + tile_at, mask=same_tile, other=0.0).to(tl.float32), Aqk)
    M = tl.dot(Aqk.to(DOT), T_v, input_precision=PRECISION)
    M_k = (M * k_norm[None, :]).to(DOT)
    M_v = M.to(DOT)

    # stage 4
    for k0 in range(0, KP, BK):
        before = decay_before(gates + k0, tile, KP)
        beta_k = (tl.load(k_start + at + k0) * before).to(DOT)
        tl.store(wq + at + k0, tl.dot(T_k, beta_k, input_precision=PRECISION).to(DOT))
        qg = tl.load(q_start + at + k0) * before * q_norm[:, None]
        x_q = tl.dot(M_k, beta_k, input_precision=PRECISION) - qg
        tl.store(wq + CHUNK * KP + at + k0, x_q.to(DOT))
    for k0 in range(0, KP, BK):
        after, whole = decay_after(gates + k0, tile, KP)
        tl.store(kg + at + k0, (tl.load(k_end + at + k0) * after * k_norm[:, None]).to(DOT))
        tl.store(chunk_decay + k0 + channel, whole)
    v += row.to(tl.int64) * v_sb + hv.to(tl.int64) * v_sh + token.to(tl.int64) * v_st
    r = rows.to(tl.int64)[:, None]
    for v0 in range(0, VP, BV):
        value = v0 + tl.arange(0, BV)
        mask = valid[:, None] & (value < V)[None, :]
        x_v = tl.load(v + r * v_st + value.to(tl.int64)[None, :] * v_sv, mask=mask, other=0.0).to(DOT)
        v_at = rows[:, None] * VP + value[None, :]
        tl.store(uo + v_at, tl.dot(T_v, x_v, input_precision=PRECISION).to(DOT))
        tl.store(uo + CHUNK * VP + v_at, tl.dot(M_v, x_v, input_precision=PRECISION).to(DOT))
