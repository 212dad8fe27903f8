"""The front end on the device: l2norm, the two gates and the write strength, as functions that kernels inline.

    l2norm     x / sqrt(sum(x^2) + eps)                                eps inside the root
    softplus   g = -exp(A_log) * softplus(x + dt_bias)                 in (-inf, 0]
    bounded    g = lower_bound * sigmoid(exp(A_log) * (x + dt_bias))   in [lower_bound, 0]

Same steps as `kimi_linear.reference.front_end`. Every argument is fp32 already: cast right after the load, so
that bf16 is never computed with. A step that is not wanted is None, and costs nothing.

`front_end_arguments` takes a FrontEnd apart into what a kernel is launched with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from ..reference.front_end import FrontEnd
from ..reference.gates import BoundedGate
from .gate_math import BETA_CODES, rate_times_softplus, sigmoid

FRONT_END_SCHEMA = "Tensor? A_log, Tensor? dt_bias, float? lower_bound, float? l2norm_eps, int BETA"
_NO_FRONT_END = {"A_log": None, "dt_bias": None, "lower_bound": None, "l2norm_eps": None, "BETA": BETA_CODES[None]}


def front_end_arguments(front_end: FrontEnd | None) -> dict[str, Any]:
    """Kernel arguments: A_log and dt_bias fp32 or None, each flat in memory, lower_bound, l2norm_eps, BETA.

    A_log None means that g is a log decay already; lower_bound None, beside an A_log, the softplus gate.
    """
    if front_end is None:
        return dict(_NO_FRONT_END)
    arguments = dict(_NO_FRONT_END, l2norm_eps=front_end.l2norm_eps, BETA=BETA_CODES[front_end.beta])
    gate = front_end.gate
    if gate is not None:
        arguments |= {"A_log": gate.A_log.contiguous(), "dt_bias": gate.dt_bias.contiguous()}
    if isinstance(gate, BoundedGate):
        arguments["lower_bound"] = float(gate.lower_bound)
    return arguments


def named_front_end(values: Sequence[Any]) -> dict[str, Any]:
    """The same by name again, from the values that an operator of FRONT_END_SCHEMA was called with."""
    return dict(zip(_NO_FRONT_END, values, strict=True))


@triton.jit
def softplus_gate(x, A_log, dt_bias):
    """Log decay of the softplus gate."""
    return rate_times_softplus(x + dt_bias, A_log, -1.0)


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
