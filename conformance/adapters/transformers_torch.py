"""The plain PyTorch functions of transformers' Kimi Linear as an adapter: somebody else's code, on a CPU.

They take no scale, no groups of value heads and no packed segments, so those are not declared. Of a front end they
have the normalisation; autograd is their backward. They carry a decorator that may swap in another package's kernel;
`__wrapped__` is what stands below it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract, FrontForm
from kimi_linear.conformance.by_autograd import gradients_of


def capabilities() -> Capabilities:
    return Capabilities(
        operations=("chunk", "recurrent", "backward"),
        contracts=(
            Contract(io="fp32", operand="fp32", chunk_size=64),
            Contract(io="fp32", operand="fp32", chunk_size=None),
        ),
        groups=False,
        free_scale=False,
        packed=False,
        front_ends=(FrontForm(),),
    )


def identity() -> str:
    import transformers

    return f"transformers {transformers.__version__}, models.kimi_linear, plain PyTorch"


def _function(name: str) -> Any:
    from transformers.models.kimi_linear import modeling_kimi_linear

    function = getattr(modeling_kimi_linear, f"{name}_kimi_delta_attention")
    return getattr(function, "__wrapped__", function)


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    return forward(call) if call.do is None else gradients_of(call, forward)


def forward(call: Call) -> dict[str, Tensor]:
    options = {"initial_state": call.initial_state, "output_final_state": True}
    options["use_qk_l2norm_in_kernel"] = call.front is not None
    o, final_state = _function(call.operation)(call.q, call.k, call.v, g=call.g, beta=call.beta, **options)
    return {"o": o, "final_state": final_state}
