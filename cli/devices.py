"""The tiers that need a GPU, for `kimi-linear verify --device cuda`: the Triton kernels.

Half precision has a truth and a limit of its own: the recurrence on the rounded inputs, and the envelope of the
chunk form whose products read rounded operands (`OperandRounding`). Nothing here runs with `--device cpu`.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..conformance import OperandRounding, envelope, rounded_runs
from ..reference.chunked import chunk_kda as reference_chunk_kda
from ..reference.contract import compute_dtype
from ..reference.naive import recurrent_kda

if TYPE_CHECKING:
    from .rows import Operator, Tier, VerifyCase

DEVICES = ("cpu", "cuda")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SAMPLES = 4  # rounded runs an envelope, as `verify` takes


def check_device(device: str) -> None:
    """Refuse, by name, a device that cannot be verified here."""
    if device not in DEVICES:
        raise ValueError(f"--device must be one of {', '.join(DEVICES)}; got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device must be cpu where torch finds no GPU; got cuda")
    if device == "cuda" and find_spec("triton") is None:
        raise ValueError(
            "--device cuda needs triton, which is not installed: pip install kimi-linear-reference[triton]"
        )


def device_tiers(device: str) -> list[Tier]:
    """The Triton tiers on a GPU; none on the CPU."""
    if device == "cpu":
        return []
    from ..triton_kernels import chunk_kda, fused_recurrent_kda
    from .rows import Tier

    return [
        Tier(f"Triton {name}, {short}", on_device(op, device), _no_backward, dtype)
        for name, op in (("chunk", chunk_kda), ("recurrent", fused_recurrent_kda))
        for short, dtype in DTYPES.items()
    ]


def on_device(op: Operator, device: str) -> Operator:
    """`op` on tensors of the CPU: arguments go to the device, results come back."""

    @torch.no_grad()
    def run(*inputs: Tensor, **options: Any) -> list[Tensor]:
        moved = {name: _moved(value, device) for name, value in options.items()}
        return [y.cpu() for y in op(*(x.to(device) for x in inputs), **moved)]

    return run


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # a front end, its gate
        fields = {field.name: _moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def run_forward(case: VerifyCase, op: Operator, dtype: torch.dtype) -> list[Tensor]:
    """o and the final state of a case in this dtype; a state is fp32 or wider."""
    options = dict(case.options)
    if "initial_state" in options:
        options["initial_state"] = options["initial_state"].to(compute_dtype(dtype))
    return list(op(*(x.to(dtype) for x in case.inputs), **options, output_final_state=True))


def half_truth(case: VerifyCase, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """The recurrence in fp64 on inputs rounded to fp16 or bf16, and the envelopes of rounded operands."""
    rounded = dataclasses.replace(case, inputs=tuple(x.to(dtype).double() for x in case.inputs))
    exact = run_forward(rounded, recurrent_kda, torch.float64)
    if case.exact:
        return exact, [torch.zeros_like(y[..., 0]) for y in exact]

    def run() -> list[Tensor]:
        return run_forward(rounded, reference_chunk_kda, torch.float64)

    runs = rounded_runs(run, dtype, SAMPLES, rounding=OperandRounding)
    return exact, [envelope(y, samples, dtype) for y, samples in zip(exact, runs, strict=True)]


def _no_backward(*_: Any, **__: Any) -> list[Tensor]:
    raise NotImplementedError("the Triton tiers are forward only")
