"""Relations: what holds between a kernel's own results, bit by bit, with no truth to compare with.

Each names a way in which kernels go wrong. A relation raises RelationBroken with what does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from .adapter import Call
from .bench import TOKEN_TENSORS, Bench, RelationBroken, changed, joined, must_equal, tokens
from .cases import Tensors
from .draws import DEAD

POISONS = (float("nan"), 1e30)
RERUNS = 3


@dataclass(frozen=True)
class Relation:
    """A check by name, what it catches, and whether a kernel has to take it."""

    id: str
    catches: str
    check: Callable[[Bench], None]
    needs: str = ""  # words of: packed, scaling, above_one, backward, plain


RELATIONS: list[Relation] = []


def relation(id: str, catches: str, needs: str = "") -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Add a check to RELATIONS."""

    def add(check: Callable[[Bench], None]) -> Callable[[Bench], None]:
        RELATIONS.append(Relation(f"relation.{id}", catches, check, needs))
        return check

    return add


def why_not(relation: Relation, bench: Bench) -> str | None:
    """Why a kernel need not keep a relation."""
    if not bench.caps.whole_sequences:
        return "only decoding is declared"
    if "plain" in relation.needs and bench.caps.forced_front is not None:
        return "every call goes through a front end, which does not keep it"
    if "packed" in relation.needs and not bench.caps.packed:
        return "packed segments are not declared"
    if "scaling" in relation.needs and bench.half:
        return "fp16 has too small a range for scaling to be exact"
    if "above_one" in relation.needs and not bench.caps.beta_above_one:
        return "beta above 1 is not declared"
    if "backward" in relation.needs and "backward" not in bench.caps.operations:
        return "backward is not declared"
    return None


