"""Stages 1 to 3 of a tile of 16 tokens: its decays, its products of keys and queries, its inverse.

There are two ways to the decays between tokens j <= i. With G, the sum of the gates from the tile's start to a token
(log2 units), and a constant c, bf16 rows take one product for all pairs:

    decay(j -> i) = 2^(G_i - c) * 2^(c - G_j)

It has a range: rows that a channel reaches too faint (`faint_rows`) go the other way, and so do fp16, for its range,
and fp32, since a sum of 58 octaves leaves an exponent 18 bits. That way is the halving of
`kimi_linear.reference.chunked.halving`, for every gate: for sibling blocks of h = 1, 2, 4, 8 tokens,

    decay(j -> i) = into_right[i] * out_of_left[j]

one factor a row and level (a row is right or left, never both). Products, not exponentials of sums: one
exponential a channel does for all levels, and a gate of -inf is the factor 0.
"""

import triton
import triton.language as tl

LEVELS = tl.constexpr(4)  # halvings of a tile: 16 = 2 ** 4
FAINT = tl.constexpr(-116.0)  # octaves: 16 tokens of -5 nats lose 115.4, and half of it is far from the ends of bf16
MIDDLE = tl.constexpr(-58.0)
AT_MIDDLE = tl.constexpr(2.0**MIDDLE.value)


@triton.jit
def swap_siblings(x, h: tl.constexpr):
    """Exchange neighbouring blocks of h rows: x ^ (x ^ y) is y, and costs a shuffle at most."""
    C: tl.constexpr = x.shape[0]
    K: tl.constexpr = x.shape[1]
    bits = tl.reshape(x.to(tl.int32, bitcast=True), [C // (2 * h), 2, h, K])
    other = bits ^ tl.xor_sum(bits, axis=1, keep_dims=True)
    return tl.reshape(other, [C, K]).to(tl.float32, bitcast=True)


@triton.jit
def sibling_mask(i, j, h: tl.constexpr):
    """Row i in a right block of h tokens, column j in its left sibling."""
    return ((i // h) % 2 == 1) & (i // h == j // h + 1)


@triton.jit
def add_level(q, k, prefix, suffix, A, Aqk, h: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Stage 2 between sibling blocks of h rows: right rows carry their prefix, left ones their suffix."""
    rows = tl.arange(0, q.shape[0])
    factor = tl.where(((rows // h) % 2 == 1)[:, None], prefix, suffix)
    k_factor = (k * factor.to(k.dtype)).to(DOT)
    q_factor = (q * factor.to(q.dtype)).to(DOT)
    siblings = sibling_mask(rows[:, None], rows[None, :], h)
    A += tl.where(siblings, tl.dot(k_factor, tl.trans(k_factor), input_precision=PRECISION), 0.0)
    Aqk += tl.where(siblings, tl.dot(q_factor, tl.trans(k_factor), input_precision=PRECISION), 0.0)
    return A, Aqk


@triton.jit
def grow_blocks(prefix, suffix, total, h: tl.constexpr):
    """Stage 1: decays within blocks of h rows to those within blocks of 2 h."""
    right = ((tl.arange(0, total.shape[0]) // h) % 2 == 1)[:, None]
    sibling_total = swap_siblings(total, h)
    prefix = tl.where(right, prefix * sibling_total, prefix)
    suffix = tl.where(right, suffix, suffix * sibling_total)
    return prefix, suffix, total * sibling_total


@triton.jit
def add_products_by_halving(q, k, g, A, Aqk, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Stages 1 and 2, exact for every gate: adds one slice of channels to A and Aqk below the diagonal.

    Returns k from the tile's start (own decay included), k to its end (excluded), and q from its start.
    """
    total = tl.exp2(g)
    prefix = total
    suffix = tl.full(g.shape, 1.0, tl.float32)
    for level in tl.static_range(LEVELS):
        A, Aqk = add_level(q, k, prefix, suffix, A, Aqk, 2**level, DOT, PRECISION)
        prefix, suffix, total = grow_blocks(prefix, suffix, total, 2**level)
    return k * prefix, k * suffix, q * prefix, A, Aqk


@triton.jit
def last_row(x):
    """The last row; a selection that costs nothing where a thread holds whole columns."""
    last = tl.arange(0, x.shape[0])[:, None] == x.shape[0] - 1
    return tl.sum(tl.where(last, x, 0.0), axis=0)


@triton.jit
def products_from_middle(q, k, g, PRECISION: tl.constexpr):
    """Stages 1 and 2 with one product a matrix, for bf16: A and Aqk of one slice of channels below the diagonal.

    Returns besides k from the tile's start times 2^-c, k to its end, q from its start times 2^-c, and what each
    channel loses in all (log2), as exact as the gates are, since it decays the state. c = -58 lies within 58 of G, so
    that all factors are numbers of bf16; of rows that have lost more, only what `faint_rows` excludes is wrong. c is
    a constant, because one taken from the gates would let later tokens round earlier ones, and a whole number, so
    that a tile without decay rounds nothing.
    """
    DOT: tl.constexpr = q.dtype
    G = tl.cumsum(g, axis=0)
    total = last_row(G)
    G -= MIDDLE  # only now: a number near 58 has few bits left for a fraction
    after = tl.exp2(G)
    k_after = k.to(tl.float32) * after
    q_after = q.to(tl.float32) * after
    k_before = k.to(tl.float32) * tl.exp2(-G)
    k_before_t = tl.trans(k_before.to(DOT))
    A = tl.dot(k_after.to(DOT), k_before_t, input_precision=PRECISION)
    Aqk = tl.dot(q_after.to(DOT), k_before_t, input_precision=PRECISION)
    return A, Aqk, k_after, k_before * tl.exp2(total - MIDDLE)[None, :], q_after, total


@triton.jit
def faint_rows(g):
    """Rows that some channel reaches too faint for `products_from_middle`; what follows a row has no say in it."""
    return tl.min(tl.cumsum(g, axis=0), axis=1) < FAINT


@triton.jit
def diagonal(M):
    """The diagonal of a square."""
    i = tl.arange(0, M.shape[0])
    return tl.sum(tl.where(i[:, None] == i[None, :], M, 0.0), axis=1)


@triton.jit
def invert_tile(A, SOLVE: tl.constexpr, PRECISION: tl.constexpr):
    """Stage 3 inside a tile: (I + A)^-1 by merging over the halving levels, X <- X - X A_h X."""
    i = tl.arange(0, A.shape[0])[:, None]
    j = tl.arange(0, A.shape[0])[None, :]
    X = tl.where(i == j, 1.0, 0.0) - tl.where(sibling_mask(i, j, 1), A, 0.0)
    for level in tl.static_range(1, LEVELS):
        A_h = tl.where(sibling_mask(i, j, 2**level), A, 0.0).to(SOLVE)
        X_A = tl.dot(X.to(SOLVE), A_h, input_precision=PRECISION)
        X -= tl.dot(X_A.to(SOLVE), X.to(SOLVE), input_precision=PRECISION)
    return X
