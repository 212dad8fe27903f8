"""A slice of channels of one tile: read with its gate applied, written to the workspace, done again where it faded.

The tiles kernel takes bf16 rows with one product from the middle (`chunk_products`). That has a range, which trained
gates rarely leave; the rows that do are done again here by halving, a few channels at a time. Which rows those are,
no later token decides.
"""

import triton
import triton.language as tl

from .chunk_products import FAINT, add_products_by_halving, faint_rows
from .gate_math import GATE_NONE, log2_decay

FEW = tl.constexpr(16)  # channels at a time where a row is faint: that is rare, and must not cost registers


@triton.jit
def load_slice(inputs, strides, gate, channel, valid, K: tl.constexpr, GATE: tl.constexpr):
    """Rows of q and k of a slice of channels, and their gates in log2 units; 0 past the tokens or channels."""
    q, k, g, bias = inputs
    q_st, k_st, g_st = strides
    A_log, lower_bound = gate
    r = tl.arange(0, valid.shape[0]).to(tl.int64)[:, None]
    mask = valid[:, None] & (channel < K)[None, :]
    x_k = tl.load(k + r * k_st + channel[None, :], mask=mask, other=0.0)
    x_q = tl.load(q + r * q_st + channel[None, :], mask=mask, other=0.0)
    x_g = tl.load(g + r * g_st + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    x_bias = tl.zeros(channel.shape, tl.float32)
    if GATE != GATE_NONE:
        x_bias = tl.load(bias + channel, mask=channel < K, other=0.0).to(tl.float32)
    x_g = tl.where(valid[:, None], log2_decay(x_g, x_bias[None, :], A_log, lower_bound, GATE), 0.0)
    return x_q, x_k, x_g


@triton.jit
def store_slice(outputs, at, k_s, k_e, q_s, left, mask, FROM_START: tl.constexpr = 1.0):
    """k from the tile's start and to its end, q from its start, times what is left to apply to a row of k and of q.

    FROM_START is left to apply to k_s and q_s besides; of these only the rows in `mask` are written, if there is one.
    """
    k_start, k_end, q_start = outputs
    k_left, q_left = left
    DOT: tl.constexpr = k_start.dtype.element_ty
    tl.store(k_start + at, (k_s * (k_left * FROM_START)[:, None]).to(DOT), mask=mask)
    tl.store(k_end + at, (k_e * k_left[:, None]).to(DOT))
    tl.store(q_start + at, (q_s * (q_left * FROM_START)[:, None]).to(DOT), mask=mask)


@triton.jit
def redo_faint_rows(
    A, Aqk, total, inputs, strides, gate, outputs, channel, k0, left, valid,
    KP: tl.constexpr, K: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A and Aqk of a slice, and its rows in the workspace, with the faint rows made by halving.

    `total` is what each channel loses in the tile (log2). Rows before the first faint one keep their bits; k to the
    tile's end is made anew in all rows, since only later tiles read it.
    """
    BK: tl.constexpr = channel.shape[0]
    DOT: tl.constexpr = outputs[0].dtype.element_ty
    if tl.min(total, axis=0) < FAINT + 1:  # an octave, in case this sum was rounded otherwise than that of the rows
        tl.debug_barrier()  # what is written here goes over what was written
        faint = faint_rows(load_slice(inputs, strides, gate, channel, valid, K, GATE)[2])
        A_faint = tl.zeros(A.shape, tl.float32)
        Aqk_faint = tl.zeros(A.shape, tl.float32)
        for c0 in tl.range(0, BK, FEW):
            few = k0 + c0 + tl.arange(0, FEW)
            x_q, x_k, x_g = load_slice(inputs, strides, gate, few, valid, K, GATE)
            k_s, k_e, q_s, A_faint, Aqk_faint = add_products_by_halving(
                x_q, x_k, x_g, A_faint, Aqk_faint, DOT, PRECISION
            )
            at = tl.arange(0, valid.shape[0])[:, None] * KP + few[None, :]
            store_slice(outputs, at, k_s, k_e, q_s, left, faint[:, None])
        A = tl.where(faint[:, None], A_faint, A)
        Aqk = tl.where(faint[:, None], Aqk_faint, Aqk)
    return A, Aqk
