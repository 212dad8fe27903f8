"""fla 0.6.0: the gradient of g from `chunk_kda` with `safe_gate=True` at a constant gate of -5, the lowest it takes.

    python fla_chunk_gate_gradient.py        on a GPU

dg is a sum of terms that nearly cancel, e^-5 of their size. The exact gradient comes from the recurrence in fp64, by
autograd, for the inputs as they were rounded. The other gradients say what a rounding of this format is worth.

This script itself has not been run. The suite saw it as gradients.bound on an H200 (triton 3.6.0), in bf16: with
safe_gate dg is off by 97.6 roundings in chunks of 64 and 11.7 in chunks of 32, without it by 2.1 and 1.1; the
limit is 8.
"""

import torch
from fla.ops.kda import chunk_kda
from torch import Tensor

torch.manual_seed(0)
H, K, V = 2, 12, 9
NAMES = ("q", "k", "v", "g", "beta")


def inputs(T: int) -> list[Tensor]:
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1).bfloat16() for _ in range(2))
    v, g, beta = torch.randn(1, T, H, V).bfloat16(), torch.full((1, T, H, K), -5.0), torch.rand(1, T, H)
    return [q, k, v, g, beta]


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Token by token, in the inputs' dtype: decay, predict, write, read."""
    S, outputs = torch.zeros(1, H, K, V, dtype=q.dtype), []
    for t in range(q.shape[1]):
        S = g[:, t].exp()[..., None] * S
        u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, ..., None]).sum(-2))
        S = S + k[:, t, ..., None] * u[:, :, None]
        outputs.append((S * q[:, t, ..., None]).sum(-2) / K**0.5)
    return torch.stack(outputs, 1)


def gradients(o: Tensor, leaves: list[Tensor], do: Tensor) -> list[Tensor]:
    return [dx.double().cpu() for dx in torch.autograd.grad(o, leaves, do.to(o.device, o.dtype))]


for C in (64, 32):
    given, do = inputs(C + 7), torch.randn(1, C + 7, H, V).bfloat16()
    leaves = [x.double().requires_grad_() for x in given]
    exact = gradients(recurrence(*leaves), leaves, do)
    for safe_gate in (False, True):
        leaves = [x.cuda().requires_grad_() for x in given]
        o, _ = chunk_kda(*leaves, safe_gate=safe_gate, chunk_size=C)
        pairs = zip(NAMES, gradients(o, leaves, do), exact, strict=True)
        errors = (f"d{name} {((got - want).norm() / want.norm()).item():.1e}" for name, got, want in pairs)
        print(f"chunks of {C}, safe_gate={safe_gate}, off by, of its size: {', '.join(errors)}")
