"""The backward of an adapter whose kernel is differentiated by autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .adapter import Call

Results = dict[str, Tensor]
INPUTS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")


def gradients_of(call: Call, forward: Callable[[Call], Results]) -> Results:
    """Gradients of <o, do> + <final_state, dht> for every tensor that the call gives, by their names in the suite."""
    assert call.do is not None
    assert call.dht is not None
    h0 = torch.zeros_like(call.dht) if call.initial_state is None else call.initial_state
    given = {name: x for name, x in vars(replace(call, initial_state=h0)).items() if name in INPUTS and x is not None}
    leaves = {name: x.detach().requires_grad_() for name, x in given.items()}
    results = forward(replace(call, **leaves))
    outputs = results["o"], results["final_state"]
    cotangents = [dx.to(x.dtype) for dx, x in zip((call.do, call.dht), outputs, strict=True)]
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True)
    names = ["dh0" if name == "initial_state" else f"d{name}" for name in leaves]
    pairs = zip(leaves.values(), grads, strict=True)
    return dict(zip(names, (torch.zeros_like(x) if dx is None else dx for x, dx in pairs), strict=True))
