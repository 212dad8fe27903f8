"""Calls move to the device where a kernel runs, and its results come back.

The judge keeps its tensors on the CPU. What it put there to catch mistakes has to travel too: strides, the buffers
around sliced inputs, and, on the way back, whatever the kernel wrote into an input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from .adapter import AnyCall

Results = dict[str, Tensor]
C = TypeVar("C", bound=AnyCall)


def run_on(device: str, call: C, kernel: Callable[[C], Results]) -> Results:
    """The kernel's results for `call` with every tensor on `device`, as tensors of the CPU.

    Inputs that the kernel changed there are changed here as well, and a result that lives in an input's memory
    comes back as that input.
    """
    here = call.tensors()
    there = {name: moved(x, device) for name, x in here.items()}
    results = kernel(replace(call, **there))  # type: ignore[arg-type]
    homes = {x.untyped_storage().data_ptr(): name for name, x in there.items() if x.numel()}
    for name, x in here.items():
        x.untyped_storage().copy_(there[name].untyped_storage())
    return {name: _fetched(x, homes, here) for name, x in results.items()}


def moved(x: Tensor, device: str) -> Tensor:
    """x on a device with its strides, its offset and all of the buffer that it is cut from."""
    storage = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).to(device, copy=True).untyped_storage()
    return torch.empty(0, dtype=x.dtype, device=device).set_(storage, x.storage_offset(), x.shape, x.stride())


def _fetched(x: Tensor, homes: dict[int, str], here: dict[str, Tensor]) -> Tensor:
    home = homes.get(x.untyped_storage().data_ptr()) if x.numel() else None
    return x.cpu() if home is None else here[home].as_strided(x.shape, x.stride(), x.storage_offset())
