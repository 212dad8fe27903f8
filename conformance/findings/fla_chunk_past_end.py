"""fla 0.6.0: gradients from `chunk_kda` on packed segments are whatever was in memory in the rows past the last one.

    TRITON_INTERPRET=1 python fla_chunk_past_end.py         on a CPU; without the variable on a GPU

`cu_seqlens` may end before the rows do, where a buffer has a fixed size. The output has zeros there, but of most
gradients only the rows of segments are written. PyTorch is asked here to fill new memory with NaN; left to itself
it is often zero, and then nothing shows. On an H200 (triton 3.6.0) dq, dk, dv, dg and dbeta are NaN there. Seen by
gradients.packed and front_gradients.whole_packed, which do not fill memory: what they find was left by other calls.
Reported as flash-linear-attention #892, of kernels that share code with this one.
"""

import torch
from fla_kernels import chunk_kda, device, products

torch.use_deterministic_algorithms(True, warn_only=True)  # new memory is filled with NaN
torch.manual_seed(0)
T, H, K, V, SEGMENTS = 40, 2, 12, 9, (0, 20, 33)
q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1).half() for _ in range(2))
v, g, beta = torch.randn(1, T, H, V).half(), -torch.rand(1, T, H, K), torch.rand(1, T, H)
leaves = [x.to(device).requires_grad_() for x in (q, k, v, g, beta)]
with products():
    o, _ = chunk_kda(*leaves, chunk_size=32, cu_seqlens=torch.tensor(SEGMENTS, device=device))
    gradients = torch.autograd.grad(o[:, : SEGMENTS[-1]].sum(), leaves)
for name, x in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), (o, *gradients), strict=True):
    inside, past = x[:, : SEGMENTS[-1]].isnan().any().item(), x[:, SEGMENTS[-1] :].isnan().any().item()
    print(f"{name}: NaN in the rows of segments: {inside}; past them: {past}")
