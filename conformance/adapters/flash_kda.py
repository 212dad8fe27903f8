"""FlashKDA's Python API as an adapter: a Hopper or Blackwell GPU, where the package `flash_kda` is installed.

Normalisation, bounded gate and the sigmoid of beta are always inside, so every call goes through that front end.
K = V = 128, no groups, chunks of 16 tokens, states V x K and in bf16 between the chunks, g and beta in bf16.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract, FrontForm, package
from kimi_linear.conformance.on_device import run_on

DIM = 128


def capabilities() -> Capabilities:
    if not torch.cuda.is_available():
        raise RuntimeError("FlashKDA needs a GPU of compute capability 9.0 or later")
    package("flash_kda", "FlashKDA, built for this GPU")
    return Capabilities(
        contracts=(Contract(state="bf16", chunk_size=16, activation="tf32"),),
        K=(DIM,),
        V=(DIM,),
        groups=False,
        beta_above_one=False,
        gate_dtype="io",
        state_layout="VK",
        packed_dtype="int64",
        front_ends=(FrontForm(gate="bounded", beta="sigmoid"),),
        plain=False,
    )


def identity() -> str:
    module = import_module("flash_kda")
    return f"flash_kda {getattr(module, '__version__', '')}, fwd, {torch.cuda.get_device_name()}"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    return run_on("cuda", call, _kernel)


def _kernel(call: Call) -> dict[str, Tensor]:
    assert call.front is not None
    N = call.q.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    o = torch.empty_like(call.v, memory_format=torch.contiguous_format)
    final_state = torch.empty(N, call.v.shape[2], DIM, DIM, device=o.device)
    state = None if call.initial_state is None else call.initial_state.contiguous()
    inputs = [x.contiguous() for x in call.inputs()]
    gate = {"A_log": call.A_log, "dt_bias": call.dt_bias, "lower_bound": call.front.lower_bound}
    options = {"initial_state": state, "final_state": final_state, "cu_seqlens": call.cu_seqlens}
    import_module("flash_kda").fwd(*inputs, call.scale, o, **gate, **options)
    return {"o": o, "final_state": final_state}
