"""What a relation is: a check of a kernel against itself, what it catches, and which kernels have to keep it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .bench import Bench
from .verdict import Verdict

Check = Callable[[Bench], Verdict | None]
Add = Callable[[Check], Check]

NEEDS: dict[str, tuple[Callable[[Bench], bool], str]] = {
    "sequences": (lambda bench: bench.caps.whole_sequences, "whole sequences are not declared"),
    "packed": (lambda bench: bench.caps.packed, "packed segments are not declared"),
    "scaling": (lambda bench: not bench.half, "fp16 has too small a range for scaling to be exact"),
    "above_one": (lambda bench: bench.caps.beta_above_one, "beta above 1 is not declared"),
    "backward": (lambda bench: "backward" in bench.caps.operations, "backward is not declared"),
    "plain": (lambda bench: bench.caps.plain, "every call goes through a front end, which does not keep it"),
    "any_gate": (lambda bench: bench.caps.lowest_gate is None, "gates below a bound are not declared"),
    "decode": (lambda bench: bench.caps.pool is not None, "decoding is not declared"),
    "padding": (lambda bench: bool(bench.caps.pool and bench.caps.pool.nobody), "no index for padding is declared"),
    "drafts": (lambda bench: bool(bench.caps.pool and bench.caps.pool.drafts), "draft tokens are not declared"),
    "front": (lambda bench: bool(bench.caps.front_ends), "no front end is declared"),
    "short_conv": (lambda bench: bench.caps.short_conv is not None, "a short convolution is not declared"),
    "packed_conv": (
        lambda bench: bench.caps.short_conv is None or bench.caps.short_conv.packed,
        "a short convolution of packed segments is not declared",
    ),
    "conv_update": (
        lambda bench: bench.caps.short_conv is None or bench.caps.short_conv.update,
        "a step of the short convolution is not declared",
    ),
    "several": (lambda bench: len(bench.caps.contracts) > 1, "one contract alone is declared"),
}


@dataclass(frozen=True)
class Relation:
    """A check that raises RelationBroken or returns a verdict. `needs` are words of NEEDS, or "refuses NAME"."""

    id: str
    catches: str
    check: Check
    needs: tuple[str, ...] = ()
    family: str = "relations"
    links: tuple[str, ...] = ()
    quick: bool = True
    tier: str = "relation"


RELATIONS: list[Relation] = []


def relation(id: str, catches: str, *needs: str, links: tuple[str, ...] = (), quick: bool = True) -> Add:
    """Add a check of whole sequences to RELATIONS."""

    def add(check: Check) -> Check:
        RELATIONS.append(Relation(f"relation.{id}", catches, check, ("sequences", *needs), links=links, quick=quick))
        return check

    return add


def why_not(relation: Relation, bench: Bench) -> str | None:
    """Why a kernel need not keep a relation."""
    for need in relation.needs:
        kind, _, name = need.partition(" ")
        if kind == "refuses" and name not in bench.caps.refuses:
            return f"no error is declared for {name}"
        if need in NEEDS and not NEEDS[need][0](bench):
            return NEEDS[need][1]
    return None
