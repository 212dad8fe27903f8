"""fla 0.6.0: a large A_log makes the softplus gate inside the kernels NaN where it is 0.

    TRITON_INTERPRET=1 python fla_softplus_overflow.py     on a CPU; without the variable on a GPU

The gate is -exp(A_log) softplus(x): with A_log = 90 the first factor is inf in fp32, with x = -200 the second one
is 0, and the product is NaN. Exactly it is -1.7e-48, no decay at all. Seen by front.softplus_overflow; a backward
of the same kind was reported as flash-linear-attention #1007.
"""

import torch
from fla_kernels import chunk_kda, device, fused_recurrent_kda, products

T, K, V, RAW, A_LOG = 2, 16, 16, -200.0, 90.0
zeros = torch.zeros(1, T, 1, K, device=device, dtype=torch.float16)
call = {
    "q": zeros,
    "k": zeros,
    "v": torch.zeros(1, T, 1, V, device=device, dtype=torch.float16),
    "g": torch.full((1, T, 1, K), RAW, device=device),
    "beta": torch.zeros(1, T, 1, device=device),
    "A_log": torch.full((1,), A_LOG, device=device),
    "dt_bias": torch.zeros(K, device=device),
    "initial_state": torch.ones(1, 1, K, V, device=device),
}
for function in (fused_recurrent_kda, chunk_kda):
    with products():
        _, state = function(**call, use_gate_in_kernel=True, output_final_state=True)
    print(f"{function.__name__}: left of a state of 1: {state.mean().item()}; exactly: 1.0")
