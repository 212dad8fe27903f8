"""fla 0.6.0: the gradient of g from `chunk_kda` with `safe_gate=True` at a constant gate of -5, the lowest it takes.

    TRITON_INTERPRET=1 python fla_chunk_gate_gradient.py        on a CPU; without the variable on a GPU

A token's decay to itself is 1, whatever the gate: what a score gives to q and what it gives to k cancel in dg, and
e^-5 of them is left. With safe_gate, the scores inside a block of 16 tokens have these two halves from two
products, whose operands are split in two numbers of bf16 each (bf16x3) without the product of the rests. The halves
differ in their last bits, and those are what is left in dg. In the interpreter, the same products with whole
operands are right.

The exact gradient comes from the recurrence in fp64, by autograd, for the inputs as they were rounded. Seen by
gradients.bound: on an H200 (triton 3.6.0) off by 97.6 and 11.7 roundings of bf16 in chunks of 64 and 32; the limit
is 8.
"""

import torch
from fla_kernels import chunk_kda, device, products, recurrence, variants
from torch import Tensor

torch.manual_seed(0)
H, K, V = 2, 12, 9


def inputs(T: int) -> list[Tensor]:
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1).bfloat16() for _ in range(2))
    v, g, beta = torch.randn(1, T, H, V).bfloat16(), torch.full((1, T, H, K), -5.0), torch.rand(1, T, H)
    return [q, k, v, g, beta]


def gate_gradient(o: Tensor, leaves: list[Tensor], do: Tensor) -> Tensor:
    return torch.autograd.grad(o, leaves[3], do.to(o.device, o.dtype))[0].double().cpu()


for C in (64, 32):
    given, do = inputs(C + 7), torch.randn(1, C + 7, H, V).bfloat16()
    leaves = [x.double().requires_grad_() for x in given]
    exact = gate_gradient(recurrence(*leaves)[0], leaves, do)
    for safe_gate in (False, True):
        for whole in variants(("bf16x3",)) if safe_gate else variants():
            leaves = [x.to(device).requires_grad_() for x in given]
            with products(*whole):
                o, _ = chunk_kda(*leaves, safe_gate=safe_gate, chunk_size=C)
                dg = gate_gradient(o, leaves, do)
            error = ((dg - exact).norm(dim=-1) / exact.norm(dim=-1))[:, 1:]  # nothing to decay at the first token
            shown = f"median {error.median():.1e}, at most {error.max():.1e}"
            print(f"chunks of {C}, safe_gate={safe_gate}, whole: {whole or None}; dg of a token is off by: {shown}")
