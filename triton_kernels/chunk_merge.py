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


@triton.jit
def split_rows(x):
    """The upper and the lower half of the rows."""
    C: tl.constexpr = x.shape[0] // 2
    return tl.split(tl.permute(tl.reshape(x, [2, C, x.shape[1]]), [1, 2, 0]))


@triton.jit
def stack_rows(x, y):
    """x above y."""
    C: tl.constexpr = x.shape[0]
    return tl.reshape(tl.permute(tl.join(x, y), [2, 0, 1]), [2 * C, x.shape[1]])


@triton.jit
def between_tiles(kq_start, k_end, d1, d2, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Stage 2: A above Aqk, <x_i, k_j decay(j -> i)> for i and j in different tiles; 0 elsewhere."""
    i_tile = (tl.arange(0, 2 * CHUNK) % CHUNK // (CHUNK // 4))[:, None]
    j_tile = (tl.arange(0, CHUNK) // (CHUNK // 4))[:, None]
    near = tl.dot(kq_start, tl.trans(k_end), input_precision=PRECISION)
    x_far = kq_start * tl.where(i_tile == 3, d2[None, :], 1.0)
    k_far = k_end * tl.where(j_tile == 0, d1[None, :], 1.0)
    far = tl.dot(x_far.to(k_end.dtype), tl.trans(k_far.to(k_end.dtype)), input_precision=PRECISION)
    j_tile = (tl.arange(0, CHUNK) // (CHUNK // 4))[None, :]
    return tl.where(i_tile == j_tile + 1, near, tl.where((i_tile >= 2) & (j_tile < 2), far, 0.0))


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
    kq_start,
    k_end,
    tile_gate,
    row_factors,
    T_tile,
    Aqk_tile,
    chunk_place,
    wq,
    uo,
    kg,
    chunk_decay,
    first_chunk,
    cells,
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
    SOLVE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A program takes every so many-th chunk and head, and fetches the next while it works on one."""
    DOT: tl.constexpr = k_end.dtype.element_ty
    if PACKED:
        cells = tl.load(first_chunk + N) * HV  # the grid holds as many as there could be
    pid = tl.program_id(0)
    step = tl.num_programs(0).to(tl.int64)
    cell = pid.to(tl.int64)
    rows = tl.arange(0, CHUNK)
    both = tl.arange(0, 2 * CHUNK)
    tile = rows // TILE
    channel = tl.arange(0, BK)
    same_tile = tile[:, None] == tile[None, :]
    at_tile = rows[:, None] * TILE + (rows % TILE)[None, :]
    for n in tl.range(pid, cells, tl.num_programs(0), num_stages=STAGES):
        factors = row_factors + cell * 4 * CHUNK
        row_scale = tl.load(factors + both)
        k_norm = tl.load(factors + 2 * CHUNK + rows)
        strength = tl.load(factors + 3 * CHUNK + rows)
        place = chunk_place + (n // HV) * 3
        token = tl.load(place + 1).to(tl.int64)
        valid = rows < tl.load(place + 2) - token
        x_row = v + tl.load(place).to(tl.int64) * v_sb + token * v_st + (n % HV) * v_sh

        # stage 2: A and Aqk between tiles
        S2 = tl.zeros([2 * CHUNK, CHUNK], tl.float32)
        for k0 in tl.static_range(0, KP, BK):
            x_kq = tl.load(kq_start + cell * 2 * CHUNK * KP + both[:, None] * KP + k0 + channel[None, :])
            x_end = tl.load(k_end + cell * CHUNK * KP + rows[:, None] * KP + k0 + channel[None, :])
            gates = tile_gate + cell * (CHUNK // TILE) * KP + k0 + channel
            d1 = tl.exp2(tl.load(gates + KP))
            d2 = tl.exp2(tl.load(gates + 2 * KP))
            S2 += between_tiles(x_kq, x_end, d1, d2, CHUNK, PRECISION)
        A, Aqk = split_rows(S2 * row_scale[:, None] * k_norm[None, :])
        Aqk_diagonal = tl.load(Aqk_tile + cell * CHUNK * TILE + at_tile, mask=same_tile, other=0.0)
        Aqk = tl.where(same_tile, Aqk_diagonal.to(tl.float32), Aqk)

        # stage 3
        X = tl.load(T_tile + cell * CHUNK * TILE + at_tile, mask=same_tile, other=0.0).to(tl.float32)
        X = merge_inverses(X, A, TILE, CHUNK, SOLVE, PRECISION)
        X = merge_inverses(X, A, 2 * TILE, CHUNK, SOLVE, PRECISION)

        # stage 4: T, and its product with Aqk, the only way that Aqk is used
        X *= strength[None, :]
        M = tl.dot(Aqk.to(DOT), X.to(DOT), input_precision=PRECISION)
        TM = stack_rows(X, M)
        TM_k = (TM * k_norm[None, :]).to(DOT)
        TM_v = TM.to(DOT)
        for v0 in tl.static_range(0, VP, BV):
            value = v0 + tl.arange(0, BV)
            at_v = rows.to(tl.int64)[:, None] * v_st + value.to(tl.int64)[None, :] * v_sv
            x_v = tl.load(x_row + at_v, mask=valid[:, None] & (value < V)[None, :], other=0.0).to(DOT)
            x_uo = tl.dot(TM_v, x_v, input_precision=PRECISION)
            tl.store(uo + cell * 2 * CHUNK * VP + both[:, None] * VP + value[None, :], x_uo.to(DOT))
        for k0 in tl.static_range(0, KP, BK):
            at_both = both[:, None] * KP + k0 + channel[None, :]
            at_rows = rows[:, None] * KP + k0 + channel[None, :]
            x_kq = tl.load(kq_start + cell * 2 * CHUNK * KP + at_both)
            x_end = tl.load(k_end + cell * CHUNK * KP + at_rows)
            gates = tile_gate + cell * (CHUNK // TILE) * KP + k0 + channel
            g0 = tl.load(gates)
            g1 = tl.load(gates + KP)
            g2 = tl.load(gates + 2 * KP)
            g3 = tl.load(gates + 3 * KP)
            beta_k, qg = split_rows(x_kq * decay_before(both % CHUNK // TILE, g0, g1, g2))
            x_wq = tl.dot(TM_k, beta_k.to(DOT), input_precision=PRECISION)
            q_norm = tl.load(factors + CHUNK + rows)
            x_wq -= stack_rows(tl.zeros_like(qg), qg * q_norm[:, None])
            tl.store(wq + cell * 2 * CHUNK * KP + at_both, x_wq.to(DOT))
            x_kg = x_end * decay_after(tile, g1, g2, g3) * k_norm[:, None]
            tl.store(kg + cell * CHUNK * KP + at_rows, x_kg.to(DOT))
            tl.store(chunk_decay + cell * KP + k0 + channel, tl.exp2(g0 + g1 + g2 + g3))
        cell += step


@triton.jit
def decay_before(tile, g0, g1, g2):
    """From the chunk's start to each row's tile."""
    late = tl.where((tile == 2)[:, None], tl.exp2(g0 + g1)[None, :], tl.exp2(g0 + g1 + g2)[None, :])
    return tl.where((tile == 0)[:, None], 1.0, tl.where((tile == 1)[:, None], tl.exp2(g0)[None, :], late))


@triton.jit
def decay_after(tile, g1, g2, g3):
    """From each row's tile to the chunk's end."""
    early = tl.where((tile == 0)[:, None], tl.exp2(g1 + g2 + g3)[None, :], tl.exp2(g2 + g3)[None, :])
    return tl.where((tile <= 1)[:, None], early, tl.where((tile == 2)[:, None], tl.exp2(g3)[None, :], 1.0))
