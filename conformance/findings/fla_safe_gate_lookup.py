"""fla 0.6.0: with `safe_gate=True`, `chunk_kda` does not give back exactly what it has just stored.

    TRITON_INTERPRET=1 python fla_safe_gate_lookup.py           on a CPU; without the variable on a GPU

Unit vectors as keys, beta = 1, no decay, and a query that is the key just written: the output is scale * v, with
nothing to round. Inside a block of 16 tokens safe_gate takes a decay apart into exp2(a) and exp2(-a), where a is no
whole number, and multiplies them as operands of tf32, so even a decay of 1 is off. Without safe_gate nothing is,
nor, in the interpreter, with whole operands there.

The same with random inputs and a gate of -5, the lowest: there the output is mostly what was just written.

On an H200 (triton 3.6.0) 4369 of 5320 elements are off in fp16 and 158 in bf16, none without safe_gate; at a gate of
-5 o is off by 8.7e-4 of its size, without safe_gate by 3.7e-4. Seen there by relation.lookup: in chunks of 64 82 % of
the numbers differ in fp16, such as -0.49878 for -0.5, and 8 % in bf16, such as -0.24902 for -0.25; also by
exact.halves, relation.overwrite and gate.bound in fp16.
"""

import torch
from fla_kernels import chunk_kda, device, products, recurrence, variants
from torch import Tensor

torch.manual_seed(0)
T, H, K, V, SCALE = 133, 2, 24, 20, 0.25
BLOCKS = "chunk_kda_fwd_kernel_intra_sub_chunk"
k = torch.eye(K)[torch.randint(K, (1, T, H))]
v = torch.randint(-3, 4, (1, T, H, V)).float()
g, beta = torch.zeros(1, T, H, K), torch.ones(1, T, H)
unit = torch.nn.functional.normalize(torch.randn(2, 1, T, H, K), dim=-1).half()


def outputs(*inputs: Tensor, safe_gate: bool, scale: float | None = None) -> Tensor:
    return chunk_kda(*(x.to(device) for x in inputs), scale=scale, safe_gate=safe_gate)[0].double().cpu()


for safe_gate in (False, True):
    for whole in variants((BLOCKS,), (BLOCKS, "inverse")) if safe_gate else variants():
        about = f"safe_gate={safe_gate}, whole: {whole or None}"
        with products(*whole):
            for dtype in (torch.float16, torch.bfloat16):
                x = k.to(dtype)
                wrong = outputs(x, x, v.to(dtype), g, beta, scale=SCALE, safe_gate=safe_gate) != SCALE * v
                print(f"{about}, {dtype}: {wrong.sum().item()} of {wrong.numel()} elements are off")
            inputs = (*unit, torch.randn(1, T, H, V).half(), torch.full((1, T, H, K), -5.0), torch.rand(1, T, H))
            exact = recurrence(*(x.double() for x in inputs))[0]
            error = (outputs(*inputs, safe_gate=safe_gate) - exact).norm() / exact.norm()
            print(f"{about}, a gate of -5: o is off by {error:.1e} of its size")
