"""`chunk_kda` on a GPU: the chunk form of `kimi_linear.reference.chunked` in three kernels.

    kda_tiles_kernel    stages 1 to 3 inside tiles of 16 tokens, front end included     parallel
    kda_chunks_kernel   stages 2 to 4 of chunks of 64 tokens                            parallel over chunks
    kda_state_kernel    stages 5 and 6                                                  serial over chunks

Forward only. No autotuning: the configuration follows from shapes alone, so a first call compiles once and
reruns give the same bits. Nothing is read back to the host, so calls can be captured in a CUDA graph and
replayed with other offsets in cu_seqlens.
"""

from __future__ import annotations

import functools
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
WIDE_SLICE_COST = 1.42  # of a chunk's time with 64 value channels to that with 32, measured on an H200
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


class Launch(NamedTuple):
    """How one kernel is launched."""

    block: int  # channels of a slice
    warps: int
    stages: int = 1
    registers: int | None = None  # most a thread may hold, so that several programs share a multiprocessor


class Plan(NamedTuple):
    """Constants of a call that follow from shapes and dtypes alone."""

    KP: int  # key channels, padded to a power of two
    VP: int
    tiles: Launch
    chunks: Launch
    state: Launch
    dot: tl.dtype
    solve: tl.dtype  # operands of the inverse
    precision: str


def plan(q: Tensor, V: int, normalised: bool, gate: int = 1, segment_heads: int = 1) -> Plan:
    """Choose block shapes."""
    KP = max(16, triton.next_power_of_2(q.shape[-1]))
    VP = max(16, triton.next_power_of_2(V))
    half = q.dtype != torch.float32
    full = "tf32x3" if torch.version.hip is None and q.is_cuda else "ieee"
    precision = "tf32" if half and torch.version.hip is None else full  # of products of fp32 operands
    return Plan(
        KP=KP,
        VP=VP,
        tiles=Launch(min(64, KP), warps=1, registers=168 if gate == GATE_BOUNDED_MILD.value else None),
        chunks=Launch(min(64 if half else 32, KP), warps=4),
        state=_state_launch(q, VP, KP, segment_heads),
        dot=DOT_DTYPES[q.dtype],
        solve=tl.float16 if half and normalised else tl.float32,
        precision=precision,
    )


