"""This repository's `causal_conv1d` in Triton, and its step for decoding, as an adapter.

On a GPU, or anywhere in Triton's interpreter: there TRITON_INTERPRET=1 has to be set before Triton is imported, and
bf16 is not declared, because the interpreter computes with it wrongly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Capabilities, Contract, ConvCall, ShortConv
from kimi_linear.conformance.on_device import run_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("bf16", "fp16", "fp32") if DEVICE == "cuda" else ("fp32", "fp16")


def capabilities() -> Capabilities:
    from kimi_linear.triton_kernels.conv_checks import MAX_WIDTH

    return Capabilities(
        operations=("short_conv",),
        contracts=tuple(Contract(io=io, operand="fp32", chunk_size=None) for io in FORMATS),
        short_conv=ShortConv(taps=tuple(range(2, MAX_WIDTH + 1)), nobody=(-1, -7)),
    )


def identity() -> str:
    import triton

    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter"
    return f"kimi_linear.triton_kernels.causal_conv1d, triton {triton.__version__}, {where}"


def convolve(call: ConvCall, want: frozenset[str]) -> dict[str, Tensor]:
    return run_on(DEVICE, call, _step if call.operation == "short_conv_update" else _sequence)


def _sequence(call: ConvCall) -> dict[str, Tensor]:
    from kimi_linear.triton_kernels import causal_conv1d

    options: dict[str, Any] = {"initial_state": call.initial_state, "cu_seqlens": call.cu_seqlens}
    y, final_state = causal_conv1d(call.x, call.weight, **options, output_final_state=True)
    assert final_state is not None
    return {"y": y, "final_state": final_state}


def _step(call: ConvCall) -> dict[str, Tensor]:
    from kimi_linear.triton_kernels import causal_conv1d_update

    assert call.state_pool is not None
    return {"y": causal_conv1d_update(call.x, call.state_pool, call.weight, slot_indices=call.slot_indices)}
