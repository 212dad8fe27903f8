"""A failure explained: everything the suite can find out about it, as data that text, JSON and HTML are made from.

Every failure is run again: that gives the ratio of each row, and says whether it fails each time. What costs seconds
(stages, suspects, a smaller case) is done for one failure after another, one of each family first, until the time
for it is spent.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .adapter import PARAMETER_GRADIENTS, Adapter
from .bench import Bench
from .gold import Results
from .growth import Growth, fit_growth
from .guard import KernelFailure, guarded_run
from .limits import ALIKE, CASE_SECONDS
from .place import FROM_THE_END, PER_TOKEN, first_in_time, locate, onset_curve
from .problem import Problem, problems_of
from .repro import repro_script
from .shrink import SHRINK_SECONDS, shrink
from .spread import grid_of
from .stage_check import StageRow, can_be_staged, stage_rows
from .suite import Check, Report, check_by_id
from .suspects import SUSPECT_SECONDS, Suspect, suspects
from .trials import SizedBench, Smallest, case_of
from .verdict import DERIVED, Verdict, limit_of, row_ratios

EXPLAIN_SECONDS = 90.0  # for all failures together
NAMED = 3  # suspects
NOT_AGAIN = "(once more: )?hangs|passes, though a waiver"  # running it again takes long, or tells nothing
APART = 0.2  # of likeness: a suspect that is so much farther than the first is none
UNLIKE_SIZE = 10.0  # times as large, or as small, an error is no suspect's
CALLS = 6  # of a relation that are judged one by one


@dataclass(frozen=True)
class ResultRow:
    """One result of the failing call: its worst ratio, and its first bad row where it is over the limit."""

    name: str
    ratio: float
    limit: float
    first: str = ""

    @property
    def ok(self) -> bool:
        return self.ratio <= self.limit


@dataclass(frozen=True)
class RatioMap:
    """The ratio of every row of the first wrong result, and how it goes on after the first bad token."""

    result: str
    limit: float
    ratio: Tensor  # [B, T, heads], or [N, heads, K] of a state
    problem: Problem
    onset: tuple[int, int] | None = None  # batch item and token
    curve: tuple[float, ...] = ()
    growth: Growth = field(default_factory=lambda: Growth("unknown"))


@dataclass
class Explanation:
    """What is known about one failure. Lists are empty, and `searched` False, where there was no time."""

    verdict: Verdict
    check: Check
    script: str
    again: bool = True
    searched: bool = False
    results: list[ResultRow] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    each_call_right: bool = False
    ratio_map: RatioMap | None = None
    stages: list[StageRow] = field(default_factory=list)
    stages_note: str = ""
    suspects: list[Suspect] = field(default_factory=list)
    smallest: Smallest | None = None

    @property
    def alike(self) -> list[Suspect]:
        """Suspects that are near enough to be named."""
        enough = max(ALIKE, self.suspects[0].likeness - APART) if self.suspects else ALIKE
        near = [one for one in self.suspects if one.likeness >= enough and 1 / UNLIKE_SIZE < one.size < UNLIKE_SIZE]
        return near[:NAMED]

    @property
    def first_wrong(self) -> ResultRow | None:
        return next((row for row in self.results if not row.ok), None)


def explain_failures(
    report: Report,
    adapter: Adapter,
    where: str,
    case_seconds: float = CASE_SECONDS,
    seconds: float = EXPLAIN_SECONDS,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Explanation]:
    """Explanations of a report's failures, in its order; of an interrupted run without what costs seconds."""
    caps, deadline = adapter.capabilities(), time.monotonic() + seconds
    failed = [v for v in report.verdicts if v.failed and v.contract is not None]
    found: dict[int, Explanation] = {}
    try:
        for index in _one_of_each_family_first(failed):
            verdict, left = failed[index], max(deadline - time.monotonic(), 0.0)
            assert verdict.contract is not None
            tell(f"looking into {verdict.id}")
            bench = Bench(adapter, caps, verdict.contract, case_seconds)
            found[index] = explain_one(verdict, bench, where, 0.0 if report.missing else left)
    except KeyboardInterrupt:  # who cannot wait gets what there is
        tell("interrupted")
    return [found[index] for index in sorted(found)]


def _one_of_each_family_first(failed: list[Verdict]) -> Iterable[int]:
    """Cases first, since a relation knows less about its failure."""
    seen: dict[str, int] = {}
    order = []
    for index, verdict in enumerate(failed):
        family = verdict.id.split(".")[0]
        seen[family] = seen.get(family, 0) + 1
        order.append((seen[family], case_of(verdict.id) is None, index))
    return [index for *_, index in sorted(order)]


