"""The short convolution before KDA: depthwise, causal, W taps, with SiLU; each kernel beside its plain form.

    y[t, d] = activation(bias[d] + sum_j weight[d, j] x[t - (W - 1) + j, d])

What lies before a segment's first token is its state [D, W - 1]: the last W - 1 inputs, oldest first, raw
(before weights and activation). A segment shorter than W - 1 keeps some of the old ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import silu

from .configurations import describe, empty
from .conv_checks import check_conv
from .gate_math import sigmoid
from .support import MIN_BLOCK, Configuration, Launch, cdiv, check_no_gradient, define_op, next_power_of_2

BLOCK_T = 16  # tokens a program; more of them spill, with a state's pointers beside x's
BLOCK_D = 128  # channels a program: rows of 256 bytes in bf16
NUM_WARPS = 4


def causal_conv1d_ref(
    x: Float[Tensor, "B T D"],
    weight: Float[Tensor, "D W"],
    *,
    bias: Float[Tensor, D] | None = None,
    activation: str | None = "silu",
    initial_state: Float[Tensor, "N D W-1"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, N + 1] | None = None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N D W-1"] | None]:
    """The convolution in plain PyTorch, in the dtype of x: fp64 for a judge."""
    B, T, D = x.shape
    W = weight.shape[1]
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    N = B if offsets is None else len(offsets) - 1
    state = x.new_zeros(N, D, W - 1) if initial_state is None else initial_state
    y, final = torch.zeros_like(x), []
    for n in range(N):
        row, tokens = (n, slice(0, T)) if offsets is None else (0, slice(offsets[n], offsets[n + 1]))
        seen = torch.cat([rearrange(state[n], "d w -> w d"), x[row, tokens]])  # [W - 1 + T, D]
        length = len(seen) - (W - 1)
        taps = [weight[:, j] * seen[j : j + length] for j in range(W)]
        y[row, tokens] = sum(taps) + (0 if bias is None else bias)
        final.append(rearrange(seen[length:], "w d -> d w"))
    return y if activation is None else silu(y), torch.stack(final) if output_final_state else None


@triton.jit
def find_segments(cu_seqlens, tokens, N, STEPS: tl.constexpr):
    """Each token's segment by bisection: how many of the N ends lie at or before it. N is past the last one."""
    low = tokens * 0
    high = low + N
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        end = tl.load(cu_seqlens + middle + 1, mask=low < high, other=0).to(tl.int64)
        ended = (low < high) & (end <= tokens)
        high = tl.where(ended, high, middle)
        low = tl.where(ended, middle + 1, low)
    return low


@triton.jit
def read_tap(weight, strides, d, j, D):
    """weight[d, j] in fp32."""
    return tl.load(weight + d * strides[0] + j * strides[1], mask=d < D, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "N"])
