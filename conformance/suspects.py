"""Known bugs that make an error in the same direction: whom a failure looks like.

    likeness = <error, error of the bug> / (|error| |error of the bug|)       over every result, each by its own size

A bug's direction on an input is nearly its signature: roundings point nowhere in particular, so a likeness near 1 is
no accident. Bugs that share a direction (a scale twice, no scale) differ in size, which decides between them. Where
an error is not finite, the elements that are not take the place of the direction.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .adapter import Contract
from .bench import Bench
from .gold import Results, truth_of
from .guard import KernelFailure, guarded_run
from .mutants import MUTANTS, Mutant, build
from .problem import Problem, problem_of

SUSPECT_SECONDS = 10.0  # for all known bugs together
CHUNK_SIZE = 32  # of the bugs' kernels where the judged one has no chunks


@dataclass(frozen=True)
class Suspect:
    """A known bug, how much the error looks like its own, and how large it is beside its own."""

    mutant: Mutant
    likeness: float
    size: float

    def __str__(self) -> str:
        match = f"direction of the error {self.likeness:.2f}, size {self.size:.2g}"
        return f"{self.mutant.bug} ({self.mutant.name}, {match})"

    @property
    def rank(self) -> tuple[float, float]:
        """Direction first, to two digits; then size."""
        return -round(self.likeness, 2), abs(math.log(self.size)) if 0 < self.size < math.inf else math.inf


def suspects(
    bench: Bench, problem: Problem, mutants: Sequence[Mutant] = MUTANTS, seconds: float = SUSPECT_SECONDS
) -> list[Suspect]:
    """Known bugs by their likeness to the kernel's error on this problem, best first.

    Raises KernelFailure where the kernel gives no results. The search stops after so many seconds.
    """
    got = guarded_run(bench.adapter, problem, bench.caps, seconds=bench.seconds, finite=False)
    truth, error = truth_of(problem), _errors(got, truth_of(problem))
    contract = replace(bench.contract, chunk_size=bench.contract.chunk_size or CHUNK_SIZE)
    found, deadline = [], time.monotonic() + seconds
    for mutant in mutants:
        if time.monotonic() > deadline:
            break
        theirs = _results_of(mutant, contract, problem)
        if theirs is not None:
            found.append(Suspect(mutant, *_compared(error, _errors(theirs, truth))))
    return sorted(found, key=lambda suspect: suspect.rank)


def _results_of(mutant: Mutant, contract: Contract, problem: Problem) -> Results | None:
    """What a bug makes of the same inputs, in the conventions of its own kernel; None where it cannot take them."""
    kernel = build(mutant, contract)
    caps = kernel.capabilities()
    same = None if problem.case.front is not None else problem.judge  # a case about a front end keeps its raw inputs
    try:
        return guarded_run(kernel, problem_of(problem.case, caps, contract, same), caps, finite=False)
    except KernelFailure:
        return None


def _errors(got: Results, truth: Results) -> Tensor:
    """Errors of every result that has a truth, each over its own size, in one vector."""
    tiny = torch.finfo(torch.float64).tiny
    sized = [
        (got[name].double() - x) / x.square().mean().sqrt().clamp(min=tiny)
        for name, x in sorted(truth.items())
        if name in got and x.numel()
    ]
    return torch.cat([x.flatten() for x in sized]) if sized else torch.zeros(0, dtype=torch.float64)


def _compared(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Likeness and size of error a beside error b."""
    odd, theirs = ~a.isfinite(), ~b.isfinite()
    if odd.any() or theirs.any():
        either = (odd | theirs).sum().item()
        return (odd & theirs).sum().item() / either, odd.sum().item() / max(theirs.sum().item(), 1)
    length, other = a.norm().item(), b.norm().item()
    if not length or not other:
        return 0.0, 0.0
    return (a @ b).item() / (length * other), length / other
