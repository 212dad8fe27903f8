"""The front end on the device: l2norm, the two gates and the write strength, as functions that kernels inline.

    l2norm     x / sqrt(sum(x^2) + eps)                                eps inside the root
    softplus   g = -exp(A_log) * softplus(x + dt_bias)                 in (-inf, 0]
    bounded    g = lower_bound * sigmoid(exp(A_log) * (x + dt_bias))   in [lower_bound, 0]

Same steps as `kimi_linear.reference.front_end`. Every argument is fp32 already: cast right after the load, so
that bf16 is never computed with. A step that is not wanted is None, and costs nothing.

`front_end_arguments` takes a FrontEnd apart into what a kernel is launched with.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ..reference.front_end import FrontEnd
from ..reference.gates import BoundedGate

# How beta is given; a kernel takes one of these as its constexpr BETA.
GIVEN = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
DOUBLE_SIGMOID = tl.constexpr(2)
_BETA = {None: GIVEN.value, "sigmoid": SIGMOID.value, "double_sigmoid": DOUBLE_SIGMOID.value}
_NO_FRONT_END = {"A_log": None, "dt_bias": None, "lower_bound": None, "l2norm_eps": None, "BETA": GIVEN.value}


def front_end_arguments(front_end: FrontEnd | None) -> dict[str, Any]:
    """Kernel arguments: A_log and dt_bias fp32 or None, each flat in memory, lower_bound, l2norm_eps, BETA.

    A_log None means that g is a log decay already; lower_bound None, beside an A_log, the softplus gate.
    """
    if front_end is None:
        return dict(_NO_FRONT_END)
    arguments = dict(_NO_FRONT_END, l2norm_eps=front_end.l2norm_eps, BETA=_BETA[front_end.beta])
    gate = front_end.gate
    if gate is not None:
        arguments |= {"A_log": gate.A_log.contiguous(), "dt_bias": gate.dt_bias.contiguous()}
    if isinstance(gate, BoundedGate):
        arguments["lower_bound"] = float(gate.lower_bound)
    return arguments


@triton.jit
def log1p_of_decay(y):
    """log(1 + y) for 0 <= y <= 1, to rounding: 2 atanh(y / (2 + y)).

    The hardware's logarithm has an absolute error of 2^-22 near 1, which would drown log(1 + 1e-6). Here the
    series' argument is at most (1/3)^2, so the first term left out is below 2e-9 of the sum.
    """
    z = y / (2.0 + y)
    w = z * z
    series = 1.0 / 15.0
    series = series * w + 1.0 / 13.0
    series = series * w + 1.0 / 11.0
    series = series * w + 1.0 / 9.0
    series = series * w + 1.0 / 7.0
    series = series * w + 1.0 / 5.0
    series = series * w + 1.0 / 3.0
    series = series * w + 1.0
    return 2.0 * z * series


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), to rounding at both ends."""
    return tl.maximum(x, 0.0) + log1p_of_decay(tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def softplus_gate(x, A_log, dt_bias):
    """Log decay of the softplus gate. exp(A_log) as its root, twice: exp(90) is inf, and inf * 0 is NaN."""
    root = tl.exp(A_log * 0.5)
    return -(root * (root * softplus(x + dt_bias)))


@triton.jit
def bounded_gate(x, A_log, dt_bias, lower_bound):
    """Log decay of the bounded gate: A_log sets its steepness, lower_bound its range."""
    root = tl.exp(A_log * 0.5)
    return lower_bound * sigmoid(root * (root * (x + dt_bias)))


@triton.jit
def log_decay(x, A_log, dt_bias, lower_bound):
    """g from what the kernel was given: itself, or one of the gates. See `front_end_arguments`."""
    if A_log is None:
        g = x
    elif lower_bound is None:
        g = softplus_gate(x, A_log, dt_bias)
    else:
        g = bounded_gate(x, A_log, dt_bias, lower_bound)
    return g


@triton.jit
def l2norm(x, eps):
    """Divide x by sqrt(sum(x^2) + eps) over its last axis; lanes past the end must hold 0."""
    if eps is not None:
        x = x * tl.rsqrt(tl.sum(x * x, axis=-1, keep_dims=True) + eps)
    return x


@triton.jit
def write_strength(b, BETA: tl.constexpr):
    """beta from what the kernel was given: itself, sigmoid(b), or 2 sigmoid(b)."""
    if BETA != GIVEN:
        b = sigmoid(b)
    if BETA == DOUBLE_SIGMOID:
        b = 2.0 * b
    return b
