"""fla 0.6.0: the gradient of g from `chunk_kda` in fp16, where only the final state has a gradient.

    TRITON_INTERPRET=1 python fla_chunk_state_gradient.py       on a CPU; without the variable on a GPU

dg is a sum over the tokens that follow, of what each gives as a writer less what it gives as a reader; most of it
cancels. Between blocks of 16 tokens the two halves come from products of tf32 operands, whose last bits are cut off:
an error of one half is not in the other. In the interpreter, the same products with whole operands are right.

On an H200 (triton 3.6.0) dg of half the tokens is off by 1.8e-3 of its size or more, and of one by 0.16. Seen there
by gradients.state_only: off by 18 roundings in chunks of 64, with safe_gate too; the limit is 8. The same with a
gradient of the last output alone is gradients.last_token, 15.9, and through a softplus gate
front_gradients.whole_state, 26.9.
"""

import torch
from fla_kernels import chunk_kda, device, products, recurrence, variants

torch.manual_seed(0)
C, H, K, V = 64, 2, 12, 9
T = C + 7
q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1).half() for _ in range(2))
v, beta = torch.randn(1, T, H, V).half(), torch.rand(1, T, H)
g, dht = torch.nn.functional.logsigmoid(torch.randn(1, T, H, K) + 3), torch.randn(1, H, K, V)

leaves = [x.double().requires_grad_() for x in (q, k, v, g, beta)]
exact = torch.autograd.grad(recurrence(*leaves)[1], leaves[3], dht.double())[0]
for whole in variants(("chunk_kda_bwd_kernel_intra",)):
    leaves = [x.to(device).requires_grad_() for x in (q, k, v, g, beta)]
    with products(*whole):
        _, state = chunk_kda(*leaves, chunk_size=C, output_final_state=True)
        dg = torch.autograd.grad(state, leaves[3], dht.to(device))[0].double().cpu()
    error = ((dg - exact).norm(dim=-1) / exact.norm(dim=-1))[:, 1:]  # nothing to decay at the first token
    print(f"whole: {whole or None}; dg of a token is off by: median {error.median():.1e}, at most {error.max():.1e}")
