"""KDA token by token in one kernel: the recurrence with its front end fused, for short inputs and as an oracle.

The state of a head stays in registers, a slice of value columns a program; q, k, g are read once per slice.
Forward only. `decode.py` holds the serving form, with the states in a pool.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from ..reference.front_end import FrontEnd
from .configurations import CHECKPOINT, describe, empty, example_front_ends, example_inputs
from .gate import FRONT_END_SCHEMA, front_end_arguments, named_front_end
from .replay import Calls
from .step import (
    dims_of,
    first_token,
    kda_step,
    next_token,
    own_part,
    prepare_token,
    read_channels,
    read_token,
    segment,
    state_offsets,
    strides,
    token_launch,
    write_rows_past_the_end,
)
from .support import (
    MIN_BLOCK,
    Configuration,
    Launch,
    adjacent_channels,
    check_no_gradient,
    check_supported,
    checked_dims,
    define_op,
    metadata,
    next_power_of_2,
)

INSTEAD = "use chunk_kda, or call under torch.no_grad()"
# A warp alone needs no barrier: 64 registers a thread of state, and twice as fast on an H200 as four warps with 32.
STATE_OF_A_WARP = 2048


@triton.jit(do_not_specialize=["T", "N"])
def recurrent_kernel(
    q,
    k,
    v,
    g,
    beta,
    q_strides,
    k_strides,
    v_strides,
    g_strides,
    beta_strides,
    o,
    h0,
    h0_strides,
    ht,
    ht_strides,
    cu_seqlens,
    T,
    N,
    HV,
    GROUP,
    scale,
    A_log,
    dt_bias,
    lower_bound,
    l2norm_eps,
    BETA: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """Program (n, hv, slice of V): load the state, walk the tokens of sequence n, store the state."""
    n, hv, h, channels, columns = own_part(HV, GROUP, V, BK, BV)
    first, end, row = segment(cu_seqlens, n, T)
    in_k, in_v = channels < K, columns < V
    in_state = in_k[:, None] & in_v[None, :]

    S = tl.zeros((BK, BV), tl.float32)
    if h0 is not None:
        S += tl.load(h0 + state_offsets(h0_strides, n, hv, channels, columns), mask=in_state, other=0.0)

    rate = A_log
    bias = dt_bias
    if A_log is not None:
        rate = tl.load(A_log + hv).to(tl.float32)
        bias = read_channels(dt_bias + hv * K + channels, in_k)
    q, k, v, g, beta = first_token(
        q, k, v, g, beta, q_strides, k_strides, v_strides, g_strides, beta_strides,
        row, first, h, hv, channels, columns,
    )  # fmt: skip
    o += hv * V + columns

    # A token is asked for while the one before is computed with, so that its way from memory is hidden.
    q_t, k_t, v_t, g_t, beta_t = read_token(q, k, v, g, beta, channels, columns, first < end, K, V)
    for t in range(first, end):
        q, k, v, g, beta = next_token(q, k, v, g, beta, q_strides, k_strides, v_strides, g_strides, beta_strides)
        q_n, k_n, v_n, g_n, beta_n = read_token(q, k, v, g, beta, channels, columns, t + 1 < end, K, V)
        q_t, k_t, g_t, beta_t = prepare_token(q_t, k_t, g_t, beta_t, rate, bias, lower_bound, l2norm_eps, BETA)
        o_t, S = kda_step(S, q_t, k_t, v_t, g_t, beta_t, scale)
        tl.store(o + (row * T + t) * HV * V, o_t, mask=in_v)
        q_t, k_t, v_t, g_t, beta_t = q_n, k_n, v_n, g_n, beta_n

    if ht is not None:
        tl.store(ht + state_offsets(ht_strides, n, hv, channels, columns), S, mask=in_state)
    write_rows_past_the_end(o, HV * V, cu_seqlens, n, N, T, in_v)


def tile_of(K: int, V: int) -> tuple[int, int, int]:
    """BK, BV and warps: all K rows, and as many columns as a warp holds."""
    BK = max(MIN_BLOCK, next_power_of_2(K))
    BV = max(MIN_BLOCK, min(STATE_OF_A_WARP // BK, next_power_of_2(V)))
    return BK, BV, max(1, BK * BV // STATE_OF_A_WARP)


def recurrent_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    o: Tensor,
    h0: Tensor | None,
    ht: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    front_end: dict[str, Any],
) -> Launch:
    """The launch that fills o [B, T, HV, V], contiguous, and, if given, ht [N, HV, K, V]."""
    return token_launch(
        recurrent_kernel,
        *(q, k, v, g, beta, cu_seqlens, scale, tile_of(q.shape[-1], v.shape[-1])),
        **{"o": o, "h0": h0, "h0_strides": strides(h0), "ht": ht, "ht_strides": strides(ht), **front_end},
    )


CALLS = Calls("q", "k", "v", "g", "beta", "h0", "cu_seqlens", "A_log", "dt_bias", "o", "ht")


def _recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    scale: float,
    *front_end: Any,
) -> tuple[Tensor, Tensor]:
    q, k, v, g = adjacent_channels(q, k, v, g)
    # a compiler lays a state out in registers as it is loaded, and with that sums over its channels
    initial_state = None if initial_state is None else initial_state.contiguous()
    o, ht = _outputs(q, v, cu_seqlens, output_final_state)
    final = ht if output_final_state else None

    def launches() -> list[Launch]:
        raw = named_front_end(front_end)
        return [recurrent_launch(q, k, v, g, beta, o, initial_state, final, cu_seqlens, scale, raw)]

    A_log, dt_bias, *rest = front_end
    inputs = (q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias)
    CALLS.run((metadata(*inputs), output_final_state, scale, *rest), (*inputs, o, final), launches)
    return o, ht


def _outputs(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, output_final_state: bool) -> tuple[Tensor, Tensor]:
    """Memory for o and the final state; an operator returns no None, so 0 states stand for none."""
    dims = dims_of(q, v, cu_seqlens)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    states = dims.N if output_final_state else 0
    return o, q.new_empty((states, dims.HV, dims.K, dims.V), dtype=torch.float32)


def _recurrent_fake(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, h0: Any, cu: Any, final: bool, *_: Any
) -> tuple[Tensor, Tensor]:
    return _outputs(q, v, cu, final)


_op = define_op(
    "fused_recurrent_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    f"Tensor? cu_seqlens, bool output_final_state, float scale, {FRONT_END_SCHEMA}) -> (Tensor, Tensor)",
    _recurrent,
    _recurrent_fake,
)


def fused_recurrent_kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    *,
    front_end: FrontEnd | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"] | None]:
    """Kimi Delta Attention token by token, in one kernel. Eq. (1), arXiv:2510.26692.

    Shapes, dtypes and errors as in `kimi_linear.reference.contract`; g is in natural log.
    fp16, bf16 or fp32 inputs of any strides; arithmetic, state and sums in fp32; K up to 256. Forward only: an
    input that requires a gradient is refused. Contents are never read on the host, so a call can be captured
    in a CUDA graph; gates above 0 and offsets out of order are the caller's to avoid.

    T = 0 returns an empty o and the initial state. An empty packed segment passes its state through; rows past
    the last offset give 0.
    """
    dims = checked_dims(
        q,
        k,
        v,
        g,
        beta,
        front_end=front_end,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    check_supported("fused_recurrent_kda", q, dims)
    raw = front_end_arguments(front_end)
    check_no_gradient(
        "fused_recurrent_kda", q, k, v, g, beta, initial_state, raw["A_log"], raw["dt_bias"], instead=INSTEAD
    )
    scale = dims.K**-0.5 if scale is None else float(scale)
    o, ht = _op(q, k, v, g, beta, initial_state, cu_seqlens, output_final_state, scale, *raw.values())
    return o, ht if output_final_state else None


def configurations() -> list[Configuration]:
    """The checkpoint's sizes with each gate, the largest K, and odd sizes, packed."""
    found = []
    for sizes in (CHECKPOINT, {"H": 2, "HV": 4, "K": 256, "V": 512}, {"H": 2, "HV": 4, "K": 60, "V": 20}):
        x = example_inputs(1, 64, sizes)
        h0, cu_seqlens = empty(1, sizes["HV"], sizes["K"], sizes["V"]), empty(2, dtype=torch.int64)
        for gate, front_end in example_front_ends(sizes["HV"], sizes["K"]).items():
            raw = front_end_arguments(front_end)
            launch = recurrent_launch(**x, o=x["v"], h0=h0, ht=h0, cu_seqlens=cu_seqlens, scale=1.0, front_end=raw)
            found.append(Configuration(describe(gate=gate, K=sizes["K"], V=sizes["V"]), launch))
    return found
