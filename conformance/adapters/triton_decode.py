"""This repository's `decode_step` in Triton as an adapter: steps on a pool of states, and whole sequences.

A whole sequence gets a pool of its own, which ends with the final states. On a GPU, or with TRITON_INTERPRET=1; then
without bf16, with which the interpreter computes wrongly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract, FrontForm, Pool
from kimi_linear.conformance.on_device import run_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("bf16", "fp16", "fp32") if DEVICE == "cuda" else ("fp32", "fp16")


def capabilities() -> Capabilities:
    from kimi_linear.triton_kernels.support import MAX_K

    return Capabilities(
        operations=("recurrent", "decode"),
        contracts=tuple(Contract(io=io, operand="fp32", chunk_size=None) for io in FORMATS),
        K=tuple(range(1, MAX_K + 1)),
        front_ends=(FrontForm(gate="softplus", beta="sigmoid"), FrontForm(gate="bounded", beta="double_sigmoid")),
        pool=Pool(dtypes=("fp32", "bf16") if DEVICE == "cuda" else ("fp32",), drafts=3),
        refuses=("shapes", "groups", "dtypes", "packed_batch", "slots"),
    )


def identity() -> str:
    import triton

    return f"kimi_linear.triton_kernels.decode_step, triton {triton.__version__}, {DEVICE}"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    return run_on(DEVICE, call, _step if call.operation == "decode" else _sequence)


def _step(call: Call) -> dict[str, Tensor]:
    from kimi_linear.triton_kernels import decode_step

    options: dict[str, Any] = {"state_pool": call.state_pool, "slot_indices": call.slot_indices}
    options |= {"num_accepted_tokens": call.accepted, "cu_seqlens": call.cu_seqlens, "front_end": call.front_end}
    return {"o": decode_step(*call.inputs(), scale=call.scale, **options)}


def _sequence(call: Call) -> dict[str, Tensor]:
    N = call.q.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    pool = call.g.new_zeros(N, call.v.shape[2], call.q.shape[-1], call.v.shape[-1])
    if call.initial_state is not None:
        pool = call.initial_state.clone(memory_format=torch.preserve_format)
    step = replace(call, state_pool=pool, slot_indices=torch.arange(N, device=pool.device))
    return _step(step) | {"final_state": pool}