def explain_one(
    verdict: Verdict, bench: Bench, where: str, seconds: float = EXPLAIN_SECONDS, cause: bool = True
) -> Explanation:
    """One failure explained; what costs seconds is left out where none are left, and its cause on request."""
    check, case = check_by_id(verdict.id), case_of(verdict.id)
    deadline = time.monotonic() + seconds
    told = Explanation(verdict, check, repro_script(check, bench.contract, where, None, case))
    if re.match(NOT_AGAIN, verdict.reason):
        return told
    problem = _evidence(told, bench)
    if seconds:
        told.searched = True
        if problem is not None and cause:
            _find_cause(told, bench, problem, deadline - time.monotonic())
        left = min(SHRINK_SECONDS, deadline - time.monotonic())
        told.smallest = shrink(verdict, bench, left) if left > 0 and check.tier != "probe" else None
        told.script = repro_script(check, bench.contract, where, told.smallest, case)
    return told


def _evidence(told: Explanation, bench: Bench) -> Problem | None:
    """Run the check again, look at the rows of its calls, and return the problem of the first wrong call."""
    watched = SizedBench(**vars(bench))
    verdict, case = told.check(watched), case_of(told.verdict.id)
    told.again = verdict.failed
    problems = watched.seen[:CALLS] if case is None else problems_of(case, bench.caps, bench.contract)
    evidence, failures = None, 0
    for number, problem in enumerate(problems, 1):
        try:
            rows, ratios = _result_rows(bench, problem)
        except KernelFailure as error:
            told.calls.append(f"call {number}: {error}")
            failures += 1
            continue
        worst = max(rows, key=lambda row: row.ratio / row.limit, default=None)
        if worst is not None:
            told.calls.append(f"call {number}: {worst.name} {worst.ratio:.2g} of {worst.limit:g}")
        wrong = any(not row.ok for row in rows)
        if told.first_wrong is None and (wrong or (case is not None and evidence is None)):
            evidence, told.results = problem, rows
            told.ratio_map = _ratio_map(rows, ratios, problem, verdict)
    told.each_call_right = case is None and evidence is None and not failures
    return evidence


def _is_finite(problem: Problem) -> bool:
    x = problem.judge
    return all(bool(y.isfinite().all()) for y in (*problem.inputs(), *([] if x.h0 is None else [x.h0])))


def _result_rows(bench: Bench, problem: Problem) -> tuple[list[ResultRow], Results]:
    """Every result of one call, in the order of computation, and the ratio of each of its rows."""
    if not _is_finite(problem):
        raise KernelFailure("inputs that are not finite, by intention")
    got = guarded_run(bench.adapter, problem, bench.caps, seconds=bench.seconds, finite=False)
    ratios = row_ratios(got, problem)
    rows = []
    for name in sorted(ratios, key=DERIVED.index):
        worst, limit = ratios[name].max().item(), limit_of(name)
        first = "" if worst <= limit else str(locate(ratios[name], name, limit, problem)).partition(": ")[2]
        rows.append(ResultRow(name, worst, limit, first))
    return rows, ratios


def _ratio_map(rows: list[ResultRow], ratios: Results, problem: Problem, verdict: Verdict) -> RatioMap | None:
    """Of the first wrong result; of the one that the verdict names where none is over its limit."""
    wrong = next((row.name for row in rows if not row.ok), verdict.place.result if verdict.place else None)
    if wrong is None or wrong not in ratios or wrong in PARAMETER_GRADIENTS:
        return None
    ratio, limit = ratios[wrong], limit_of(wrong)
    found = RatioMap(wrong, limit, ratio, problem)
    bad = ratio.nan_to_num(nan=torch.inf, posinf=torch.inf) > limit
    if wrong not in PER_TOKEN or not bad.any() or verdict.tier == "exact":
        return found  # a state has no order in time, and bits are right or wrong: nothing grows
    backwards = wrong in FROM_THE_END
    t, b, _ = first_in_time(bad, backwards)
    curve = onset_curve(ratio, grid_of(problem), (b, t), backwards)
    return replace(found, onset=(b, t), curve=tuple(curve), growth=fit_growth(curve))


def _find_cause(told: Explanation, bench: Bench, problem: Problem, seconds: float) -> None:
    """The first wrong stage, where the kernel shows its stages, and the known bugs that it looks like."""
    if can_be_staged(bench) and problem.judge.v.shape[1]:
        try:
            told.stages = stage_rows(bench, problem)
        except KernelFailure as error:
            told.stages_note = str(error)
    try:
        told.suspects = suspects(bench, problem, seconds=min(SUSPECT_SECONDS, seconds))
    except KernelFailure as error:
        told.stages_note = told.stages_note or str(error)