@relation("causality", "a gate reference, mask or tile that looks ahead")
def causality(bench: Bench) -> None:
    """Outputs before a token are the same bits whatever comes from it on."""
    case = bench.case()
    x, other = bench.inputs(case), bench.inputs(replace(case, seed=2, gate="typical"))
    o = bench.run(case, x)["o"]
    for t in sorted({1, bench.C // 4, bench.C // 2 + 1, bench.C - 1, bench.C, bench.C + 3}):
        mixed = joined(tokens(x, slice(0, t)), tokens(other, slice(t, None)))
        must_equal(bench.run(case, mixed)["o"][:, :t], o[:, :t], f"o before token {t}, with other tokens from {t} on")


@relation("batch_order", "an index that mixes batch items")
def batch_order(bench: Bench) -> None:
    """Batch items in reverse give results in reverse."""
    case = bench.case(B=3, T="C+3")
    x = bench.inputs(case)
    flipped = {name: getattr(x, name).flip(0) for name in (*TOKEN_TENSORS, "h0")}
    want, got = bench.run(case, x), bench.run(case, changed(x, **flipped))
    for name in want:
        must_equal(got[name].flip(0), want[name], f"{name} of a batch in reverse order")


@relation("alone", "a neighbour in the batch that changes a result")
def alone(bench: Bench) -> None:
    """A batch item alone gives the bits that it gives in company."""
    case = bench.case(T="C+3")
    x = bench.inputs(case)
    want = bench.run(case, x)
    one = {name: getattr(x, name)[1:] for name in (*TOKEN_TENSORS, "h0")}
    got = bench.run(replace(case, B=1), changed(x, **one))
    for name in want:
        must_equal(got[name], want[name][1:], f"{name} of the second batch item alone")


@relation("head_order", "an index that mixes heads, or gives a value head the wrong key head")
def head_order(bench: Bench) -> None:
    """Heads in reverse order, with the key heads they belong to, give results in reverse order."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    flipped = {name: getattr(x, name).flip(2) for name in TOKEN_TENSORS}
    want = bench.run(case, x)
    got = bench.run(case, changed(x, **flipped, h0=None if x.h0 is None else x.h0.flip(1)))
    must_equal(got["o"].flip(2), want["o"], "o of heads in reverse order")
    must_equal(got["final_state"].flip(1), want["final_state"], "final_state of heads in reverse order")


def _segments(x: Tensors) -> Iterator[tuple[int, int, int]]:
    offsets = x.offsets or []
    for n, (start, end) in enumerate(pairwise(offsets)):
        yield n, start, end


PACKED = {"B": 1, "lengths": ("C+3", 0, 5, "C")}


@relation("packed_is_separate", "state or tokens that leak from one packed segment into another", needs="packed")
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


@relation(
    "packed_neighbours", "a tile that reads over a segment's end, or a multiplication as a mask", needs="packed"
)
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


@relation("batch_neighbours", "an index that mixes heads or batch items, or a multiplication as a mask")
def batch_neighbours(bench: Bench) -> None:
    """NaN in another batch item and in another head leaves a head alone."""
    case = bench.case(T="C+3")
    x = bench.inputs(case)
    want = bench.run(case, x)
    bad = {name: getattr(x, name).clone() for name in ("q", "k", "v", "beta", "h0")}
    for y in bad.values():
        y[1] = torch.nan
    for name in ("q", "k", "v", "beta"):
        bad[name][0, :, -1] = torch.nan
    bad["h0"][0, -1] = torch.nan
    got = bench.run(case, changed(x, **bad), finite=False)
    must_equal(got["o"][0, :, 0], want["o"][0, :, 0], "o of a head beside heads of NaN")
    must_equal(got["final_state"][0, 0], want["final_state"][0, 0], "final_state of a head beside heads of NaN")


@relation("scaled_values", "a rounding or a threshold that depends on size; a state that is added twice", "scaling")
def scaled_values(bench: Bench) -> None:
    """4 v and 4 h0 give 4 o and 4 S; -v and -h0 give -o and -S."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    want = bench.run(case, x)
    for factor in (4.0, -1.0, 2.0**-10):
        assert x.h0 is not None
        got = bench.run(case, changed(x, v=factor * x.v, h0=factor * x.h0))
        for name in want:
            must_equal(got[name], factor * want[name], f"{name} of values and state times {factor:g}")


@relation("scaled_queries", "a query that enters elsewhere than in the output", "scaling, plain")
def scaled_queries(bench: Bench) -> None:
    """q / 2 gives o / 2 and the same state."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    want, got = bench.run(case, x), bench.run(case, changed(x, q=x.q / 2))
    must_equal(got["o"], want["o"] / 2, "o of half the queries")
    must_equal(got["final_state"], want["final_state"], "final_state of half the queries")


@relation("signs", "a transposed state; an absolute value or a clamp where none belongs")
def signs(bench: Bench) -> None:
    """Signs D of the key channels, on q, k and h0, leave o and give D S."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    D = torch.where(torch.arange(x.q.shape[-1]) % 3 == 0, -1.0, 1.0).double()
    assert x.h0 is not None
    want = bench.run(case, x)
    got = bench.run(case, changed(x, q=D * x.q, k=D * x.k, h0=D[:, None] * x.h0))
    must_equal(got["o"], want["o"], "o with the signs of some key channels turned")
    must_equal(got["final_state"], D[:, None] * want["final_state"], "final_state with signs turned")


@relation("reset", "a state or a gate that survives a decay of zero", "plain")
def reset(bench: Bench) -> None:
    """A gate of -1e4 at a chunk's first token makes what follows independent of what came before."""
    case = bench.case(B=1, T="2C+3")
    x = bench.inputs(case)
    g = x.g.clone()
    g[:, bench.C] = DEAD
    x = changed(x, g=g)
    got = bench.run(case, x)
    fresh = changed(tokens(x, slice(bench.C, None)), h0=None)
    want = bench.run(replace(case, state="none"), fresh)
    must_equal(got["o"][:, bench.C :], want["o"], "o after a reset, against a fresh start")
    must_equal(got["final_state"], want["final_state"], "final_state after a reset, against a fresh start")


@relation("lookup", "a write that adds where it has to replace", "plain")
def lookup(bench: Bench) -> None:
    """Unit keys, beta = 1, no gate: asking for the key just written gives back the value, scaled."""
    case = bench.case(keys="signed_one_hot", gate="zero", beta="one", values="small_integers", state="small_integers")
    x = bench.inputs(case)
    x = changed(x, q=x.k)
    want = (x.scale * x.v).to(bench.problem(case, x).call.v.dtype)
    must_equal(bench.run(case, x)["o"], want, "o at the key just written")


@relation("no_state", "a kernel that starts from stale memory")
def no_state(bench: Bench) -> None:
    """No initial state is a state of zeros."""
    case = bench.case(B=1, T="C+3", state="none")
    x = bench.inputs(case)
    zeros = torch.zeros(1, x.v.shape[2], x.q.shape[-1], x.v.shape[-1]).double()
    want, got = bench.run(case, changed(x, h0=zeros)), bench.run(case, x)
    for name in want:
        must_equal(got[name], want[name], f"{name} without an initial state, against one of zeros")


@relation("rerun", "a race, an atomic sum, or a cache with the wrong key")
def rerun(bench: Bench) -> None:
    """The same call gives the same bits, other shapes between."""
    case, other = bench.case(), bench.case(B=1, T=7, K=8, V=20, gate="typical")
    want = bench.run(case)
    for again in range(RERUNS):
        if again % 2 == 0:
            bench.run(other)
        got = bench.run(case)
        for name in want:
            must_equal(got[name], want[name], f"{name} of run {again + 2}")


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


@relation("linear_gradients", "gradients added to what a buffer held; a clamp in the backward", "backward, scaling")
def linear_gradients(bench: Bench) -> None:
    """Twice the cotangents give twice the gradients."""
    case = bench.case(B=1, T="C+3", flags=("gradients",))
    x = bench.inputs(case)
    assert x.do is not None
    assert x.dht is not None
    want, got = bench.run(case, x), bench.run(case, changed(x, do=2 * x.do, dht=2 * x.dht))
    for name in want:
        must_equal(got[name], 2 * want[name], f"{name} of twice the cotangents")
