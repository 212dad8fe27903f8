"""flash-linear-attention's `fused_recurrent_kda` as an adapter: on a GPU, or anywhere in Triton's interpreter.

Needs fla-core and flash-linear-attention. Where there is no GPU, TRITON_INTERPRET=1 has to be set before Triton is
imported, and bf16 is not declared, because the interpreter computes with it wrongly. Give it an environment of its
own: where fla is installed, transformers takes its kernels from there, also on a CPU.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract
from kimi_linear.conformance.on_device import run_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("bf16", "fp16", "fp32") if DEVICE == "cuda" else ("fp32", "fp16")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns where it finds no GPU
    from fla.ops.kda import fused_recurrent_kda


def capabilities() -> Capabilities:
    contracts = tuple(Contract(io=io, operand="fp32", chunk_size=None) for io in FORMATS)
    return Capabilities(operations=("recurrent",), contracts=contracts)


def identity() -> str:
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter"
    return f"fla {version('fla-core')}, fused_recurrent_kda, triton {version('triton')}, {where}"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    return run_on(DEVICE, call, _kernel)


def _kernel(call: Call) -> dict[str, Tensor]:
    inputs = (call.q, call.k, call.v, call.g, call.beta)
    o, final_state = fused_recurrent_kda(*inputs, **call.forward_options(), output_final_state=True)
    return {"o": o, "final_state": final_state}
