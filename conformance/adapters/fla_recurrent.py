"""flash-linear-attention's `fused_recurrent_kda` as an adapter: on a GPU, or anywhere in Triton's interpreter.

Needs fla-core and flash-linear-attention. Where there is no GPU, TRITON_INTERPRET=1 has to be set before Triton is
imported, and bf16 is not declared, because the interpreter computes with it wrongly. Give it an environment of its
own: where fla is installed, transformers takes its kernels from there, also on a CPU.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract, FrontForm, package
from kimi_linear.conformance.on_device import run_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("bf16", "fp16", "fp32") if DEVICE == "cuda" else ("fp32", "fp16")


def _function() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where it finds no GPU
        return package("fla.ops.kda", "fla-core and flash-linear-attention").fused_recurrent_kda


def capabilities() -> Capabilities:
    _function()
    contracts = tuple(Contract(io=io, operand="fp32", chunk_size=None) for io in FORMATS)
    whole = (FrontForm(gate="softplus", beta="sigmoid"), FrontForm(gate="bounded", beta="double_sigmoid"))
    return Capabilities(operations=("recurrent",), contracts=contracts, front_ends=(*whole, FrontForm()))


def identity() -> str:
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter"
    return f"fla {version('fla-core')}, fused_recurrent_kda, triton {version('triton')}, {where}"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    return run_on(DEVICE, call, _kernel)


def _kernel(call: Call) -> dict[str, Tensor]:
    options: dict[str, Any] = {"initial_state": call.initial_state, "cu_seqlens": call.cu_seqlens}
    if call.front is not None:
        options |= {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": call.front.gate is not None}
        options |= {"A_log": call.A_log, "dt_bias": call.dt_bias}
        options |= {"lower_bound": call.front.lower_bound if call.front.gate == "bounded" else None}
        options |= {"use_beta_sigmoid_in_kernel": call.front.beta is not None}
        options |= {"allow_neg_eigval": call.front.beta == "double_sigmoid"}
    o, state = _function()(*call.inputs(), scale=call.scale, output_final_state=True, **options)
    return {"o": o, "final_state": state}
