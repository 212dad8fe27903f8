"""Block shapes of the chunk kernels, chosen by shape, dtype and GPU: no tuning at a call.

A table that the user set goes first (see `tuning`). The shapes are those that were fastest on an H200, as far as
other GPUs have the shared memory and registers for them; docs/gpu-speed.md says what was tried.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from . import tuning
from .gate_math import GATE_BOUNDED_MILD
from .support import cdiv, next_power_of_2

SLICE_US = {16: 1.05, 32: 1.22, 64: 1.38, 128: 2.39}  # a chunk in the state kernel, by value channels, on an H200
WIDE = 64  # slices from here on are computed transposed; in fp32 all are, which spills less
DOT_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
ROOM_TO_PREFETCH = 163 * 1024  # bytes of shared memory: three chunks of 128 channels take up to 162 KiB
HOPPER_SHARED, HOPPER_MULTIPROCESSORS = 227 * 1024, 132

# ptxas 12.8, Triton 3.6's, builds wrong shared-memory descriptors for half-precision operands of 16 or 32 columns,
# whose swizzle differs from that of 64 and more: products were wrong from row 16 on. `make kernels-report` reads the
# machine code for it.
NARROWEST_HALF = 64

example_shared = ContextVar("shared memory of the GPU that examples are for", default=HOPPER_SHARED)


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
        return example_shared.get()
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return HOPPER_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
