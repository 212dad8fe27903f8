"""This repository's `decode_step` in Triton as an adapter: the serving kernel asked as a recurrent one.

Its states live in a pool that it updates in place, so each call gets a pool of its own with the initial states in
its slots, and what the slots hold afterwards are the final states. On a GPU, or in Triton's interpreter with
TRITON_INTERPRET=1 set before Triton is imported; there without bf16, with which the interpreter computes wrongly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract
from kimi_linear.conformance.on_device import run_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("bf16", "fp16", "fp32") if DEVICE == "cuda" else ("fp32", "fp16")


def capabilities() -> Capabilities:
    from kimi_linear.triton_kernels.support import MAX_K

    return Capabilities(
        operations=("recurrent",),
        contracts=tuple(Contract(io=io, operand="fp32", chunk_size=None) for io in FORMATS),
        K=tuple(range(1, MAX_K + 1)),
    )


def identity() -> str:
    import triton

    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter"
    return f"kimi_linear.triton_kernels.decode_step, triton {triton.__version__}, {where}"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    return run_on(DEVICE, call, _kernel)


def _kernel(call: Call) -> dict[str, Tensor]:
    from kimi_linear.triton_kernels import decode_step

    N = call.q.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    if call.initial_state is None:
        pool = call.g.new_zeros(N, call.v.shape[2], call.q.shape[-1], call.v.shape[-1])
    else:
        pool = call.initial_state.clone(memory_format=torch.preserve_format)
    slots = torch.arange(N, device=pool.device)
    inputs = (call.q, call.k, call.v, call.g, call.beta)
    o = decode_step(*inputs, state_pool=pool, slot_indices=slots, scale=call.scale, cu_seqlens=call.cu_seqlens)
    return {"o": o, "final_state": pool}
