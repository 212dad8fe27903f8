"""Tensors for kernels that are not written in PyTorch.

Every input is a torch tensor and so a DLPack producer: `jax.dlpack.from_dlpack(call.q)` shares its memory. With
`Capabilities(arrays="numpy")` the inputs are NumPy arrays instead. A result may be a torch tensor, a NumPy array or
any object with `__dlpack__`, whatever the inputs are.

NumPy has no bf16. Where the package ml_dtypes is installed, such arrays are `ml_dtypes.bfloat16`; else they are
uint16 and hold the bits, on the way in and on the way out.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .adapter import AnyCall
from .capabilities import Capabilities


def as_asked(call: AnyCall, caps: Capabilities) -> Any:
    """The call with the arrays that the kernel wants, over the same memory."""
    if caps.arrays == "torch":
        return call
    return replace(call, **{name: to_numpy(x) for name, x in call.tensors().items()})


def to_numpy(x: Tensor) -> Any:
    """A NumPy array over the tensor's memory, with its strides."""
    if x.dtype != torch.bfloat16:
        return x.numpy()
    bits = x.view(torch.uint16).numpy()
    return bits.view(_bfloat16()) if find_spec("ml_dtypes") else bits


def as_tensor(x: Any, half: bool = False) -> Any:
    """A tensor over the array's memory; what is no array stays. With `half`, uint16 holds the bits of bf16."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, np.ndarray):
        x = x if x.flags.writeable else x.copy()
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
        if x.dtype == np.uint16 and half:
            return torch.from_numpy(x).view(torch.bfloat16)
        return torch.from_numpy(x)
    return torch.utils.dlpack.from_dlpack(x) if hasattr(x, "__dlpack__") else x


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16
