"""fla 0.6.0: the gradient of g from `chunk_kda` is made of states in the format of q, though the state is of fp32.

    TRITON_INTERPRET=1 python fla_chunk_saved_states.py         on a CPU; without the variable on a GPU

For its backward the kernel keeps the state of each chunk, and that state's gradient, in bf16 or fp16. Matrix products
would round them anyway; but a part of dg is a sum over channels of one times the other, and the two are multiplied in
that format too. Among many tokens it does not show. In a segment of one it is most of dg, and all of it where nothing
is written: dg = e^g rowsum(h0 dht). The last column is how far that is off for h0 and dht rounded to the format, in
fp64 from there.

Seen by gradients.packed and front_gradients.whole_packed, in the interpreter: in a segment of one token off by 11 to
25 roundings of fp32, and by 1.2 to 1.5 with these states kept in fp32. On a GPU the checks fail by what
fla_chunk_past_end.py shows, and this is behind it: on an H200 (triton 3.6.0) dg is off by 4.2e-3 of its size in bf16
and 4.7e-4 in fp16, from rounded states by 2.6e-3 and 3.1e-4.
"""

import torch
from fla_kernels import chunk_kda, device, products

torch.manual_seed(0)
H, K, V = 4, 12, 9
for dtype in (torch.bfloat16, torch.float16):
    q, k = (torch.nn.functional.normalize(torch.randn(1, 1, H, K), dim=-1).to(dtype) for _ in range(2))
    v, g, beta = torch.randn(1, 1, H, V).to(dtype), -torch.rand(1, 1, H, K), torch.zeros(1, 1, H)
    h0, dht = torch.randn(2, 1, H, K, V)
    leaves = [x.to(device).requires_grad_() for x in (q, k, v, g, beta)]
    with products():
        _, state = chunk_kda(*leaves, initial_state=h0.to(device), output_final_state=True)
        dg = torch.autograd.grad(state, leaves[3], dht.to(device))[0].double().cpu()
    exact, rounded = (
        g.double().exp() * (x.double() * y.double()).sum(-1) for x, y in ((h0, dht), (h0.to(dtype), dht.to(dtype)))
    )
    off, expected = (((x - exact).norm() / exact.norm()).item() for x in (dg, rounded))
    print(
        f"{dtype}: dg of a segment of one token is off by {off:.1e} of its size; from rounded states {expected:.1e}"
    )