def conv_kernel(
    x,
    x_strides,
    y,
    weight,
    weight_strides,
    bias,
    h0,
    h0_strides,
    cu_seqlens,
    T,
    N,
    D,
    W: tl.constexpr,
    SILU: tl.constexpr,
    STEPS: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Program (row, BT tokens, BD channels): every tap reads x, or the state where it reaches before the start."""
    blocks = tl.cdiv(T, BT)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    tokens = (tl.program_id(0) % blocks) * BT + tl.arange(0, BT).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD).to(tl.int64)
    n = tokens * 0 + row
    start = tokens * 0
    in_segment = tokens < T
    if cu_seqlens is not None:
        n = find_segments(cu_seqlens, tokens, N, STEPS)
        in_segment = in_segment & (n < N)
        start = tl.load(cu_seqlens + n, mask=in_segment, other=0).to(tl.int64)

    total = tl.zeros((BT, BD), tl.float32)
    if bias is not None:
        total += tl.load(bias + d, mask=d < D, other=0.0).to(tl.float32)[None, :]
    if h0 is not None:
        age = tl.where(in_segment, tokens - start, W)
        if tl.min(age) < W - 1:  # only where a segment begins does a tap reach before it
            for j in tl.static_range(W - 1):
                kept = age + j
                pointers = (
                    h0 + n[:, None] * h0_strides[0] + d[None, :] * h0_strides[1] + kept[:, None] * h0_strides[2]
                )
                before = (kept >= 0) & (kept < W - 1)
                h0_j = tl.load(pointers, mask=before[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
                total += h0_j * read_tap(weight, weight_strides, d, j, D)[None, :]
    for j in tl.static_range(W):
        source = tokens - (W - 1) + j
        inside = in_segment & (source >= start) & (source >= 0)
        pointers = x + row * x_strides[0] + source[:, None] * x_strides[1] + d[None, :] * x_strides[2]
        x_j = tl.load(pointers, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
        total += x_j * read_tap(weight, weight_strides, d, j, D)[None, :]
    if SILU:
        total = total * sigmoid(total)
    total = tl.where(in_segment[:, None], total, 0.0)
    pointers = y + (row * T + tokens[:, None]) * D + d[None, :]
    tl.store(pointers, total.to(y.dtype.element_ty), mask=(tokens < T)[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["T"])
def conv_state_kernel(
    x, x_strides, h0, h0_strides, ht, cu_seqlens, T, D, W: tl.constexpr, BW: tl.constexpr, BD: tl.constexpr
):
    """Program (n, BD channels): the last W - 1 inputs of a segment, old state where the segment is shorter."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BD + tl.arange(0, BD).to(tl.int64)
    taps = tl.arange(0, BW).to(tl.int64)
    first = n * 0
    end = first + T
    row = n
    if cu_seqlens is not None:
        first = tl.maximum(tl.load(cu_seqlens + n).to(tl.int64), 0)
        end = tl.minimum(tl.load(cu_seqlens + n + 1).to(tl.int64), T)
        row = n * 0
    in_state = (d < D)[:, None] & (taps < W - 1)[None, :]
    source = end - (W - 1) + taps
    pointers = x + row * x_strides[0] + source[None, :] * x_strides[1] + d[:, None] * x_strides[2]
    state = tl.load(pointers, mask=in_state & (source >= first)[None, :], other=0.0)
    if h0 is not None:
        kept = source - first + (W - 1)
        pointers = h0 + n * h0_strides[0] + d[:, None] * h0_strides[1] + kept[None, :] * h0_strides[2]
        old = in_state & ((source < first) & (kept >= 0) & (kept < W - 1))[None, :]
        state = tl.where((source >= first)[None, :], state, tl.load(pointers, mask=old, other=0.0))
    tl.store(ht + (n * D + d[:, None]) * (W - 1) + taps[None, :], state, mask=in_state)


def conv_launch(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    bias: Tensor | None,
    silu: bool,
    h0: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Launch:
    """The launch that fills y [B, T, D], contiguous."""
    B, T, D = x.shape
    N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    BD = min(BLOCK_D, max(MIN_BLOCK, next_power_of_2(D)))
    arguments = _inputs(x, h0, cu_seqlens) | {
        "y": y,
        "weight": weight,
        "weight_strides": weight.stride(),
        "bias": bias,
    }
    arguments |= {"N": N, "W": weight.shape[1], "SILU": silu, "STEPS": N.bit_length(), "BT": BLOCK_T, "BD": BD}
    return Launch(conv_kernel, (B * cdiv(T, BLOCK_T), cdiv(D, BD)), arguments, NUM_WARPS)


def conv_state_launch(x: Tensor, h0: Tensor | None, ht: Tensor, cu_seqlens: Tensor | None) -> Launch:
    """The launch that fills ht [N, D, W - 1], contiguous."""
    N, D, kept = ht.shape
    BD = min(BLOCK_D, max(MIN_BLOCK, next_power_of_2(D)))
    arguments = _inputs(x, h0, cu_seqlens) | {
        "ht": ht,
        "W": kept + 1,
        "BW": next_power_of_2(kept + 1),
        "BD": BD,
    }
    return Launch(conv_state_kernel, (N if kept else 0, cdiv(D, BD)), arguments, NUM_WARPS)


def _inputs(x: Tensor, h0: Tensor | None, cu_seqlens: Tensor | None) -> dict[str, Any]:
    strides = (0, 0, 0) if h0 is None else h0.stride()
    T, D = x.shape[1:]
    return {
        "x": x,
        "x_strides": x.stride(),
        "h0": h0,
        "h0_strides": strides,
        "cu_seqlens": cu_seqlens,
        "T": T,
        "D": D,
    }


def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu: bool,
    initial_state: Tensor | None,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    y, ht = _conv_fake(x, weight, bias, silu, initial_state, output_final_state, cu_seqlens)
    conv_launch(x, weight, y, bias, silu, initial_state, cu_seqlens).run()
    if output_final_state:
        conv_state_launch(x, initial_state, ht, cu_seqlens).run()
    return y, ht


def _conv_fake(
    x: Tensor, weight: Tensor, bias: Any, silu: bool, initial_state: Any, output_final_state: bool, cu_seqlens: Any
) -> tuple[Tensor, Tensor]:
    """Memory for y and the final state; an operator returns no None, so 0 states stand for none."""
    N = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty((N if output_final_state else 0, x.shape[2], weight.shape[1] - 1))


_conv_op = define_op(
    "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor? initial_state, "
    "bool output_final_state, Tensor? cu_seqlens) -> (Tensor, Tensor)",
    _conv,
    _conv_fake,
)


def causal_conv1d(
    x: Float[Tensor, "B T D"],
    weight: Float[Tensor, "D W"],
    *,
    bias: Float[Tensor, D] | None = None,
    activation: str | None = "silu",
    initial_state: Float[Tensor, "N D W-1"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, N + 1] | None = None,
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "N D W-1"] | None]:
    """Depthwise causal convolution over a batch or packed segments; sums in fp32, y and the state in x's dtype.

    activation is "silu" or None. weight and bias are of x's dtype or fp32, initial_state of x's dtype. Forward
    only: an input that requires a gradient is refused. T = 0 returns an empty y and the initial state; an empty
    segment passes its state through; rows past the last offset give 0.
    """
    check_conv(x, weight, bias, activation, initial_state, cu_seqlens)
    check_no_gradient("causal_conv1d", x, weight, bias, initial_state, instead="use torch.no_grad()")
    silu = activation == "silu"
    y, ht = _conv_op(x, weight, bias, silu, initial_state, output_final_state, cu_seqlens)
    return y, ht if output_final_state else None


def configurations() -> list[Configuration]:
    """The checkpoint's width and channels, packed with a state and not; bf16 and fp32."""
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        x, weight = empty(1, 64, 4096, dtype=dtype), empty(4096, 4, dtype=dtype)
        h0, cu_seqlens = empty(2, 4096, 3, dtype=dtype), empty(3, dtype=torch.int64)
        name = describe(D=4096, W=4, dtype=str(dtype).removeprefix("torch."))
        found += [
            Configuration(f"{name} packed", conv_launch(x, weight, x, None, True, h0, cu_seqlens)),
            Configuration(name, conv_launch(x, weight, x, None, True, None, None)),
            Configuration(name, conv_state_launch(x, h0, h0, cu_seqlens)),
        ]
    return found
