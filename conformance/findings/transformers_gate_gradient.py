"""transformers 5.24: the chunk function's gradient of g is left over from terms that cancel, at a strong gate.

    python transformers_gate_gradient.py

A token's decay to itself is exp(G_i - G_i) = 1, whatever the gate. The function takes that difference like any other,
so autograd adds a term to a token's dg and subtracts it again; at a gate of -5, dg is e^-5 of such a term, and its
last digits are gone. The recurrent function keeps them. Seen by gradients.bound.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear

torch.manual_seed(0)
T, H, K = 71, 2, 12
q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1) for _ in range(2))
v, do, beta, g = torch.randn(1, T, H, K), torch.randn(1, T, H, K), torch.rand(1, T, H), torch.full((1, T, H, K), -5.0)


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Token by token, in the inputs' dtype: decay, predict, write, read."""
    S, outputs = torch.zeros(1, H, K, K, dtype=q.dtype), []
    for t in range(T):
        S = g[:, t].exp()[..., None] * S
        u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, ..., None]).sum(-2))
        S = S + k[:, t, ..., None] * u[:, :, None]
        outputs.append((S * q[:, t, ..., None]).sum(-2) / K**0.5)
    return torch.stack(outputs, 1), S


def gate_gradient(function: Any, dtype: torch.dtype) -> Tensor:
    inputs = [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta)]
    names = dict(zip(("g", "beta"), inputs[3:], strict=True))
    o, _ = function(*inputs[:3], **names, initial_state=None, output_final_state=True)
    return torch.autograd.grad(o, inputs[3], do.to(dtype))[0].double()


exact = gate_gradient(recurrence, torch.float64)
for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
    function = getattr(modeling_kimi_linear, name)
    error = gate_gradient(getattr(function, "__wrapped__", function), torch.float32) - exact
    print(f"{name}: dg is off by {(error.norm() / exact.norm()).item():.1e} of its size")
