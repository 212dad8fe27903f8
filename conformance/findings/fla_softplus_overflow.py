"""fla 0.6.0: a large A_log makes the softplus gate inside the kernels NaN.

    TRITON_INTERPRET=1 python fla_softplus_overflow.py     on a CPU; without the variable on a GPU

The gate is -exp(A_log) softplus(x): with A_log = 90 the first factor is inf in fp32, with x below about -17 the
second one is 0 there, and the product is NaN. Exactly it is -1.7e-48 for x = -200, no decay at all, and -1 for
x = -90. On an H200 (triton 3.6.0) the state is NaN in both functions, for both x. Seen by front.softplus_overflow
and front.softplus_against_rate, and with gradients by the checks of front_gradients that have the same names; a
backward of this kind was reported as flash-linear-attention #1007.
"""

import torch
from fla_kernels import chunk_kda, device, fused_recurrent_kda, products

T, K, V, A_LOG = 2, 16, 16, 90.0
zeros = torch.zeros(1, T, 1, K, device=device, dtype=torch.float16)
call = {
    "q": zeros,
    "k": zeros,
    "v": torch.zeros(1, T, 1, V, device=device, dtype=torch.float16),
    "beta": torch.zeros(1, T, 1, device=device),
    "A_log": torch.full((1,), A_LOG, device=device),
    "dt_bias": torch.zeros(K, device=device),
    "initial_state": torch.ones(1, 1, K, V, device=device),
}
for raw in (-200.0, -90.0):
    exactly = (-T * torch.tensor(A_LOG).double().exp() * torch.tensor(raw).double().exp().log1p()).exp().item()
    for function in (fused_recurrent_kda, chunk_kda):
        g = torch.full((1, T, 1, K), raw, device=device)
        with products():
            _, state = function(**call, g=g, use_gate_in_kernel=True, output_final_state=True)
        left = f"left of a state of 1: {state.mean().item()}; exactly: {exactly:.6f}"
        print(f"{function.__name__}, x = {raw:g}; {left}")
