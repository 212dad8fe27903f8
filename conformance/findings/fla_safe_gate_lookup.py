"""fla 0.6.0: with `safe_gate=True`, `chunk_kda` does not give back exactly what it has just stored.

    python fla_safe_gate_lookup.py        on a GPU

Unit vectors as keys, beta = 1, no decay, and a query that is the key just written: the output is scale * v, with
nothing to round. Inside a block of 16 tokens safe_gate takes a decay apart into exp2(a) and exp2(-a), where a is no
whole number, and multiplies them as operands of tf32, so even a decay of 1 is off. Without safe_gate nothing is.

This script itself has not been run. The suite saw it as relation.lookup on an H200 (triton 3.6.0): in chunks of 64
82 % of the numbers differ in fp16, such as -0.49878 for -0.5, and 8 % in bf16, such as -0.24902 for -0.25.
"""

import torch
from fla.ops.kda import chunk_kda

torch.manual_seed(0)
T, H, K, V, SCALE = 133, 2, 24, 20, 0.25
k = torch.eye(K)[torch.randint(K, (1, T, H))]
v = torch.randint(-3, 4, (1, T, H, V)).float()
g, beta = torch.zeros(1, T, H, K), torch.ones(1, T, H)

for dtype in (torch.float16, torch.bfloat16):
    for safe_gate in (False, True):
        x, y = k.to("cuda", dtype), v.to("cuda", dtype)
        o, _ = chunk_kda(x, x, y, g.cuda(), beta.cuda(), scale=SCALE, safe_gate=safe_gate)
        wrong = o.float().cpu() != SCALE * v
        print(f"{dtype}, safe_gate={safe_gate}: {wrong.sum().item()} of {wrong.numel()} elements are off")
