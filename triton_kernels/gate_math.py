"""The front end inside a kernel: what `kimi_linear.reference.gates` and `front_end` do, on fp32 tiles.

Gates come out in log2 units, so that every decay is one `exp2`: that and `rsqrt` are single instructions on a
GPU, where exp takes five, a division eight and a logarithm twenty-five. Hence 1 / y is rsqrt(y) squared.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # log2 units of one nat
ROOT_LOG2E = tl.constexpr(LOG2E.value**0.5)  # of a rate that is applied as its root, twice
LARGEST = tl.constexpr(2e38)  # instead of inf, which times 0 is NaN; log2(e) times it is still a number

GATE_NONE = tl.constexpr(0)  # g is a log decay already
GATE_SOFTPLUS = tl.constexpr(1)
GATE_BOUNDED = tl.constexpr(2)
GATE_BOUNDED_MILD = tl.constexpr(3)  # the same function; no row of a tile gets faint (see chunk_products)

BETA_NONE = tl.constexpr(0)
BETA_SIGMOID = tl.constexpr(1)
BETA_DOUBLE_SIGMOID = tl.constexpr(2)
BETA_CODES = {None: BETA_NONE.value, "sigmoid": BETA_SIGMOID.value, "double_sigmoid": BETA_DOUBLE_SIGMOID.value}


@triton.jit
def reciprocal(y):
    """1 / y for y > 0, to 2 ulp; 0 for inf."""
    root = tl.rsqrt(y)
    return root * root


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); exactly 0 and 1 far out."""
    return reciprocal(1 + tl.exp2(x * -LOG2E))


@triton.jit
def rate_times_softplus(x, A_log, unit: tl.constexpr):
    """unit exp(A_log) softplus(x), to rounding also where exp(A_log) is inf and softplus(x) is nearly 0.

    softplus(x) = max(x, 0) + log1p(e), e = exp(-|x|), and log1p(e) = e 2 / (2 + e) (1 + z / 3 + z^2 / 5 + ..) for
    z = (e / (2 + e))^2 <= 1 / 9: after z^6, the next term is 1e-8. exp(A_log) e is one exponential of A_log - |x|, so
    that neither factor has to be a number by itself.
    """
    rate = tl.minimum(tl.exp2(A_log * LOG2E), LARGEST)
    e = tl.exp2(tl.abs(x) * -LOG2E)
    rate_e = tl.exp2((A_log - tl.abs(x)) * LOG2E)
    r = reciprocal(2 + e)
    s = e * r
    z = s * s
    c: tl.constexpr = 2 * unit
    series = c + z * (c / 3 + z * (c / 5 + z * (c / 7 + z * (c / 9 + z * (c / 11 + z * (c / 13))))))
    return (unit * rate) * tl.maximum(x, 0.0) + rate_e * (r * series)


@triton.jit
def log2_decay(x, bias, A_log, lower_bound, GATE: tl.constexpr):
    """The gate of one tile in log2 units: x [C, K] fp32 is raw (or g itself), A_log that of its head."""
    if GATE == GATE_NONE:
        return x * LOG2E
    x += bias
    if GATE == GATE_SOFTPLUS:
        return rate_times_softplus(x, A_log, -LOG2E)
    root_rate = ROOT_LOG2E * tl.exp2(A_log * (LOG2E / 2))  # exp(A_log) alone may be inf
    return (lower_bound * LOG2E) * reciprocal(1 + tl.exp2(-(root_rate * (root_rate * x))))


@triton.jit
def write_strength(x, BETA: tl.constexpr):
    """beta from its raw projection."""
    if BETA == BETA_NONE:
        return x
    beta = sigmoid(x)
    if BETA == BETA_DOUBLE_SIGMOID:
        beta = 2 * beta
    return beta
