"""Relations between packed segments: each is as if it were alone, whatever its neighbours hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch

from .bench import Bench, changed, must_equal, tokens
from .cases import Tensors
from .relation import relation

POISONS = (float("nan"), 1e30)


def _segments(x: Tensors) -> Iterator[tuple[int, int, int]]:
    offsets = x.offsets or []
    for n, (start, end) in enumerate(pairwise(offsets)):
        yield n, start, end


PACKED = {"B": 1, "lengths": ("C+3", 0, 5, "C")}
BACKWARDS = {"B": 1, "lengths": ("C", 5, 0, "C+3")}


@relation("packed_is_separate", "state or tokens that leak from one packed segment into another", "packed")
def packed_is_separate(bench: Bench) -> None:
    """Each packed segment gives the bits of a call of its own."""
    case = bench.case(**PACKED)
    x = bench.inputs(case)
    got = bench.run(case, x)
    assert x.h0 is not None
    for n, start, end in _segments(x):
        own = changed(tokens(x, slice(start, end)), h0=x.h0[n : n + 1])
        want = bench.run(replace(case, lengths=None), own)
        must_equal(got["o"][:, start:end], want["o"], f"o of packed segment {n}")
        must_equal(got["final_state"][n : n + 1], want["final_state"], f"final_state of packed segment {n}")


@relation("packed_no_state", "a segment that starts from the state of another where none is passed", "packed")
def packed_no_state(bench: Bench) -> None:
    """Packed segments without initial states start from zeros."""
    case = bench.case(**PACKED, state="none")
    x = bench.inputs(case)
    N = len(list(_segments(x)))
    zeros = torch.zeros(N, x.v.shape[2], x.q.shape[-1], x.v.shape[-1]).double()
    want, got = bench.run(case, changed(x, h0=zeros)), bench.run(case, x)
    for name in want:
        must_equal(got[name], want[name], f"{name} of packed segments without initial states, against zeros")


@relation("packed_neighbours", "a tile that reads over a segment's end, or a multiplication as a mask", "packed")
def packed_neighbours(bench: Bench) -> None:
    """NaN, or a huge number, in one segment and past the last leaves the others alone."""
    case = bench.case(**PACKED, past_end=3)
    x = bench.inputs(case)
    want = bench.run(case, x)
    (_, _, _), _, (n, start, end), _ = _segments(x)
    for poison in POISONS:
        outside = torch.ones(x.q.shape[1], dtype=torch.bool)
        outside[start:end] = False
        bad = {name: getattr(x, name).clone() for name in ("q", "k", "v", "beta")}
        for y in bad.values():
            y[:, outside] = poison if bench.contract.io != "fp16" or poison != 1e30 else 6e4
        got = bench.run(case, changed(x, **bad), finite=False)
        must_equal(got["o"][:, start:end], want["o"][:, start:end], f"o of a segment between segments of {poison}")
        must_equal(got["final_state"][n], want["final_state"][n], f"final_state between segments of {poison}")
