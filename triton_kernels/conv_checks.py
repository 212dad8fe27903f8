"""What the short convolution takes, checked once at its public boundary. Errors as in the contract."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.contract import check_choice
from .pool import check_index_tensor
from .support import DTYPES, check_tensor_supported

MAX_WIDTH = 16  # taps are unrolled; released models have 4
ACTIVATIONS = ("silu", None)


def check_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Check a call over whole sequences."""
    if x.dim() != 3:
        raise ValueError(f"x must be [B, T, D]; got {list(x.shape)}")
    _check_taps("causal_conv1d", x, weight, bias, activation)
    N = x.shape[0]
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2 or N != 1:
            got = f"{list(cu_seqlens.shape)} with B={N}"
            raise ValueError(f"cu_seqlens must be [N + 1] offsets of N >= 1 segments, with B = 1; got {got}")
        check_index_tensor("cu_seqlens", cu_seqlens, x)
        N = cu_seqlens.shape[0] - 1
    if initial_state is not None:
        shape = (N, x.shape[2], weight.shape[1] - 1)
        if tuple(initial_state.shape) != shape:
            raise ValueError(f"initial_state must be [N, D, W - 1] = {list(shape)}; got {list(initial_state.shape)}")
        if initial_state.dtype != x.dtype or initial_state.device != x.device:
            got = f"{initial_state.dtype} on {initial_state.device}"
            raise TypeError(f"initial_state must be {x.dtype} on {x.device}, as x; got {got}")


def check_conv_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    slot_indices: Tensor | None,
) -> None:
    """Check a call for one token a sequence."""
    if x.dim() != 2:
        raise ValueError(f"x must be [B, D]; got {list(x.shape)}")
    _check_taps("causal_conv1d_update", x, weight, bias, activation)
    B, D = x.shape
    if conv_state.dim() != 3 or tuple(conv_state.shape[1:]) != (D, weight.shape[1] - 1):
        want = f"[slots, D, W - 1] with D={D}, W={weight.shape[1]}"
        raise ValueError(f"conv_state must be {want}; got {list(conv_state.shape)}")
    if conv_state.dtype not in DTYPES or conv_state.device != x.device:
        got = f"{conv_state.dtype} on {conv_state.device}"
        raise TypeError(f"conv_state must be float16, bfloat16 or float32 on {x.device}; got {got}")
    if slot_indices is None:
        if conv_state.shape[0] < B:
            raise ValueError(f"conv_state must have a slot for each of B={B} rows; got {conv_state.shape[0]}")
        return
    if tuple(slot_indices.shape) != (B,):
        raise ValueError(f"slot_indices must be [B] with B={B}; got {list(slot_indices.shape)}")
    check_index_tensor("slot_indices", slot_indices, x)


def _check_taps(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    check_tensor_supported(op, "x", x)
    D = x.shape[-1]
    if weight.dim() != 2 or weight.shape[0] != D or not 1 <= weight.shape[1] <= MAX_WIDTH:
        raise ValueError(f"weight must be [D, W] with D={D}, 1 <= W <= {MAX_WIDTH}; got {list(weight.shape)}")
    if bias is not None and tuple(bias.shape) != (D,):
        raise ValueError(f"bias must be [D] with D={D}; got {list(bias.shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if parameter.dtype not in (x.dtype, torch.float32) or parameter.device != x.device:
            got = f"{parameter.dtype} on {parameter.device}"
            raise TypeError(f"{name} must be {x.dtype} or float32 on {x.device}; got {got}")
    check_choice("activation", activation, ACTIVATIONS)
