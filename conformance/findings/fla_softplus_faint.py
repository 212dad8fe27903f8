"""fla 0.6.0: the softplus gate inside `fused_recurrent_kda` is 0 below about -17, so nothing is forgotten.

    TRITON_INTERPRET=1 python fla_softplus_faint.py        on a CPU; without the variable on a GPU

softplus(x) = log(1 + exp(x)) rounds 1 + exp(x) to 1 in fp32 for x < -16.6; log1p(exp(x)) keeps it. With a rate
exp(A_log) of 1e5, x = -18 is a gate of -1.5e-3 a token, and after 2000 tokens e^-3 of a state is left instead of
all of it. Seen by front.softplus_faint.
"""

import torch
from fla_kernels import device, fused_recurrent_kda

T, K, V, RAW, A_LOG = 2000, 16, 16, -18.0, 11.5
zeros = torch.zeros(1, T, 1, K, device=device)
call = {
    "q": zeros,
    "k": zeros,
    "v": torch.zeros(1, T, 1, V, device=device),
    "g": torch.full((1, T, 1, K), RAW, device=device),
    "beta": torch.zeros(1, T, 1, device=device),
    "A_log": torch.full((1,), A_LOG, device=device),
    "dt_bias": torch.zeros(K, device=device),
    "initial_state": torch.ones(1, 1, K, V, device=device),
}
_, state = fused_recurrent_kda(**call, use_gate_in_kernel=True, output_final_state=True)
gate = -torch.tensor(A_LOG, dtype=torch.float64).exp() * torch.tensor(RAW, dtype=torch.float64).exp().log1p()
print(f"left of a state of 1: {state.mean().item():.6f}; exactly: {(T * gate).exp().item():.6f}")
