"""The derivative of a front end inside a kernel: what a backward through it has to give.

A kernel that takes raw projections gives gradients of those: dq and dk through the normalisation, dg through the
gate, dbeta through the sigmoid, and dA_log [HV] and ddt_bias [HV, K], which are sums over all tokens.

    softplus   g = -e^A softplus(y)          dx = -e^A sigmoid(y) dg          dA_log = sum softplus(y) / sigmoid(y) dx
    bounded    g = bound sigmoid(e^A y)      dx = e^A g (1 - g / bound) dg    dA_log = sum y dx
    both       y = x + dt_bias               ddt_bias = sum dx
    l2norm     y = x / sqrt(sum(x^2) + eps)  dx = (dy - y <y, dy>) / sqrt(sum(x^2) + eps)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.activations import softplus
from .envelope import rms
from .problem import RawInputs

Results = dict[str, Tensor]


def through_front_end(raw: RawInputs | None, grads: Results) -> Results:
    """Gradients of what a front end gets, of those of the recurrence: by autograd, in fp64."""
    if raw is None:
        return grads
    with torch.enable_grad():
        leaves = {name: y.clone().requires_grad_() for name, y in raw.by_gradient().items()}
        made, cotangents = raw.holding(leaves)(), [grads[name] for name in ("dq", "dk", "dg", "dbeta")]
        found = torch.autograd.grad(made, list(leaves.values()), cotangents)
    return {**grads, **dict(zip(leaves, found, strict=True))}


def rate_slope(raw: RawInputs) -> Tensor:
    """What dA_log is made of: the sum over tokens and channels of dx times this, [B, T, HV, K]."""
    assert raw.dt_bias is not None
    y = raw.g + raw.dt_bias
    if raw.form.gate == "bounded":
        return y
    return softplus(y) / torch.sigmoid(y).clamp(min=torch.finfo(y.dtype).tiny)


def errors_of_tokens_added(raw: RawInputs, errors: Tensor) -> Results:
    """How far errors of dx in samples, [samples, B, T, HV, K], move the sums over tokens, if each goes its own way.

    A head has one dA_log, and a few samples of one number may all be small by chance.
    """
    of_tokens = {"dA_log": (errors * rate_slope(raw)).sum(-1).abs(), "ddt_bias": rms(errors)}
    return {name: x.amax(0).square().sum((0, 1)).sqrt() for name, x in of_tokens.items()}
