"""transformers 5.24: without tokens, Kimi Linear's plain PyTorch functions return the caller's initial state itself.

    python transformers_empty_alias.py

With tokens the final state is a new tensor. With none it is `initial_state`, so a caller that goes on with one of the
two in place changes the other. Seen by shape.T=0.
"""

import torch
from transformers.models.kimi_linear import modeling_kimi_linear

for name in ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"):
    function = getattr(modeling_kimi_linear, name)
    function = getattr(function, "__wrapped__", function)
    for T in (0, 3):
        x, state = torch.zeros(1, T, 2, 8), torch.ones(1, 2, 8, 8)
        _, final = function(x, x, x, g=x, beta=x[..., 0], initial_state=state, output_final_state=True)
        final += 1
        print(f"{name}, {T} tokens: the caller's state of 1 is {state.mean().item():g} after final += 1")
