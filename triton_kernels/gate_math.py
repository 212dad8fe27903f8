"""The front end inside a kernel: what `kimi_linear.reference.gates` and `front_end` do, on fp32 tiles.

Gates come out as log decays, natural log. The functions mirror the reference's, line by line; only log1p is
spelled out, because no approximate logarithm keeps its digits near 1.
"""

import triton
import triton.language as tl

GATE_NONE = tl.constexpr(0)  # g is a log decay already
GATE_SOFTPLUS = tl.constexpr(1)
GATE_BOUNDED = tl.constexpr(2)
GATE_BOUNDED_MILD = tl.constexpr(3)  # the same function; 16 tokens of it never leave the range of bf16 (see tiles)

BETA_NONE = tl.constexpr(0)
BETA_SIGMOID = tl.constexpr(1)
BETA_DOUBLE_SIGMOID = tl.constexpr(2)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(e), e = exp(-|x|), to rounding at both ends.

    log1p(e) = 2 atanh(s), s = e / (2 + e) <= 1/3, by seven terms of its series: the eighth is 1e-8 of it.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2 + e)
    z = s * s
    series = 1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2 * s * series


@triton.jit
def log_decay(x, bias, root_rate, lower_bound, GATE: tl.constexpr):
    """The gate of one tile: x is raw [C, K] fp32, bias [1, K], root_rate = exp(A_log / 2) a scalar."""
    if GATE == GATE_NONE:
        return x
    x += bias
    if GATE == GATE_SOFTPLUS:
        return -(root_rate * (root_rate * softplus(x)))
    return lower_bound * tl.sigmoid(root_rate * (root_rate * x))


@triton.jit
def write_strength(x, BETA: tl.constexpr):
    """beta from its raw projection."""
    if BETA == BETA_NONE:
        return x
    beta = tl.sigmoid(x)
    if BETA == BETA_DOUBLE_SIGMOID:
        beta = 2 * beta
    return beta
