"""`chunk_kda` on a GPU: the chunk form of `kimi_linear.reference.chunked` in three kernels.

    kda_tiles_kernel    stages 1 to 3 inside tiles of 16 tokens, front end included     parallel
    kda_chunks_kernel   stages 2 to 4 of chunks of 64 tokens                            parallel over chunks
    kda_state_kernel    stages 5 and 6                                                  serial over chunks

Forward only. No autotuning: the configuration follows from shapes alone, so a first call compiles once and
reruns give the same bits. Nothing is read back to the host, so calls can be captured in a CUDA graph and
replayed with other offsets in cu_seqlens. `chunk_launch` holds the launches, `chunk_plan` block shapes,
`chunk_workspace` the memory between the kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..reference.front_end import FrontEnd
from .chunk_launch import INPUTS, Options, empty_state, launch_chunk, options_of
from .support import check_no_gradient, check_supported, checked_call, define_op

MAX_V = 256  # a state slice must fit the registers
INSTEAD = "use kimi_linear.reference.chunked, or call under torch.no_grad()"


def chunk_kda(
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
    """Kimi Delta Attention in chunks of matrix products, on a GPU: the function of the reference's `chunk_kda`.

    Shapes, dtypes and errors as in `kimi_linear.reference.contract`, and what only the contents tell is not
    checked: g must be <= 0 (natural log), cu_seqlens must not decrease. fp16, bf16 and fp32, K and V up to 256.
    Matrix operands have the dtype of q, sums and the state are fp32. o has the dtype of v. Forward only: an
    input that requires a gradient is refused. Section 3, arXiv:2510.26692.
    """
    dims, number = checked_call(
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
    check_supported("chunk_kda", q, dims)
    if dims.V > MAX_V:
        raise ValueError(f"v must be [B, T, HV, V] with V <= {MAX_V} in chunk_kda; got V={dims.V}")
    gate = None if front_end is None else front_end.gate
    A_log, dt_bias = (None, None) if gate is None else (gate.A_log, gate.dt_bias)
    check_no_gradient("chunk_kda", q, k, v, g, beta, initial_state, A_log, dt_bias, instead=INSTEAD)
    options = options_of(front_end, dims.K**-0.5 if scale is None else float(scale), output_final_state)
    o, final_state = _op(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *options, number=number)
    return o, final_state if output_final_state else None


def _forward(*arguments: Any, number: int | None = None) -> tuple[Tensor, Tensor]:
    options = Options(*arguments[len(INPUTS) :])
    o, final_state = launch_chunk(arguments[: len(INPUTS)], options, number)
    return o, o.new_empty(0, dtype=torch.float32) if final_state is None else final_state


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors = dict(zip(INPUTS, arguments, strict=False))
    q, v, cu_seqlens = tensors["q"], tensors["v"], tensors["cu_seqlens"]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    wanted = Options(*arguments[len(INPUTS) :]).output_final_state
    return v.new_empty(v.shape), empty_state(q, v, N) if wanted else q.new_empty(0, dtype=torch.float32)


_op = define_op(
    "chunk_kda(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? initial_state, Tensor? cu_seqlens, int gate, float lower_bound, float l2norm_eps, int beta_code, "
    "float scale, bool output_final_state) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
