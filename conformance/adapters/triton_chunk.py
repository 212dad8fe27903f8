"""This repository's `chunk_kda` in Triton as an adapter: on a GPU, or anywhere in Triton's interpreter.

Where there is no GPU, TRITON_INTERPRET=1 has to be set before Triton is imported. The interpreter computes bf16
wrongly, so bf16 is declared on a GPU only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract, FrontForm
from kimi_linear.conformance.on_device import run_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("bf16", "fp16", "fp32") if DEVICE == "cuda" else ("fp32", "fp16")
FRONT_ENDS = (
    FrontForm(gate="softplus", beta="sigmoid"),
    FrontForm(gate="bounded", beta="double_sigmoid"),
    FrontForm(),
)
REFUSES = ("shapes", "groups", "dtypes", "state", "packed_batch")  # nothing that only contents tell


def capabilities() -> Capabilities:
    from kimi_linear.triton_kernels.chunk import MAX_V
    from kimi_linear.triton_kernels.support import MAX_K

    return Capabilities(
        operations=("chunk",),
        contracts=tuple(Contract(io=io, operand=io, chunk_size=64) for io in FORMATS),
        K=tuple(range(1, MAX_K + 1)),
        front_ends=FRONT_ENDS,
        refuses=REFUSES,
        V=tuple(range(1, MAX_V + 1)),
    )


def identity() -> str:
    import triton

    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "interpreter"
    return f"kimi_linear.triton_kernels.chunk_kda, triton {triton.__version__}, {where}"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    return run_on(DEVICE, call, _kernel)


def _kernel(call: Call) -> dict[str, Tensor]:
    from kimi_linear.triton_kernels import chunk_kda

    o, final_state = chunk_kda(*call.inputs(), **call.forward_options(), output_final_state=True)
    assert final_state is not None
    return {"o": o, "final_state": final_state}
