"""What the kernels are compiled for in reports and tests: inputs without memory, on the meta device.

A kernel module's `configurations()` builds real launches from them, with the code that users' calls go through,
so that a report compiles what ships and not a copy of its parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..reference.front_end import FrontEnd
from ..reference.gates import BoundedGate, SoftplusGate

META = "meta"
CHECKPOINT = {"H": 32, "HV": 32, "K": 128, "V": 128}  # heads and channels of Kimi-Linear-48B


def example_inputs(B: int, T: int, sizes: dict[str, int], dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """q, k, v, g and beta of a call with these H, HV, K and V."""
    H, HV, K, V = (sizes[name] for name in ("H", "HV", "K", "V"))
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, K), "beta": (B, T, HV)}
    return {name: torch.empty(shape, dtype=dtype, device=META) for name, shape in shapes.items()}


def example_front_ends(HV: int, K: int) -> dict[str, FrontEnd | None]:
    """Each gate with everything fused, and none."""
    A_log, dt_bias = torch.empty(HV, device=META), torch.empty(HV, K, device=META)
    return {
        "softplus": FrontEnd(gate=SoftplusGate(A_log, dt_bias)),
        "bounded": FrontEnd(gate=BoundedGate(A_log, dt_bias), beta="double_sigmoid"),
        "given": None,
    }


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device=META)


def describe(**sizes: Any) -> str:
    """A configuration's name: `K=128 V=128 bf16`."""
    return " ".join(f"{name}={value}" for name, value in sizes.items())
