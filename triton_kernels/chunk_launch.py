"""How `chunk_kda` is launched: block shapes, memory between the kernels, and the kernels' arguments.

Everything but addresses follows from shapes, strides, dtypes and options. A call whose like was seen before is
replayed (`replay`): one allocation for all intermediates, and one start a kernel.
"""

from __future__ import annotations

import functools
import math
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..reference.front_end import FrontEnd
from ..reference.gates import BoundedGate
from . import tuning
from .chunk_merge import kda_chunks_kernel
from .chunk_state import kda_state_kernel
from .chunk_table import CHUNK, SCAN_BLOCK, TILE, chunk_count, kda_chunk_table_kernel, search_steps
from .chunk_tiles import kda_tiles_kernel
from .configurations import CHECKPOINT, describe, empty, example_front_ends, example_inputs
from .gate_math import BETA_CODES, GATE_BOUNDED, GATE_BOUNDED_MILD, GATE_NONE, GATE_SOFTPLUS
from .replay import Calls
from .support import Configuration, Launch, cdiv, metadata, next_power_of_2, remember

SLICE_US = {16: 1.05, 32: 1.22, 64: 1.38, 128: 2.39}  # a chunk in the state kernel, by value channels, on an H200
WIDE = 64  # slices from here on are computed transposed; in fp32 all are, which spills less
MILD_BOUND = -5.0  # 16 tokens of such a gate span 80 nats, 40 to each side of their middle
EVERY_SLICE = ((1, 32), (1, 16), (2, 32), (4, 32))  # segments and heads that take slices of 32, 16, 64 and 128
DOT_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
ROOM_TO_PREFETCH = 163 * 1024  # bytes of shared memory: three chunks of 128 channels take up to 162 KiB
ALIGNMENT = 256  # bytes: of each tensor in the workspace
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
OUTPUTS = ("o", "final_state")

CALLS = Calls(*INPUTS, *OUTPUTS)
HOPPER_SHARED, HOPPER_MULTIPROCESSORS = 227 * 1024, 132
_example_shared = ContextVar("shared memory of the GPU that examples are for", default=HOPPER_SHARED)


# ptxas 12.8, Triton 3.6's, builds wrong shared-memory descriptors for half-precision operands of 16 or 32 columns,
# whose swizzle differs from that of 64 and more: products were wrong from row 16 on. `make kernels-report` reads the
# machine code for it.
NARROWEST_HALF = 64


class Shape(NamedTuple):
    """How one kernel is launched."""

    block: int  # channels of a slice
    warps: int
    stages: int = 1
    registers: int | None = None  # most a thread may hold, so that several programs share a multiprocessor


class Plan(NamedTuple):
    """Constants of a call that follow from shapes and dtypes alone."""

    KP: int  # key channels, padded to a power of two
    VP: int
    tiles: Shape
    chunks: Shape
    state: Shape
    wide: bool  # the state kernel's form
    dot: tl.dtype
    solve: tl.dtype  # operands of the inverse
    precision: str


class Options(NamedTuple):
    """What a call says beside its tensors."""

    gate: int
    lower_bound: float
    l2norm_eps: float  # negative: no l2norm
    beta_code: int
    scale: float
    output_final_state: bool


class Workspace(NamedTuple):
    """What one kernel leaves for the next; all dense, chunk by chunk. C = 64, M = 4 tiles of 16."""

    first_chunk: Tensor  # [N + 2]
    k_start: Tensor  # [chunks, HV, C, KP]      k times its decay from the tile's start
    k_end: Tensor  # [chunks, HV, C, KP]        k times its decay to the tile's end
    q_start: Tensor  # [chunks, HV, C, KP]
    kg: Tensor  # [chunks, HV, C, KP]           k times its decay to the chunk's end
    wq: Tensor  # [chunks, HV, 2 C, KP]         w above qg = q exp(G)
    u: Tensor  # [chunks, HV, C, VP]            of wide slices [chunks, HV, VP, C]
    Aqk: Tensor  # [chunks, HV, C, C]
    T_tile: Tensor  # [chunks, HV, C, 16]
    Aqk_tile: Tensor  # [chunks, HV, C, 16]
    tile_decay: Tensor  # [chunks, HV, M, KP]   that of a whole tile
    chunk_decay: Tensor  # [chunks, HV, KP]
    strength: Tensor  # [chunks, HV, C]         beta


