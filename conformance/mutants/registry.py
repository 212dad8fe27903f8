"""How a mutant is written down: a mixin that overrides one step of `Emulated`, with its story.

    @mutant("gate", "the gate of a token is the one before it")
    class GateShift:
        def gate(self, g): ...

The class's name is the mutant's; `on` names the kernel that it is planted in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..adapter import Call, Contract
from ..emulated import Emulated
from ..panel import chunk_kernel

BASES: dict[str, Callable[[], Emulated]] = {
    "bf16": lambda: chunk_kernel(32, "bf16"),
    "fp32": lambda: chunk_kernel(32, "fp32"),
    "pairwise": lambda: chunk_kernel(32, "bf16", rebased=False),
    "chunk64": lambda: chunk_kernel(64, "bf16"),
    "chunk16": lambda: chunk_kernel(16, "bf16"),
}


@dataclass(frozen=True)
class Mutant:
    """A bug by name, the kernel that it is planted in, and a public report of its kind."""

    name: str
    group: str
    bug: str
    mixin: type
    on: str
    link: str = ""


MUTANTS: list[Mutant] = []


def mutant(group: str, bug: str, on: str = "bf16", link: str = "") -> Callable[[type], type]:
    """Add a class to MUTANTS."""

    def add(mixin: type) -> type:
        MUTANTS.append(Mutant(mixin.__name__, group, bug, mixin, on, link))
        return mixin

    return add


def build(mutant: Mutant, contract: Contract | None = None) -> Emulated:
    """The kernel with the bug in it; under another contract where one is given."""
    base = BASES[mutant.on]()
    kind = type(mutant.name, (mutant.mixin, type(base)), {})
    return kind(contract or base.contract, base.rebased, f"emulated kernel with {mutant.name}")


def changed(call: Call, **fields: Any) -> Call:
    """The call with some fields replaced."""
    return replace(call, **fields)