def _state_launch(q: Tensor, VP: int, KP: int, segment_heads: int) -> Launch:
    """Slices of 32 value channels, or of 64 where that saves rounds of programs: each multiprocessor holds one."""
    if q.dtype == torch.float32 or KP > 128:
        return Launch(min(32, VP), warps=8 if KP > 128 else 4)  # 4 warps at K = 256 fault on triton 3.6
    narrow, wide = (
        triton.cdiv(segment_heads * max(1, VP // block), _multiprocessors(q.device)) for block in (32, 64)
    )
    block = 64 if VP >= 64 and WIDE_SLICE_COST * wide < narrow else min(32, VP)
    return Launch(block, warps=4, stages=3)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


class Call(NamedTuple):
    """What the three launches share."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    first_chunk: Tensor | None
    gate: int
    lower_bound: float
    l2norm_eps: float  # negative: no l2norm
    beta_code: int
    scale: float
    o: Tensor
    final_state: Tensor | None
    N: int
    chunks: int

    @property
    def where(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        """What `locate_chunk` needs."""
        return self.cu_seqlens, self.first_chunk, self.q.shape[1], self.N

    @property
    def search(self) -> tuple[bool, int]:
        """PACKED and STEPS."""
        packed = self.cu_seqlens is not None
        return packed, search_steps(self.N) if packed else 0


def _options(launch: Launch) -> dict[str, int]:
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    if launch.registers is not None and torch.version.hip is None:
        options["maxnreg"] = launch.registers
    return options


def launch_tiles(c: Call, ws: Workspace, p: Plan) -> None:
    """Stages 1 to 3 inside tiles."""
    H, K = c.q.shape[2:]
    HV = c.v.shape[2]
    kda_tiles_kernel[(c.chunks * HV * (CHUNK // TILE),)](
        c.q, c.k, c.g, c.beta, c.A_log, c.dt_bias, c.o,
        ws.k_start, ws.k_end, ws.q_start, ws.tile_gate, ws.row_factors, ws.T_tile, ws.Aqk_tile,
        *c.where[:2], c.scale, c.lower_bound, c.l2norm_eps, *c.where[2:], 0,
        *c.q.stride(), *c.k.stride(), *c.g.stride(), *c.beta.stride(),
        H, HV, K, p.KP, c.v.shape[3], p.VP, p.tiles.block, CHUNK, TILE,
        c.gate, c.l2norm_eps >= 0, c.beta_code, *c.search,
        p.dot, p.solve, p.precision, **_options(p.tiles),
    )  # fmt: skip


def launch_chunks(c: Call, ws: Workspace, p: Plan) -> None:
    """Stages 2 to 4 between tiles."""
    HV, V = c.v.shape[2:]
    kda_chunks_kernel[(c.chunks * HV,)](
        c.v, ws.k_start, ws.k_end, ws.q_start, ws.tile_gate, ws.row_factors, ws.T_tile, ws.Aqk_tile,
        ws.wq, ws.uo, ws.kg, ws.chunk_decay, *c.where, *c.v.stride(),
        HV, p.KP, V, p.VP, p.chunks.block, min(p.chunks.block, p.VP), CHUNK, TILE, *c.search,
        p.solve, p.precision, **_options(p.chunks),
    )  # fmt: skip


def launch_state(c: Call, ws: Workspace, p: Plan) -> None:
    """Stages 5 and 6."""
    HV, V = c.v.shape[2:]
    kda_state_kernel[(c.N * HV * (p.VP // p.state.block),)](
        ws.wq, ws.uo, ws.kg, ws.chunk_decay, c.o, c.initial_state, c.final_state, *c.where[:3],
        HV, c.q.shape[3], p.KP, V, p.VP, p.state.block, CHUNK, c.search[0],
        c.initial_state is not None, c.final_state is not None, p.precision, p.state.stages, **_options(p.state),
    )  # fmt: skip


def prepare_call(
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
) -> Call:
    """Allocate the outputs and find the chunks."""
    B, T = q.shape[:2]
    packed = cu_seqlens is not None
    N = len(cu_seqlens) - 1 if packed else B
    if gate == GATE_BOUNDED.value and lower_bound >= MILD_BOUND and q.dtype == torch.bfloat16:
        gate = GATE_BOUNDED_MILD.value
    return Call(
        q, k, v, g, beta,
        None if A_log is None else A_log.flatten(),
        None if dt_bias is None else dt_bias.contiguous(),
        None if initial_state is None else initial_state.contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        chunk_table(cu_seqlens, T) if packed else None,
        gate, lower_bound, l2norm_eps, beta_code, scale,
        o=torch.empty(v.shape, dtype=v.dtype, device=v.device),
        final_state=_empty_state(q, v, N) if output_final_state else None,
        N=N,
        chunks=chunk_count(B, T, N, packed),
    )  # fmt: skip


def _forward(*arguments):  # type: ignore[no-untyped-def]
    c = prepare_call(*arguments)
    p = plan(c.q, c.v.shape[3], c.l2norm_eps >= 0, c.gate, c.N * c.v.shape[2])
    ws = workspace(c.q, c.chunks, c.v.shape[2], p)
    if c.chunks:
        launch_tiles(c, ws, p)
        launch_chunks(c, ws, p)
    if c.N:
        launch_state(c, ws, p)
    return c.o, c.o.new_empty(0, dtype=torch.float32) if c.final_state is None else c.final_state


class Workspace(NamedTuple):
    """What one kernel leaves for the next; all dense, chunk by chunk."""

    k_start: Float[Tensor, "chunks HV C KP"]  # k times its decay from the tile's start
    k_end: Float[Tensor, "chunks HV C KP"]  # k times its decay to the tile's end
    q_start: Float[Tensor, "chunks HV C KP"]
    kg: Float[Tensor, "chunks HV C KP"]  # k times its decay to the chunk's end
    wq: Float[Tensor, "chunks HV 2C KP"]  # w above Aqk w - q exp(G)
    uo: Float[Tensor, "chunks HV 2C VP"]  # u above Aqk u
    T_tile: Float[Tensor, "chunks HV C 16"]
    Aqk_tile: Float[Tensor, "chunks HV C 16"]
    tile_gate: Float[Tensor, "chunks HV 4 KP"]  # a tile's sum of gates, log2 units
    chunk_decay: Float[Tensor, "chunks HV KP"]
    row_factors: Float[Tensor, "chunks HV 3 C"]  # beta, 1 / |k|, scale / |q|


def workspace(q: Tensor, chunks: int, HV: int, p: Plan) -> Workspace:
    """Memory for the intermediates, uninitialised."""
    cells = chunks * HV
    full = {"device": q.device, "dtype": torch.float32}
    return Workspace(
        *q.new_empty(4, cells, CHUNK, p.KP).unbind(),
        wq=q.new_empty(cells, 2 * CHUNK, p.KP),
        uo=q.new_empty(cells, 2 * CHUNK, p.VP),
        T_tile=q.new_empty(cells, CHUNK, TILE, dtype=torch.float16 if p.solve == tl.float16 else torch.float32),
        Aqk_tile=q.new_empty(cells, CHUNK, TILE),
        tile_gate=torch.empty(cells, CHUNK // TILE, p.KP, **full),
        chunk_decay=torch.empty(cells, p.KP, **full),
        row_factors=torch.empty(cells, 3, CHUNK, **full),
    )


def _forward_fake(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, *options):  # type: ignore[no-untyped-def]
    N = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final_state = _empty_state(q, v, N) if options[-1] else q.new_empty(0, dtype=torch.float32)
    return v.new_empty(v.shape), final_state


def _empty_state(q: Tensor, v: Tensor, N: int) -> Tensor:
    return torch.empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32, device=q.device)


OP = "kimi_linear::chunk_kda_forward"
torch.library.define(
    OP,
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, int gate, float lower_bound, float l2norm_eps, int beta_code, float scale, "
    "bool output_final_state) -> (Tensor, Tensor)",
)
torch.library.impl(OP, ["cuda", "cpu"])(_forward)
torch.library.register_fake(OP)(_forward_fake)
