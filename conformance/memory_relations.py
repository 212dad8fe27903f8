"""Relations about memory: strides, offsets, new memory that is full of something."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .adapter import Call
from .bench import Bench, RelationBroken, must_equal
from .packed_relations import PACKED
from .relation import relation


@relation("strides", "a kernel that takes every tensor as contiguous")
def strides(bench: Bench) -> None:
    """Inputs sliced out of larger buffers of NaN give the same bits."""
    problem = bench.problem(bench.case(T="C+3"))
    want = bench.run_as_is(problem.call)
    strided = {name: _inside_nan(x) for name, x in problem.call.tensors().items() if x.is_floating_point()}
    got = bench.run_as_is(Call(**{**vars(problem.call), **strided}))
    for name in ("o", "final_state"):
        must_equal(got[name], want[name], f"{name} of strided inputs")


def _inside_nan(x: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of a buffer of NaN that begins before them."""
    buffer = torch.full((x.shape[0] + 1, *x.shape[1:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    view = buffer[1:, ..., ::2]
    view.copy_(x)
    return view


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
