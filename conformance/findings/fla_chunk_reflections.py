"""fla 0.6.0: `chunk_kda` in fp16 with beta = 2, where every token reflects the state.

    TRITON_INTERPRET=1 python fla_chunk_reflections.py          on a CPU; without the variable on a GPU

With beta = 2 the inverse of a chunk does not fade, so an error in it stays. The inverses of the blocks of 16 tokens
are merged by products of tf32 operands, whose last bits are cut off and not rounded: twice the error, and always
towards 0. With `safe_gate=True` the scores inside a block are such products too. In the interpreter, with whole
operands in the inverse (and in the blocks), the error falls to a third or less.

On an H200 (triton 3.6.0) the state is off by 2.5e-3 of its size with any keys and by 5.0e-2 with a key and its
negative, with safe_gate by 3.7e-3 and 6.8e-2. Seen there by limit.reflection, keys.flipped and strength.two: off by
4.4 to 7.4 roundings; the limit is 4.
"""

import torch
from fla_kernels import chunk_kda, device, products, recurrence, variants

torch.manual_seed(0)
T, H, K, V = 64, 3, 24, 20
BLOCKS = "chunk_kda_fwd_kernel_intra_sub_chunk"
one = torch.nn.functional.normalize(torch.randn(1, 1, H, K), dim=-1)
flipped = one * (2 * torch.randint(2, (1, T, H, 1)) - 1)
any_keys = torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1)
v, beta = torch.randn(1, T, H, V).half(), torch.full((1, T, H), 2.0)

for name, keys, decay in (("any keys", any_keys, 0.0), ("a key and its negative", flipped, -1e-3)):
    q, k, g = any_keys.half(), keys.half(), torch.full((1, T, H, K), decay)
    exact = recurrence(*(x.double() for x in (q, k, v, g, beta)))
    for safe_gate in (False, True):
        for whole in variants(("inverse",), ("inverse", BLOCKS)) if safe_gate else variants(("inverse",)):
            with products(*whole):
                inputs = (x.to(device) for x in (q, k, v, g, beta))
                got = chunk_kda(*inputs, safe_gate=safe_gate, output_final_state=True)
            errors = ((x.double().cpu() - y).norm() / y.norm() for x, y in zip(got, exact, strict=True))
            o, state = (f"{error:.1e}" for error in errors)
            print(f"{name}, safe_gate={safe_gate}, whole: {whole or None}; off by, of its size: o {o}, state {state}")
