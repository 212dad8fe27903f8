"""fla 0.6.0: the gradient of g from `chunk_kda` with `safe_gate=True` at a constant gate of -5, the lowest it takes.

    TRITON_INTERPRET=1 python fla_chunk_gate_gradient.py        on a CPU; without the variable on a GPU

A token's decay to itself is 1, whatever the gate: what a score gives to q and what it gives to k cancel in dg, and
e^-5 of them is left. With safe_gate, the scores inside a block of 16 tokens have these two halves from two
products, whose operands are split in two numbers of bf16 each (bf16x3) without the product of the rests; between
blocks, and without safe_gate too, from two products of tf32 operands. The halves differ in their last bits, and
those are what is left in dg. In the interpreter, the same products with whole operands are right.

The exact gradient comes from the recurrence in fp64, by autograd, for the inputs as they were rounded. On an H200
(triton 3.6.0), in bf16 and chunks of 64, dg of half the tokens is off by 1.1e-2 of its size or more and at the worst
by 2.4 times its size; without safe_gate by 1.9e-3 and 0.07; in fp16 by 1.0e-2 and 4.3, and by 8.5e-4 and 0.28. Seen
there by gradients.bound: off by 97.6 and 11.7 roundings in bf16, 144 and 127 in fp16, in chunks of 64 and 32; the
limit is 8. Gates near -5 are also those of front_gradients.bounded and others of that family.
"""

import torch
from fla_kernels import chunk_kda, device, products, recurrence, variants
from torch import Tensor

torch.manual_seed(0)
H, K, V = 2, 12, 9
KERNEL = "chunk_kda_bwd_kernel_intra"  # has both kinds of products


def inputs(T: int, dtype: torch.dtype) -> list[Tensor]:
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1).to(dtype) for _ in range(2))
    v, g, beta = torch.randn(1, T, H, V).to(dtype), torch.full((1, T, H, K), -5.0), torch.rand(1, T, H)
    return [q, k, v, g, beta]


def gate_gradient(o: Tensor, leaves: list[Tensor], do: Tensor) -> Tensor:
    return torch.autograd.grad(o, leaves[3], do.to(o.device, o.dtype))[0].double().cpu()


for dtype, C in ((torch.bfloat16, 64), (torch.bfloat16, 32), (torch.float16, 64)):
    given, do = inputs(C + 7, dtype), torch.randn(1, C + 7, H, V).to(dtype)
    leaves = [x.double().requires_grad_() for x in given]
    exact = gate_gradient(recurrence(*leaves)[0], leaves, do)
    for safe_gate in (False, True):
        for whole in variants(("bf16x3",), (KERNEL,)) if safe_gate else variants():
            leaves = [x.to(device).requires_grad_() for x in given]
            with products(*whole):
                o, _ = chunk_kda(*leaves, safe_gate=safe_gate, chunk_size=C)
                dg = gate_gradient(o, leaves, do)
            error = ((dg - exact).norm(dim=-1) / exact.norm(dim=-1))[:, 1:]  # nothing to decay at the first token
            shown = f"median {error.median():.1e}, at most {error.max():.1e}"
            about = f"{dtype}, chunks of {C}, safe_gate={safe_gate}, whole: {whole or None}"
            print(f"{about}; dg of a token is off by: {shown}")
