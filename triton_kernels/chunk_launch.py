"""How `chunk_kda` is launched: from a call's tensors and options to its kernels' arguments.

Everything but addresses follows from shapes, strides, dtypes and options. A call whose like was seen before is
replayed (`replay`): one allocation for all intermediates, and one start a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..reference.front_end import FrontEnd
from ..reference.gates import BoundedGate
from . import tuning
from .chunk_merge import kda_chunks_kernel
from .chunk_plan import HOPPER_SHARED, Plan, Shape, example_shared, plan
from .chunk_state import kda_state_kernel
from .chunk_table import CHUNK, SCAN_BLOCK, TILE, chunk_count, kda_chunk_table_kernel, search_steps
from .chunk_tiles import kda_tiles_kernel
from .chunk_workspace import Layout, Workspace, workspace_layout
from .configurations import CHECKPOINT, describe, empty, example_front_ends, example_inputs
from .gate_math import BETA_CODES, GATE_BOUNDED, GATE_BOUNDED_MILD, GATE_NONE, GATE_SOFTPLUS
from .replay import Calls
from .support import Configuration, Launch, adjacent_channels, next_power_of_2, number_of, remember

MILD_BOUND = -5.0  # 16 tokens of such a gate lose 115.4 octaves at most: no row of a tile is faint
MOST_NORMED = 128  # channels of a bf16 tile that are at hand at once, for its norms; other dtypes would spill
EVERY_SLICE = ((1, 32), (1, 16), (2, 32), (4, 32))  # segments and heads that take slices of 32, 16, 64 and 128
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
OUTPUTS = ("o", "final_state")

CALLS = Calls(*INPUTS, *OUTPUTS)


class Options(NamedTuple):
    """What a call says beside its tensors."""

    gate: int
    lower_bound: float
    l2norm_eps: float  # negative: no l2norm
    beta_code: int
    scale: float
    output_final_state: bool


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
    HV, V = v.shape[2:]
    mild = options.gate == GATE_BOUNDED.value and options.lower_bound >= MILD_BOUND
    if mild and q.dtype == torch.bfloat16:
        options = options._replace(gate=GATE_BOUNDED_MILD.value)
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
        "FROM_MIDDLE": p.dot == tl.bfloat16,
        "BN": min(MOST_NORMED, p.KP) if p.dot == tl.bfloat16 else p.tiles.block,
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


def launch_chunk(
    tensors: tuple[Any, ...], options: Options, number: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """Allocate the outputs, run all kernels on the inputs; the state's batch is the number of segments.

    `number` is that of the tensors' metadata, where the caller knows it.
    """
    call = _prepared.get((number, options))
    if call is None:
        tensors = readable(tensors)
        number = number_of(*tensors)
        call = _prepared.get((number, options))
    if call is None:
        call = prepare(dict(zip(INPUTS, tensors, strict=True)), options)
        remember(_prepared, (number, options), call)
    q, v = tensors[0], tensors[2]
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    final_state = empty_state(q, v, call.N) if options.output_final_state else None
    memory = torch.empty(call.layout.size, dtype=torch.uint8, device=q.device)

    def launches() -> list[Launch]:
        named = dict(zip((*INPUTS, *OUTPUTS), (*tensors, o, final_state), strict=True))
        return chunk_launches(named, call.layout.cut(memory), call)

    CALLS.run((number, options), (*tensors, o, final_state), launches, memory, call.layout.offsets)
    return o, final_state


def readable(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs as the kernels read them: adjacent channels, dense parameters, states and offsets."""
    q, k, v, g, beta, *dense = tensors
    return (*adjacent_channels(q, k, v, g), beta, *[None if x is None else x.contiguous() for x in dense])


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
    example_shared.set(shared_memory)
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
