"""`chunk_kda` on a GPU: the chunk form of `kimi_linear.reference.chunked` in three kernels.

    kda_tiles_kernel    stages 1 to 3 inside tiles of 16 tokens, front end included     parallel
    kda_chunks_kernel   stages 2 to 4 of chunks of 64 tokens                            parallel over chunks
    kda_state_kernel    stages 5 and 6                                                  serial over chunks

Forward only. No autotuning: the configuration follows from shapes alone, so a first call compiles once and
reruns give the same bits. Nothing is read back to the host, so calls can be captured in a CUDA graph and
replayed with other offsets in cu_seqlens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from ..reference.contract import check_inputs
from ..reference.front_end import FrontEnd
from ..reference.gates import BoundedGate
from .chunk_merge import kda_chunks_kernel
from .chunk_state import kda_state_kernel
from .chunk_table import CHUNK, TILE, chunk_count, chunk_table, search_steps
from .chunk_tiles import kda_tiles_kernel
from .gate_math import (
    BETA_DOUBLE_SIGMOID,
    BETA_NONE,
    BETA_SIGMOID,
    GATE_BOUNDED,
    GATE_BOUNDED_MILD,
    GATE_NONE,
    GATE_SOFTPLUS,
)

MAX_CHANNELS = 256  # K and V: a state slice must fit the registers
MILD_BOUND = -5.0  # 16 tokens of such a gate span 80 nats, 40 to each side of their middle
DOT_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
BETA_CODES = {None: BETA_NONE.value, "sigmoid": BETA_SIGMOID.value, "double_sigmoid": BETA_DOUBLE_SIGMOID.value}


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
    cu_seqlens: Int[Tensor, N + 1] | None = None,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"] | None]:
    """Kimi Delta Attention in chunks of matrix products, on a GPU: the function of the reference's `chunk_kda`.

    Shapes, dtypes and errors as in `kimi_linear.reference.contract`, and what only the contents tell is not
    checked: g must be <= 0 (natural log), cu_seqlens must not decrease. fp16, bf16 and fp32, K and V up to 256.
    Matrix operands have the dtype of q, sums and the state are fp32. o has the dtype of v.
    """
    dims = check_inputs(
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
    if q.dtype not in DOT_DTYPES:
        raise TypeError(f"q must be float16, bfloat16 or float32 for the Triton kernels; got {q.dtype}")
    if max(dims.K, dims.V) > MAX_CHANNELS:
        raise ValueError(f"K and V must be at most {MAX_CHANNELS} for the Triton kernels; got K={dims.K}, V={dims.V}")
    gate, A_log, dt_bias, lower_bound = _gate_arguments(front_end)
    eps = front_end.l2norm_eps if front_end is not None else None
    beta_code = BETA_CODES[front_end.beta if front_end is not None else None]
    o, final_state = torch.ops.kimi_linear.chunk_kda_forward(
        q,
        k,
        v,
        g,
        beta,
        A_log,
        dt_bias,
        initial_state,
        cu_seqlens,
        gate,
        lower_bound,
        -1.0 if eps is None else eps,
        beta_code,
        dims.K**-0.5 if scale is None else scale,
        output_final_state,
    )
    return o, final_state if output_final_state else None


def _gate_arguments(front_end: FrontEnd | None) -> tuple[int, Tensor | None, Tensor | None, float]:
    """Which gate the kernels compute, and its parameters."""
    gate = front_end.gate if front_end is not None else None
    if gate is None:
        return GATE_NONE.value, None, None, 0.0
    if isinstance(gate, BoundedGate):
        return GATE_BOUNDED.value, gate.A_log, gate.dt_bias, gate.lower_bound
    return GATE_SOFTPLUS.value, gate.A_log, gate.dt_bias, 0.0


class Plan(NamedTuple):
    """Constants of a call that follow from shapes and dtypes alone."""

    KP: int  # key channels, padded to a power of two
    VP: int
    tile_slice: int  # key channels that a tile takes at once
    chunk_slice: int
    value_slice: int  # value channels of one program of the state pass
    state_stages: int
    state_warps: int
    dot: tl.dtype
    solve: tl.dtype  # operands of the inverse
    precision: str


def plan(q: Tensor, V: int, normalised: bool) -> Plan:
    """Choose block shapes."""
    KP = max(16, triton.next_power_of_2(q.shape[-1]))
    VP = max(16, triton.next_power_of_2(V))
    half = q.dtype != torch.float32
    precision = "tf32" if half else "tf32x3" if torch.version.hip is None and q.is_cuda else "ieee"
    return Plan(
        KP=KP,
        VP=VP,
        tile_slice=min(32, KP),
        chunk_slice=min(128 if half else 32, KP),
        value_slice=min(32, VP),
        state_stages=3 if half and KP <= 128 else 1,
        state_warps=4,
        dot=DOT_DTYPES[q.dtype],
        solve=tl.float16 if half and normalised else tl.float32,
        precision=precision,
    )


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    gate: int,
    lower_bound: float,
    l2norm_eps: float,
    beta_code: int,
    scale: float,
    output_final_state: bool,
) -> tuple[Tensor, Tensor]:
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    packed = cu_seqlens is not None
    N = len(cu_seqlens) - 1 if packed else B
    o = torch.empty(B, T, HV, V, dtype=v.dtype, device=v.device)
    final_state = _empty_state(q, v, N, output_final_state)
    chunks = chunk_count(B, T, N, packed)
    p = plan(q, V, l2norm_eps >= 0)
    if gate == GATE_BOUNDED.value and lower_bound >= MILD_BOUND and q.dtype == torch.bfloat16:
        gate = GATE_BOUNDED_MILD.value
    first_chunk = chunk_table(cu_seqlens, T) if packed else None
    steps = search_steps(N) if packed else 0

    ws = workspace(q, chunks, HV, p)
    if chunks:
        kda_tiles_kernel[(chunks * HV * (CHUNK // TILE),)](
            q, k, g, beta,
            None if A_log is None else A_log.flatten(), None if dt_bias is None else dt_bias.contiguous(),
            ws.k_start, ws.k_end, ws.q_start, ws.tile_decay, ws.row_factors, ws.T_tile, ws.Aqk,
            cu_seqlens, first_chunk, scale, lower_bound, l2norm_eps, T, N,
            *q.stride(), *k.stride(), *g.stride(), *beta.stride(),
            H, HV, K, p.KP, p.tile_slice, CHUNK, TILE, gate, l2norm_eps >= 0, beta_code, packed, steps,
            p.dot, p.solve, p.precision,
            num_warps=1, num_stages=1,
        )  # fmt: skip
        kda_chunks_kernel[(chunks * HV,)](
            v, o, ws.k_start, ws.k_end, ws.q_start, ws.tile_decay, ws.row_factors, ws.T_tile, ws.Aqk,
            ws.w, ws.u, ws.qg, ws.kg, ws.chunk_decay, cu_seqlens, first_chunk, T, N, *v.stride(),
            HV, p.KP, V, p.VP, p.chunk_slice, min(p.chunk_slice, p.VP), CHUNK, TILE, packed, steps,
            p.solve, p.precision,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    if N:
        kda_state_kernel[(N * HV * (p.VP // p.value_slice),)](
            ws.w, ws.u, ws.qg, ws.kg, ws.Aqk, ws.chunk_decay, o, initial_state, final_state,
            cu_seqlens, first_chunk, T,
            HV, K, p.KP, V, p.VP, p.value_slice, CHUNK, packed, initial_state is not None, output_final_state,
            p.precision, p.state_stages,
            num_warps=p.state_warps, num_stages=p.state_stages,
        )  # fmt: skip
    return o, final_state


class Workspace(NamedTuple):
    """What one kernel leaves for the next; all dense, chunk by chunk."""

    k_start: Float[Tensor, "chunks HV C KP"]  # k times its decay from the tile's start
    k_end: Float[Tensor, "chunks HV C KP"]  # k times its decay to the tile's end
    q_start: Float[Tensor, "chunks HV C KP"]
    w: Float[Tensor, "chunks HV C KP"]
    qg: Float[Tensor, "chunks HV C KP"]  # q times its decay from the chunk's start
    kg: Float[Tensor, "chunks HV C KP"]  # k times its decay to the chunk's end
    u: Float[Tensor, "chunks HV C VP"]
    Aqk: Float[Tensor, "chunks HV C C"]
    T_tile: Float[Tensor, "chunks HV C 16"]
    tile_decay: Float[Tensor, "chunks HV 4 KP"]
    chunk_decay: Float[Tensor, "chunks HV KP"]
    row_factors: Float[Tensor, "chunks HV 3 C"]  # beta, 1 / |k|, scale / |q|


def workspace(q: Tensor, chunks: int, HV: int, p: Plan) -> Workspace:
    """Memory for the intermediates, uninitialised."""
    cells = chunks * HV
    by_key = torch.empty(6, cells, CHUNK, p.KP, dtype=q.dtype, device=q.device)
    solve = torch.float16 if p.solve == tl.float16 else torch.float32
    return Workspace(
        *by_key.unbind(),
        u=q.new_empty(cells, CHUNK, p.VP),
        Aqk=q.new_empty(cells, CHUNK, CHUNK),
        T_tile=torch.empty(cells, CHUNK, TILE, dtype=solve, device=q.device),
        tile_decay=torch.empty(cells, CHUNK // TILE, p.KP, dtype=torch.float32, device=q.device),
        chunk_decay=torch.empty(cells, p.KP, dtype=torch.float32, device=q.device),
        row_factors=torch.empty(cells, 3, CHUNK, dtype=torch.float32, device=q.device),
    )


def _forward_fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, gate, *rest):  # type: ignore[no-untyped-def]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return v.new_empty(v.shape), _empty_state(q, v, N, rest[-1])


def _empty_state(q: Tensor, v: Tensor, N: int, wanted: bool) -> Tensor:
    shape = (N, v.shape[2], q.shape[3], v.shape[3]) if wanted else (0,)
    return torch.empty(shape, dtype=torch.float32, device=q.device)


OP = "kimi_linear::chunk_kda_forward"
torch.library.define(
    OP,
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, int gate, float lower_bound, float l2norm_eps, int beta_code, float scale, "
    "bool output_final_state) -> (Tensor, Tensor)",
)
torch.library.impl(OP, ["cuda", "cpu"])(_forward)
torch.library.register_fake(OP)(_forward_fake)