class Layout(NamedTuple):
    """Where in one piece of memory each tensor of the workspace lies."""

    offsets: dict[str, int]  # bytes
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]]
    size: int

    def cut(self, memory: Tensor) -> Workspace:
        """The workspace in memory [size], uint8."""
        views = {}
        for name, (shape, dtype) in self.tensors.items():
            offset = self.offsets[name]
            views[name] = memory[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return Workspace(**views)


@functools.lru_cache
def workspace_layout(N: int, chunks: int, HV: int, KP: int, VP: int, dot: torch.dtype, solve: torch.dtype) -> Layout:
    """The layout for so many segments and chunks."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "first_chunk": ((N + 2,), torch.int32),
        **{name: ((chunks, HV, CHUNK, KP), dot) for name in ("k_start", "k_end", "q_start", "kg")},
        "wq": ((chunks, HV, 2 * CHUNK, KP), dot),
        "u": ((chunks, HV, CHUNK * VP), dot),
        "Aqk": ((chunks, HV, CHUNK, CHUNK), dot),
        "T_tile": ((chunks, HV, CHUNK, TILE), solve),
        "Aqk_tile": ((chunks, HV, CHUNK, TILE), dot),
        "tile_decay": ((chunks, HV, CHUNK // TILE, KP), torch.float32),
        "chunk_decay": ((chunks, HV, KP), torch.float32),
        "strength": ((chunks, HV, CHUNK), torch.float32),
    }
    offsets, end = {}, 0
    for name, (shape, dtype) in tensors.items():
        offsets[name] = end
        end += cdiv(math.prod(shape) * dtype.itemsize, ALIGNMENT) * ALIGNMENT
    return Layout(offsets, tensors, end)


def plan(q: Tensor, V: int, normalised: bool, gate: int = 1, segment_heads: int = 1) -> Plan:
    """Choose block shapes; a table that the user set goes first (see `tuning`)."""
    half = q.dtype != torch.float32
    narrowest = 16 if q.device.type == "cpu" or not half else NARROWEST_HALF
    KP = max(narrowest, next_power_of_2(q.shape[-1]))
    VP = max(narrowest, next_power_of_2(V))
    full = "ieee" if torch.version.hip is not None or q.device.type == "cpu" else "tf32x3"
    block = min(64 if half else 32, max(16, KP // 2))  # a loop of one slice is unrolled, and spills
    tile_block = {torch.bfloat16: block, torch.float16: max(16, min(32, KP // 4)), torch.float32: 16}[q.dtype]
    hopper = _shared_memory(q.device) >= HOPPER_SHARED  # older matrix units spill under a cap, and with wide slices
    shapes = {
        "tiles": Shape(tile_block, warps=1, registers=168 if gate == GATE_BOUNDED_MILD.value else None),
        "chunks": _chunks_shape(block, half, normalised, hopper, KP),
        "state": _state_shape(q, VP, KP, segment_heads),
    }
    for kernel in shapes:
        tuned = tuning.look_up(kernel, q.device, dtype=q.dtype, KP=KP, VP=VP, gate=gate)
        shapes[kernel] = shapes[kernel] if tuned is None else Shape(**tuned)
    return Plan(
        KP=KP,
        VP=VP,
        **shapes,
        wide=shapes["state"].block >= WIDE or not half,
        dot=DOT_DTYPES[q.dtype],
        solve=tl.float16 if half and normalised else tl.float32,
        precision=full,  # of products of fp32 operands: tf32 alone cuts bits that the inverse needs
    )


def _chunks_shape(block: int, half: bool, normalised: bool, hopper: bool, KP: int) -> Shape:
    """At 168 registers three programs share a multiprocessor. An inverse in fp32 needs 8 warps on older ones."""
    if not half or (hopper and (not normalised or KP > 128)):
        return Shape(block, warps=4)
    if hopper:
        return Shape(block, warps=4, registers=168)
    return Shape(block, warps=4 if normalised else 8)


def _state_shape(q: Tensor, VP: int, KP: int, segment_heads: int) -> Shape:
    """Slices of value channels such that rounds of programs, one on each multiprocessor, take least."""
    if q.dtype == torch.float32:
        return Shape(16, warps=8)
    if KP > 128:
        return Shape(min(32, VP), warps=8)  # 4 warps fault on triton 3.6
    prefetches = _shared_memory(q.device) >= ROOM_TO_PREFETCH
    if VP <= 32 or _shared_memory(q.device) < HOPPER_SHARED:
        return Shape(min(32, VP), warps=4, stages=3 if prefetches else 1)

    def microseconds(block: int) -> float:
        return SLICE_US[block] * cdiv(segment_heads * VP // block, _multiprocessors(q.device))

    block = min((block for block in SLICE_US if block <= VP), key=microseconds)
    return Shape(block, warps=8 if block == 128 else 4, stages=3)


def _shared_memory(device: torch.device) -> int:
    """Bytes that a block may have."""
    if device.type != "cuda":
        return _example_shared.get()
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return HOPPER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


class Prepared(NamedTuple):
    """A call ready to be launched: sizes, block shapes, and where its intermediates will lie."""

    N: int
    chunks: int
    options: Options
    plan: Plan
    layout: Layout


_prepared: dict[Any, Prepared] = {}
tuning.FORGET += [_prepared.clear, CALLS.known.clear]  # another table, other launches


def prepare(tensors: dict[str, Any], options: Options) -> Prepared:
    """Everything about a call that does not depend on addresses; `tensors` are the inputs."""
    q, v, cu_seqlens = tensors["q"], tensors["v"], tensors["cu_seqlens"]
    B, T = q.shape[:2]
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    gate = options.gate
    if gate == GATE_BOUNDED.value and options.lower_bound >= MILD_BOUND and q.dtype == torch.bfloat16:
        options = options._replace(gate=GATE_BOUNDED_MILD.value)
    HV, V = v.shape[2:]
    p = plan(q, V, options.l2norm_eps >= 0, options.gate, N * HV)
    chunks = chunk_count(B, T, N, cu_seqlens is not None)
    solve = torch.float16 if p.solve == tl.float16 else torch.float32
    return Prepared(N, chunks, options, p, workspace_layout(N, chunks, HV, p.KP, p.VP, q.dtype, solve))


def chunk_launches(tensors: dict[str, Any], ws: Workspace, call: Prepared) -> list[Launch]:
    """The kernels of a call in their order; `tensors` are inputs and outputs by name."""
    p, o, N = call.plan, call.options, call.N
    packed = tensors["cu_seqlens"] is not None
    T, H, K = tensors["q"].shape[1:]
    HV, V = tensors["v"].shape[2:]
    names = tensors | ws._asdict() | _strides(tensors) | o._asdict()
    names |= {"first_chunk": ws.first_chunk if packed else None, "T": T, "N": N, "odd": 0}
    names |= {"H": H, "HV": HV, "K": K, "KP": p.KP, "V": V, "VP": p.VP, "CHUNK": CHUNK, "TILE": TILE}
    names |= {"GATE": o.gate, "L2NORM": o.l2norm_eps >= 0, "BETA": o.beta_code}
    names |= {"PACKED": packed, "STEPS": search_steps(N) if packed else 0}
    names |= {"STAGES": p.state.stages, "WIDE": p.wide}
    names |= {
        "DOT": p.dot,
        "SOLVE": p.solve,
        "PRECISION": p.precision,
        "BLOCK": min(SCAN_BLOCK, next_power_of_2(N + 1)),
        "PREFETCH": tensors["q"].device.type != "cpu" and torch.version.hip is None,
    }
    names |= {"HAS_INITIAL": names["initial_state"] is not None, "HAS_FINAL": names["final_state"] is not None}
    cells = call.chunks * HV
    launches = [
        _launch(kda_tiles_kernel, cells * (CHUNK // TILE), names | {"BK": p.tiles.block}, p.tiles),  # stages 1 to 3
        _launch(kda_chunks_kernel, cells, names | _slices(p), p.chunks),  # stages 2 to 4
        _launch(kda_state_kernel, N * HV * (p.VP // p.state.block), names | {"BV": p.state.block}, p.state),  # 5, 6
    ]
    return [_launch(kda_chunk_table_kernel, 1, names, Shape(1, warps=4)), *launches] if packed else launches


def _slices(p: Plan) -> dict[str, int]:
    """Of the chunks kernel: value channels need fewer registers than key channels do."""
    block = p.chunks.block
    return {"BK": block, "BV": min(p.VP, block if p.dot == tl.float32 else 2 * block)}


def _launch(kernel: Any, programs: int, names: dict[str, Any], shape: Shape) -> Launch:
    arguments = {name: names[name] for name in kernel.arg_names}
    return Launch(kernel, (programs,), arguments, shape.warps, shape.stages, shape.registers)


def _strides(tensors: dict[str, Any]) -> dict[str, int]:
    """q_sb, q_st, q_sh and so on: batch, token, head. Channels are adjacent."""
    names = ("q", "k", "v", "g", "beta")
    return {f"{name}_s{axis}": s for name in names for axis, s in zip("bth", tensors[name].stride(), strict=False)}


def launch_chunk(tensors: dict[str, Any], options: Options) -> tuple[Tensor, Tensor | None]:
    """Allocate the outputs, run all kernels on the inputs; the state's batch is the number of segments."""
    key = (metadata(*tensors.values()), options)
    call = _prepared.get(key)
    if call is None:
        call = prepare(tensors, options)
        remember(_prepared, key, call)
    q, v = tensors["q"], tensors["v"]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final_state = empty_state(q, v, call.N) if options.output_final_state else None
    memory = torch.empty(call.layout.size, dtype=torch.uint8, device=q.device)

    def launches() -> list[Launch]:
        results = {"o": o, "final_state": final_state}
        return chunk_launches(tensors | results, call.layout.cut(memory), call)

    CALLS.run(key, (*tensors.values(), o, final_state), launches, memory, call.layout.offsets)
    return o, final_state


def empty_state(q: Tensor, v: Tensor, N: int) -> Tensor:
    """Memory for N states."""
    return torch.empty(N, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32, device=q.device)


def options_of(front_end: FrontEnd | None, scale: float, output_final_state: bool) -> Options:
    """A front end as the kernels are told it."""
    if front_end is None:
        return Options(GATE_NONE.value, 0.0, -1.0, BETA_CODES[None], scale, output_final_state)
    gate = front_end.gate
    code, bound = GATE_NONE.value, 0.0
    if isinstance(gate, BoundedGate):
        code, bound = GATE_BOUNDED.value, float(gate.lower_bound)
    elif gate is not None:
        code = GATE_SOFTPLUS.value
    eps = -1.0 if front_end.l2norm_eps is None else float(front_end.l2norm_eps)
    return Options(code, bound, eps, BETA_CODES[front_end.beta], scale, output_final_state)


def configurations(shared_memory: int = HOPPER_SHARED) -> list[Configuration]:
    """The checkpoint's sizes in every dtype, with each gate, packed and not; smaller and the largest channels."""
    _example_shared.set(shared_memory)
    halves, every = (torch.bfloat16, torch.float16), (torch.bfloat16, torch.float16, torch.float32)
    cases = [(128, 128, dtype, packed) for dtype in every for packed in (False, True)]
    cases += [(K, V, dtype, False) for K, V in ((20, 100), (64, 64), (256, 256)) for dtype in halves]
    return [
        Configuration(describe(gate=gate, N=N, HV=HV, K=K, V=V, dtype=_name(dtype), packed=packed), launch)
        for K, V, dtype, packed in cases
        for N, HV in (EVERY_SLICE if (K, V) == (128, 128) else ((2, CHECKPOINT["HV"]),))
        for gate, front_end in example_front_ends(HV, K).items()
        for launch in _example({"H": HV, "HV": HV, "K": K, "V": V}, dtype, packed, front_end, N)
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _example(
    sizes: dict[str, int], dtype: torch.dtype, packed: bool, front_end: FrontEnd | None, N: int, T: int = 8192
) -> list[Launch]:
    tensors: dict[str, Any] = dict.fromkeys(INPUTS) | example_inputs(1 if packed else N, T, sizes, dtype)
    if front_end is not None and front_end.gate is not None:
        tensors |= {"A_log": front_end.gate.A_log, "dt_bias": front_end.gate.dt_bias}
    state = empty(N, sizes["HV"], sizes["K"], sizes["V"])
    tensors |= {"cu_seqlens": empty(N + 1, dtype=torch.int64) if packed else None, "initial_state": state}
    call = prepare(tensors, options_of(front_end, 1.0, True))
    ws = call.layout.cut(empty(call.layout.size, dtype=torch.uint8))
    return chunk_launches(tensors | {"o": tensors["v"], "final_state": state}, ws, call)
