"""The activations of a front end, each with its derivative by hand.

    rate_times            y = e^A_log x             dx = e^A_log dy                dA_log = y dy
    rate_times_softplus   y = e^A_log softplus(x)   dx = e^A_log sigmoid(x) dy     dA_log = y dy
    sigmoid               y = 1 / (1 + e^-x)        dx = sigmoid(x) sigmoid(-x) dy

The chain rule alone multiplies in an order of its own: e^A_log dy first, and e^90 is inf in fp32; or 1 - y, and y has
rounded to 1. Where y overflows and dy is 0, dA_log is 0: nothing is asked of a decay of exactly 0. Derivatives are
made of functions of this module again, so that there are some of every order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function


def softplus(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), to rounding at both ends.

    log(1 + exp(x)) as written is 0 below x = -17 in fp32, and a decay of 1e-8 a token matters over a
    million of them; torch.nn.functional.softplus returns x itself above 20, which fp64 would notice.

    >>> x = torch.tensor(-18.0)
    >>> torch.log(1 + torch.exp(x)).item(), round(softplus(x).item() * 1e8, 3)
    (0.0, 1.523)
    """
    smallest = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    x = x.clamp(min=math.log(smallest) - 1)  # the result is 0 from here on; a gradient stays clear of inf * 0
    return -torch.nn.functional.logsigmoid(-x)


def rate_times(A_log: Float[Tensor, "HV 1"], x: Float[Tensor, "B T HV K"]) -> Float[Tensor, "B T HV K"]:
    """e^A_log x, as if e^A_log had no largest and no smallest value of its own."""
    return _RateTimes.apply(A_log, x)


def rate_times_softplus(A_log: Float[Tensor, "HV 1"], x: Float[Tensor, "B T HV K"]) -> Float[Tensor, "B T HV K"]:
    """e^A_log softplus(x), as if e^A_log and softplus(x) had no largest and no smallest value of their own."""
    return _RateTimesSoftplus.apply(A_log, x)


def sigmoid(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1 / (1 + exp(-x)), with a slope of exp(-|x|) far out on both sides.

    >>> x = torch.tensor([-20.0, 20.0], requires_grad=True)
    >>> plain, ours = (torch.autograd.grad(f(x).sum(), x)[0] for f in (torch.sigmoid, sigmoid))
    >>> [round(slope * 1e9, 2) for slope in (*plain.tolist(), *ours.tolist())]
    [2.06, 0.0, 2.06, 2.06]
    """
    return _Sigmoid.apply(x)


class _Elementwise(Function):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs, output)


class _RateTimes(_Elementwise):
    @staticmethod
    def forward(A_log: Tensor, x: Tensor) -> Tensor:
        root = torch.exp((A_log / 2).clamp(max=_largest_exponent(x)))  # inf times an x of 0 is NaN
        return root * (root * x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        A_log, _, y = ctx.saved_tensors
        return _of_rate(A_log, y, dy), _RateTimes.apply(A_log, dy)


class _RateTimesSoftplus(_Elementwise):
    @staticmethod
    def forward(A_log: Tensor, x: Tensor) -> Tensor:
        root = torch.exp(A_log / 2)  # twice, since its square may be inf
        faint = x < math.log(torch.finfo(x.dtype).smallest_normal)  # softplus(x) is exp(x), and has lost digits
        return torch.where(faint, torch.exp(A_log + x), root * (root * softplus(x)))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        A_log, x, y = ctx.saved_tensors
        return _of_rate(A_log, y, dy), _RateTimesSlope.apply(A_log, x, dy)


class _RateTimesSlope(_Elementwise):
    """e^A_log sigmoid(x) c, from the root of e^(A_log + min(x, 0)): inf or 0 only where the result is."""

    @staticmethod
    def forward(A_log: Tensor, x: Tensor, c: Tensor) -> Tensor:
        root = torch.exp(((A_log + x.clamp(max=0)) / 2).clamp(max=_largest_exponent(x)))
        return root * (torch.sigmoid(x.abs()) * (root * c))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        A_log, x, c, _ = ctx.saved_tensors
        of_rate = _RateTimesSlope.apply(A_log, x, c * dy).sum_to_size(A_log.shape)
        of_x = _RateTimesSlope.apply(A_log, x, c * dy * sigmoid(-x))
        return of_rate, of_x, _RateTimesSlope.apply(A_log, x, dy)


class _Sigmoid(_Elementwise):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x, _ = ctx.saved_tensors
        return dy * (sigmoid(x) * sigmoid(-x))


def _of_rate(A_log: Tensor, y: Tensor, dy: Tensor) -> Tensor:
    return (y.masked_fill(y.isinf() & (dy == 0), 0.0) * dy).sum_to_size(A_log.shape)


def _largest_exponent(like: Tensor) -> float:
    return math.log(torch.finfo(like.dtype).max) - 1
