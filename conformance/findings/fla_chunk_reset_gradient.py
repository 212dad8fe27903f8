"""fla 0.6.0: the gradient of g from `chunk_kda` is not 0 at a token that forgets everything.

    TRITON_INTERPRET=1 python fla_chunk_reset_gradient.py       on a CPU; without the variable on a GPU

After a gate of -1e4, or of -30, next to nothing from before the token is left, and a little more or less of the gate
changes nothing: its dg is 0, or 1e-13 of the largest. `chunk_kda` adds up, over the tokens that follow, what each
gives as a reader less what it gives as a writer. That cancels; but between blocks of 16 tokens the two halves come
from two products of tf32 operands, and differ by their last bits. In the interpreter, with whole operands there, what
is left has the size of a rounding of fp32. A softplus gate inside makes gates of -30 with rates as models have them.

On an H200 (triton 3.6.0) it is 3.1e-4 to 4.6e-4 of the largest. Seen there by gradients.edge_resets, in bf16 and fp16
off by 461 to 632 roundings of fp32, and by front_gradients.softplus and others of that family, in fp16 by 10.8 to
66.8; the limit is 8.
"""

import torch
from fla_kernels import chunk_kda, device, products, recurrence, variants

torch.manual_seed(0)
C, H, K, V = 64, 2, 12, 9
T = C + 7
for dtype in (torch.bfloat16, torch.float16):
    for gate in (-1e4, -30.0):
        q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1).to(dtype) for _ in range(2))
        v, do, beta = torch.randn(1, T, H, V).to(dtype), torch.randn(1, T, H, V).to(dtype), torch.rand(1, T, H)
        g = -0.05 * torch.nn.functional.softplus(torch.randn(1, T, H, K))
        g[:, ::32] = gate
        leaves = [x.double().requires_grad_() for x in (q, k, v, g, beta)]
        exact = torch.autograd.grad(recurrence(*leaves)[0], leaves[3], do.double())[0]
        for whole in variants(("chunk_kda_bwd_kernel_intra",)):
            leaves = [x.to(device).requires_grad_() for x in (q, k, v, g, beta)]
            with products(*whole):
                dg = torch.autograd.grad(chunk_kda(*leaves, chunk_size=C)[0], leaves[3], do.to(device))[0]
            found, exactly = ((x[:, ::32].abs().max() / exact.abs().max()).item() for x in (dg.double().cpu(), exact))
            about = f"{dtype}, a gate of {gate:g}, whole: {whole or None}"
            print(f"{about}; its dg: {found:.1e} of the largest; exactly: {exactly:.1e}")
