"""A kernel on the bench: one adapter under one contract, called with changed inputs by relations and probes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .adapter import Adapter, Call, Capabilities, Contract
from .cases import Case, Tensors, tensors_of
from .fitting import fitted
from .gold import Results
from .guard import guarded_run, raw_run, wanted
from .limits import CASE_SECONDS
from .problem import Problem, in_layout, problem_of

TOKEN_TENSORS = ("q", "k", "v", "g", "beta")
BASE = Case(
    "relations", "relations", "the input that relations change", B=2, T="2C+5", H=2, K=16, V=12, keys="cosine_0.9"
)  # fmt: skip


class RelationBroken(Exception):  # noqa: N818  # a verdict about someone else's code, no error of ours
    """What does not hold, in words."""


@dataclass(frozen=True)
class Bench:
    """Runs one kernel under one contract on any inputs."""

    adapter: Adapter
    caps: Capabilities
    contract: Contract
    seconds: float = CASE_SECONDS

    @property
    def C(self) -> int:
        return self.contract.chunk_size or 16

    @property
    def half(self) -> bool:
        """Whether small numbers lose digits, so that scaling by 2 may change bits."""
        return "fp16" in (self.contract.io, self.contract.operand, self.contract.state)

    def case(self, **knobs: object) -> Case:
        return fitted(replace(BASE, **knobs), self.caps, self.contract)  # type: ignore[arg-type]

    def inputs(self, case: Case) -> Tensors:
        return tensors_of(case)

    def problem(self, case: Case, x: Tensors | None = None) -> Problem:
        return problem_of(case, self.caps, self.contract, x)

    def run(self, case: Case, x: Tensors | None = None, finite: bool = True) -> Results:
        """Results for the case's inputs, or for other ones of the same kind."""
        problem = self.problem(case, x)
        return guarded_run(self.adapter, problem, self.caps, wanted(problem), self.seconds, finite)

    def run_as_is(self, call: Call) -> Results:
        """o and final_state for the very tensors of a call."""
        results = raw_run(self.adapter, call, self.caps, frozenset(("o", "final_state")), self.seconds, copy=False)
        return {**results, "final_state": in_layout(results["final_state"], self.caps)}


def must_equal(got: Tensor, want: Tensor, what: str) -> None:
    """Equal values, or RelationBroken with the first place that differs; +0 and -0 are one number."""
    if got.shape != want.shape:
        raise RelationBroken(f"{what}: {list(got.shape)} instead of {list(want.shape)}")
    different = ~((got == want) | (got.isnan() & want.isnan()))
    if different.any():
        at = tuple(different.nonzero()[0].tolist())
        raise RelationBroken(
            f"{what}: {int(different.sum())} of {got.numel()} elements differ, first at {list(at)}: "
            f"{got[at].item():.8g} instead of {want[at].item():.8g}"
        )


def changed(x: Tensors, **tensors: Tensor | None) -> Tensors:
    """Inputs with some tensors replaced."""
    return replace(x, **tensors)  # type: ignore[arg-type]


def tokens(x: Tensors, part: slice) -> Tensors:
    """Some of the tokens, without cotangents."""
    cut = {name: getattr(x, name)[:, part] for name in TOKEN_TENSORS}
    return replace(x, **cut, do=None, dht=None, offsets=None)


def joined(x: Tensors, y: Tensors) -> Tensors:
    """y's tokens after x's, from x's state."""
    return replace(x, **{name: torch.cat([getattr(x, name), getattr(y, name)], 1) for name in TOKEN_TENSORS})  # type: ignore[arg-type]
