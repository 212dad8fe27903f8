"""One token of the short convolution for serving: states in a pool, updated in place through slot indices."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import silu

from .configurations import describe, empty
from .conv_checks import check_conv_update
from .gate_math import sigmoid
from .pool import check_slot_contents, read_slot, size_if
from .support import MIN_BLOCK, Configuration, Launch, cdiv, check_no_gradient, define_op, next_power_of_2

BLOCK_D = 128  # channels a program; with one warp the best of six choices on an H200
NUM_WARPS = 1


def causal_conv1d_update_ref(
    x: Float[Tensor, "B D"],
    conv_state: Float[Tensor, "slots D W-1"],
    weight: Float[Tensor, "D W"],
    *,
    bias: Float[Tensor, D] | None = None,
    activation: str | None = "silu",
    slot_indices: Int[Tensor, B] | None = None,
    pad_slot: int = -1,
) -> tuple[Float[Tensor, "B D"], Float[Tensor, "slots D W-1"]]:
    """The update in plain PyTorch, without touching its inputs: return y and the pool as it is afterwards."""
    y, pool = torch.zeros_like(x), conv_state.clone()
    slots = range(len(x)) if slot_indices is None else slot_indices.tolist()
    for b, slot in enumerate(slots):
        if slot != pad_slot and 0 <= slot < len(pool):
            window = torch.cat([pool[slot].to(x.dtype), x[b][:, None]], dim=1)  # [D, W]
            y[b] = (window * weight).sum(-1) + (0 if bias is None else bias)
            pool[slot] = window[:, 1:]
    return (y if activation is None else silu(y)), pool


@triton.jit
def conv_update_kernel(
    x,
    x_strides,
    y,
    pool,
    pool_strides,
    slots,
    weight,
    weight_strides,
    bias,
    slot_indices,
    slot_strides,
    pad_slot,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    BW: tl.constexpr,
    BD: tl.constexpr,
):
    """Program (b, BD channels): a window [BD, W] of W - 1 kept inputs and the new one; then all move up by one."""
    b = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD).to(tl.int64)
    taps = tl.arange(0, BW).to(tl.int64)[None, :]
    slot = b
    if slot_indices is not None:
        slot = read_slot(slot_indices, slot_strides, b, 0, 0, slots, pad_slot)
    in_state = (d < size_if(slot, D))[:, None]
    state = pool + slot * pool_strides[0] + d[:, None] * pool_strides[1] + taps * pool_strides[2]

    new = tl.load(x + b * x_strides[0] + d * x_strides[1], mask=d < D, other=0.0)
    old = tl.load(state, mask=in_state & (taps < W - 1), other=0.0)
    moved = tl.load(state + pool_strides[2], mask=in_state & (taps < W - 2), other=0.0)
    # A kept input is read by the thread that weighs it and by the one that moves it: nobody writes before both.
    tl.debug_barrier()
    moved = tl.where(taps == W - 2, new.to(pool.dtype.element_ty)[:, None], moved)
    tl.store(state, moved, mask=in_state & (taps < W - 1))

    window = tl.where(taps == W - 1, new.to(tl.float32)[:, None], old.to(tl.float32))
    weights = weight + d[:, None] * weight_strides[0] + taps * weight_strides[1]
    total = tl.sum(window * tl.load(weights, mask=(d < D)[:, None] & (taps < W), other=0.0).to(tl.float32), axis=1)
    if bias is not None:
        total += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)
    if SILU:
        total = total * sigmoid(total)
    total = tl.where(d < size_if(slot, D), total, 0.0)
    tl.store(y + b * D + d, total.to(y.dtype.element_ty), mask=d < D)


def conv_update_launch(
    x: Tensor,
    pool: Tensor,
    weight: Tensor,
    y: Tensor,
    bias: Tensor | None,
    with_silu: bool,
    slot_indices: Tensor | None,
    pad_slot: int,
) -> Launch:
    """The launch that fills y [B, D], contiguous, and updates pool [slots, D, W - 1]."""
    B, D = x.shape
    W = weight.shape[1]
    BD = min(BLOCK_D, max(MIN_BLOCK, next_power_of_2(D)))
    strides = (0, 0) if slot_indices is None else (slot_indices.stride(0), 0)
    arguments = {"x": x, "x_strides": x.stride(), "y": y, "weight": weight, "weight_strides": weight.stride()}
    arguments |= {"pool": pool, "pool_strides": pool.stride(), "slots": pool.shape[0], "bias": bias}
    arguments |= {"slot_indices": slot_indices, "slot_strides": strides, "pad_slot": pad_slot}
    arguments |= {"D": D, "W": W, "SILU": with_silu, "BW": next_power_of_2(W), "BD": BD}
    return Launch(conv_update_kernel, (B, cdiv(D, BD)), arguments, NUM_WARPS)


def _update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    with_silu: bool,
    slot_indices: Tensor | None,
    pad_slot: int,
) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    conv_update_launch(x, conv_state, weight, y, bias, with_silu, slot_indices, pad_slot).run()
    return y


def _update_fake(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_op = define_op(
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, bool silu, "
    "Tensor? slot_indices, int pad_slot) -> Tensor",
    _update,
    _update_fake,
)


def causal_conv1d_update(
    x: Float[Tensor, "B D"],
    conv_state: Float[Tensor, "slots D W-1"],
    weight: Float[Tensor, "D W"],
    *,
    bias: Float[Tensor, D] | None = None,
    activation: str | None = "silu",
    slot_indices: Int[Tensor, B] | None = None,
    pad_slot: int = -1,
    check_indices: bool = False,
) -> Float[Tensor, "B D"]:
    """Convolve one token a sequence and shift it into `conv_state`, in place; sums in fp32, y in x's dtype.

    Sequence b's state is conv_state[slot_indices[b]], or conv_state[b] without indices. An index that is
    `pad_slot`, or outside the pool, touches nothing and gives a row of 0; check_indices=True reads the indices
    on the host and raises ValueError for the latter, and for a slot that two sequences would write.
    """
    check_conv_update(x, conv_state, weight, bias, activation, slot_indices)
    check_no_gradient("causal_conv1d_update", x, conv_state, weight, bias, instead="use torch.no_grad()")
    if check_indices and slot_indices is not None:
        check_slot_contents(slot_indices, conv_state.shape[0], pad_slot, None, None)
    return _op(x, conv_state, weight, bias, activation == "silu", slot_indices, pad_slot)


def configurations() -> list[Configuration]:
    """The checkpoint's width and channels; bf16 and fp32."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x, weight, pool = empty(4, 4096, dtype=dtype), empty(4096, 4, dtype=dtype), empty(8, 4096, 3, dtype=dtype)
        slots = empty(4, dtype=torch.int32)
        name = describe(D=4096, W=4, dtype=str(dtype).removeprefix("torch."))
        found.append(Configuration(name, conv_update_launch(x, pool, weight, x, None, True, slots, -1)))
    return found
