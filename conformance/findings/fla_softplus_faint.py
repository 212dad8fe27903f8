"""fla 0.6.0: the softplus gate inside the kernels is 0 below about -17, so nothing is forgotten.

    TRITON_INTERPRET=1 python fla_softplus_faint.py        on a CPU; without the variable on a GPU

softplus(x) = log(1 + exp(x)) rounds 1 + exp(x) to 1 in fp32 for x < -16.6; log1p(exp(x)) keeps it. With a rate
exp(A_log) of 1e6, x = -18 is a gate of -1.5e-2 a token, and after 200 tokens e^-3 of a state is left instead of all
of it; on an H200 (triton 3.6.0) all of it is left, in both functions. Seen by front.softplus_faint and, with a rate
of exp(80) at x = -80, by front_gradients.softplus_high_rate.
"""

import torch
from fla_kernels import chunk_kda, device, fused_recurrent_kda, products

T, K, V, RAW, A_LOG = 200, 16, 16, -18.0, 13.8
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
gate = -torch.tensor(A_LOG, dtype=torch.float64).exp() * torch.tensor(RAW, dtype=torch.float64).exp().log1p()
for function in (fused_recurrent_kda, chunk_kda):
    with products():
        _, state = function(**call, use_gate_in_kernel=True, output_final_state=True)
    left, exactly = state.mean().item(), (T * gate).exp().item()
    print(f"{function.__name__}: left of a state of 1: {left:.6f}; exactly: {exactly:.6f}")
