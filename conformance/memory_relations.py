"""Relations about memory: strides, offsets, new memory that is full of something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .adapter import Call
from .bench import Bench, RelationBroken, must_equal
from .packed_relations import BACKWARDS, PACKED
from .relation import relation

COPIES = 4  # freed blocks of each size


def same_through(bench: Bench, call: Call, views: dict[str, Tensor], what: str) -> None:
    """The call with some tensors replaced by views of the same numbers gives the same bits."""
    want, got = bench.run_as_is(call), bench.run_as_is(Call(**{**vars(call), **views}))
    for name in ("o", "final_state"):
        must_equal(got[name], want[name], f"{name} of {what}")


@relation("strides", "a kernel that takes every tensor as contiguous")
def strides(bench: Bench) -> None:
    """Inputs sliced out of larger buffers of NaN give the same bits."""
    call = bench.problem(bench.case(T="C+3")).call
    views = {name: inside_nan(x) for name, x in call.tensors().items() if x.is_floating_point() and x.dim() > 2}
    same_through(bench, call, views, "strided inputs")


def inside_nan(x: Tensor) -> Tensor:
    """The same values, every second element of a buffer of NaN that begins before them."""
    buffer = torch.full((x.shape[0] + 1, *x.shape[1:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    view = buffer[1:, ..., ::2]
    view.copy_(x)
    return view


@relation("one_projection", "a row stride that is taken for the number of channels")
def one_projection(bench: Bench) -> None:
    """q, k and v as slices of one projection's output, as a layer has them."""
    call = bench.problem(bench.case(T="C/2+3")).call
    parts = [call.q, call.k, call.v]
    projection = torch.cat([x.flatten(2) for x in parts], -1)
    slices = projection.split([x.shape[2] * x.shape[3] for x in parts], -1)
    views = {name: y.unflatten(2, x.shape[2:]) for name, x, y in zip("qkv", parts, slices, strict=True)}
    same_through(bench, call, views, "slices of one projection")


@relation("head_major", "heads and tokens that change places")
def head_major(bench: Bench) -> None:
    """Tensors that lie in memory head by head, seen token by token."""
    call = bench.problem(bench.case(T="C/2+3")).call
    names = ("q", "k", "v", "g", "beta")
    views = {name: getattr(call, name).transpose(1, 2).contiguous().transpose(1, 2) for name in names}
    same_through(bench, call, views, "views of memory that lies head by head")


@relation("offset", "a base pointer without its offset, or loads wider than the alignment")
def offset(bench: Bench) -> None:
    """Inputs that begin as little into their memory as the kernel's alignment allows, between elements of NaN."""
    call = bench.problem(bench.case(T="C/2+3")).call
    aligned = bench.caps.alignment
    views = {name: after_some(x, aligned) for name, x in call.tensors().items() if x.is_floating_point()}
    same_through(bench, call, views, "inputs that do not begin where their memory does")


def after_some(x: Tensor, alignment: int) -> Tensor:
    """The same values, contiguous, from the first aligned address after a buffer's start; NaN on both sides."""
    first = max(alignment // x.element_size(), 1)
    buffer = torch.full((x.numel() + first + 1,), torch.nan, dtype=x.dtype)
    buffer[first:-1] = x.flatten()
    return buffer[first:-1].view(x.shape)


@relation("expanded", "a stride of 0 that is taken for something else")
def expanded(bench: Bench) -> None:
    """One write strength for all tokens and heads, and one gate a head for all channels, stored once."""
    call = bench.problem(bench.case(T="C/2+3", beta="high", gate="constant_per_token")).call
    views = {
        "beta": call.beta[:1, :1, :1].clone().expand_as(call.beta),
        "g": call.g[..., :1].clone().expand_as(call.g),
    }
    same_through(bench, call, views, "inputs with strides of 0")


@relation("singleton", "an offset in 32 bits")
def singleton(bench: Bench) -> None:
    """Axes of length 1 have no stride that matters: one past 2^31 changes nothing."""
    call = bench.problem(bench.case(B=1, T="C/2+3")).call
    views = {
        name: x.as_strided(x.shape, (2**31 + 8, *x.stride()[1:]))
        for name, x in call.tensors().items()
        if x.is_floating_point() and x.dim() > 2
    }
    same_through(bench, call, views, "inputs whose batch of one has a stride past 2^31")


@relation("refilled", "a cache that knows an input by its address", links=("flash-linear-attention #770",))
def refilled(bench: Bench) -> None:
    """Buffers that are filled again between two calls, as a server's are, give what new buffers give."""
    knobs, others = (PACKED, BACKWARDS) if bench.caps.packed else ({}, {})
    first = bench.problem(bench.case(**knobs)).call
    other = bench.problem(bench.case(**others, seed=2)).call
    buffers = Call(**{**vars(first), **{name: x.clone() for name, x in first.tensors().items()}})
    bench.run_as_is(buffers)
    for name, x in buffers.tensors().items():
        x.copy_(other.tensors()[name])
    got = bench.run_as_is(buffers)  # before the other call, which such a cache would know by now
    want = bench.run_as_is(other)
    for name in want:
        must_equal(got[name], want[name], f"{name} of buffers that were filled again, against new ones")


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Inside this context torch.empty gives NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill


@relation("dirty_memory", "elements of a result that are never written")
def dirty_memory(bench: Bench) -> None:
    """New memory full of NaN changes nothing: every element is written."""
    packed = {**PACKED, "past_end": 3} if bench.caps.packed else {}
    for case in (bench.case(**packed), bench.case(T="C/4+1", V=20)):
        want = bench.run(case, finite=False)
        with nan_in_new_memory():
            got = bench.run(case, finite=False)
        for name in want:
            must_equal(got[name], want[name], f"{name} with NaN in new memory")
            if got[name].isnan().any():
                raise RelationBroken(f"{name} holds NaN where new memory did")


@relation("used_memory", "a buffer that is added to before it is cleared")
def used_memory(bench: Bench) -> None:
    """Memory that others have used and freed, full of NaN or of 2^100, changes nothing."""
    case = bench.case(T="C/2+3")
    call = bench.problem(case).call
    want = bench.run(case)
    for filler in (float("nan"), 2.0**100):
        leave_behind(call, filler)
        got = bench.run(case)
        for name in want:
            must_equal(got[name], want[name], f"{name} after memory full of {filler:g} was freed")


def leave_behind(call: Call, filler: float) -> None:
    """Blocks of the sizes that a call is likely to ask for, filled and given back to the allocator."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    sizes = {x.numel() for x in call.tensors().values()} | {2**n for n in range(6, 15)}
    blocks = [
        torch.full((size,), filler, dtype=dtype, device=device)
        for device in devices
        for size in sizes
        for dtype in (torch.float32, torch.bfloat16)
        for _ in range(COPIES)
    ]
    blocks.clear()
