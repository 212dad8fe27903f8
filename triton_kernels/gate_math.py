"""The front end inside a kernel: what `kimi_linear.reference.gates` and `front_end` do, on fp32 tiles.

Gates come out in log2 units, so that every decay is one `exp2`: that and `rsqrt` are single instructions on a
GPU, where exp takes five, a division eight and a logarithm twenty-five. Hence 1 / y is rsqrt(y) squared.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # log2 units of one nat

GATE_NONE = tl.constexpr(0)  # g is a log decay already
GATE_SOFTPLUS = tl.constexpr(1)
GATE_BOUNDED = tl.constexpr(2)
GATE_BOUNDED_MILD = tl.constexpr(3)  # the same function; 16 tokens of it never leave the range of bf16 (see tiles)

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
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(e), e = exp(-|x|), to rounding at both ends.

    log1p(e) = 2 atanh(s), s = e / (2 + e) <= 1/3, by seven terms of its series: the eighth is 1e-8 of it.
    """
    e = tl.exp2(tl.abs(x) * -LOG2E)
    s = e * reciprocal(2 + e)
    z = s * s
    series = 1 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11 + z * (1 / 13))))))
    return tl.maximum(x, 0.0) + 2 * s * series


@triton.jit
def log2_decay(x, bias, root_rate, lower_bound, GATE: tl.constexpr):
    """The gate of one tile in log2 units: x [C, K] fp32 is raw (or g itself), root_rate = exp(A_log / 2)."""
    if GATE == GATE_NONE:
        return x * LOG2E
    x += bias
    if GATE == GATE_SOFTPLUS:
        return (root_rate * softplus(x)) * (root_rate * -LOG2E)  # exp(A_log) alone may be inf
    return (lower_bound * LOG2E) * sigmoid(root_rate * (root_rate * x))


@triton.jit
def write_strength(x, BETA: tl.constexpr):
    """beta from its raw projection."""
    if BETA == BETA_NONE:
        return x
    beta = sigmoid(x)
    if BETA == BETA_DOUBLE_SIGMOID:
        beta = 2 * beta
    return beta
