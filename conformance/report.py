"""What a run found, for people (text) and for machines (JSON).

A failure says where the first bad row is, how the error goes on from there, which stage goes wrong if the kernel
shows its stages, else which known bugs make an error in the same direction, and how to see it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .adapter import GRADIENTS, RESULTS, STAGES, Adapter, Contract
from .bench import Bench
from .cases import Case
from .catalogue import CASES
from .envelope import error_ratio
from .gold import Results, stage_truth, truth_of
from .guard import KernelFailure, guarded_run
from .limits import ALIKE, FORWARD_RATIO, word_for
from .mutants import MUTANTS, Mutant, build
from .place import PER_TOKEN
from .problem import Problem, problem_of
from .suite import Report, check_by_id
from .verdict import Verdict

SUSPECTS = 3  # named in a report
EXPLAINED = 5  # failures that are explained in full; the rest get one line


def summary_line(verdict: Verdict) -> str:
    """One verdict in one line, with its ratios, also where it passes."""
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in verdict.ratios.items())
    word = f" ({word_for(verdict.worst, verdict.limit)})" if verdict.tier in ("ratio", "limit") and ratios else ""
    price = "" if verdict.price is None else f", ratio_rec {verdict.price:.2f}"
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"{verdict.status.upper():10} {verdict.id:28} {ratios}{price}{word}{reason}"


def explain_failure(verdict: Verdict, adapter: Adapter, where: str) -> Iterator[str]:
    """Everything known about a failure, line by line."""
    check = check_by_id(verdict.id)
    yield f"FAIL {verdict.id}  [{verdict.contract}]"
    yield f"  {check.comment}"
    yield f"  {verdict.reason}"
    if check.effect:
        yield f"  effect: {check.effect}"
    yield from _place_lines(verdict)
    case = _case_of(verdict.id)
    if case is not None and verdict.contract is not None and verdict.place is not None:
        bench = _bench(adapter, verdict.contract)
        yield from _cause_lines(bench, case)
    for link in check.links:
        yield f"  a public report of this kind: {link}"
    yield f"  again: kimi-linear conformance run {where} --only {verdict.id}"
    yield f"  as a script: kimi-linear conformance repro {verdict.id} --adapter {where}"


def text(report: Report, adapter: Adapter, where: str, every: bool = False) -> str:
    """The whole report: failures explained, then totals."""
    lines = [f"{report.identity}"]
    failed = [verdict for verdict in report.verdicts if verdict.failed]
    shown = report.verdicts if every else [v for v in report.verdicts if v.status in ("acceptable", "waived")]
    lines += [summary_line(verdict) for verdict in shown]
    for verdict in failed[:EXPLAINED]:
        lines += ["", *explain_failure(verdict, adapter, where)]
    if failed[EXPLAINED:]:
        lines += ["", *(summary_line(verdict) for verdict in failed[EXPLAINED:])]
    lines += ["", *_skip_lines(report), *_totals(report)]
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    """The report for machines; a verdict's numbers are plain."""
    counts = {status: report.count(status) for status in ("pass", "fail", "skip", "acceptable", "waived")}
    return {
        "identity": report.identity,
        "ok": report.ok,
        "counts": counts,
        "verdicts": [_plain(v) for v in report.verdicts],
    }


def _plain(verdict: Verdict) -> dict[str, Any]:
    finite = {name: ratio if ratio < float("inf") else "inf" for name, ratio in verdict.ratios.items()}
    entry = {**asdict(verdict), "ratios": finite}
    if verdict.place is not None and not verdict.place.ratio < float("inf"):
        entry["place"]["ratio"] = "inf"
    return entry


def _totals(report: Report) -> list[str]:
    ratios = [v for v in report.verdicts if v.tier == "ratio" and v.status == "pass" and v.ratios]
    worst = max(ratios, key=lambda v: v.worst / v.limit, default=None)
    counts = ", ".join(f"{report.count(s)} {s}" for s in ("pass", "fail", "skip", "acceptable", "waived"))
    line = [] if worst is None else [f"worst passing ratio: {worst.worst:.2f} of {worst.limit:g} ({worst.id})"]
    return [*line, counts]


def _skip_lines(report: Report) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for verdict in report.verdicts:
        if verdict.status == "skip":
            reasons.setdefault(verdict.reason, []).append(verdict.id)
    return [f"skipped, {reason}: {', '.join(dict.fromkeys(ids))}" for reason, ids in reasons.items()]


def _place_lines(verdict: Verdict) -> Iterator[str]:
    place = verdict.place
    if place is None:
        return
    heads = f", heads {', '.join(map(str, place.heads))}" if place.heads else ""
    yield f"  {place}"
    yield f"  {place.bad_rows} of {place.rows} rows over the limit{heads}"
    if place.result in PER_TOKEN and verdict.tier in ("ratio", "limit"):
        yield f"  before it the ratio is at most {place.ratio_before:.2g}; from it on the error is {place.growth}"


def _cause_lines(bench: Bench, case: Case) -> Iterator[str]:
    problem = problem_of(case, bench.caps, bench.contract)
    if bench.caps.stages and not case.has("gradients") and bench.contract.chunk_size:
        yield from _stage_lines(bench, problem)
        return
    alike = [(score, mutant) for score, mutant in suspects(bench, problem) if score >= ALIKE]
    for score, mutant in alike[:SUSPECTS]:
        yield f"  looks like: {mutant.bug} ({mutant.name}, direction of the error {score:.2f})"
    if not alike:
        yield "  no known bug makes an error in this direction"


def _stage_lines(bench: Bench, problem: Problem) -> Iterator[str]:
    """Each stage's ratio, in order; the first over the limit is where to look."""
    declared = [name for name in STAGES if name in bench.caps.stages]
    try:
        got = guarded_run(
            bench.adapter, problem, bench.caps, frozenset(("o", "final_state", *declared)), bench.seconds
        )
    except KernelFailure as error:
        yield f"  stage check: {error}"
        return
    exact, bounds = stage_truth(problem)
    ratios = {}
    for name in declared:
        if got[name].shape != exact[name].shape:
            yield f"  stage check: {name} must be {list(exact[name].shape)}; got {list(got[name].shape)}"
            return
        ratios[name] = error_ratio(got[name], exact[name], bounds[name]).max().item()
    parts = [f"{name} {'ok' if ratio <= FORWARD_RATIO else 'FAIL'} {ratio:.2g}" for name, ratio in ratios.items()]
    yield f"  stage check: {' | '.join(parts)}"
    first = next((name for name in declared if not ratios[name] <= FORWARD_RATIO), None)
    yield f"  first wrong stage: {first}" if first else "  every stage is right: look at what follows v_new"


def suspects(bench: Bench, problem: Problem, mutants: Sequence[Mutant] = MUTANTS) -> list[tuple[float, Mutant]]:
    """Known bugs by the cosine between their error on this problem and the kernel's, best first."""
    truth = truth_of(problem)
    got = guarded_run(bench.adapter, problem, bench.caps, seconds=bench.seconds)
    chunked = bench.contract if bench.contract.chunk_size else Contract(**{**vars(bench.contract), "chunk_size": 32})
    found = []
    for mutant in mutants:
        kernel = build(mutant, chunked)
        try:
            theirs = guarded_run(kernel, _as_seen_by(kernel.contract, problem), kernel.capabilities())
        except KernelFailure:
            continue
        found.append((_cosine(got, theirs, truth), mutant))
    return sorted(found, key=lambda pair: -pair[0])


def _as_seen_by(contract: Contract, problem: Problem) -> Problem:
    """The same inputs in the conventions of the emulated kernels."""
    caps = build(MUTANTS[0], contract).capabilities()
    return problem_of(problem.case, caps, contract, problem.judge)


def _cosine(got: Results, theirs: Results, truth: Results) -> float:
    along, square, other = 0.0, 0.0, 0.0
    for name in got.keys() & theirs.keys() & truth.keys():
        size = truth[name].square().mean().sqrt().clamp(min=torch.finfo(torch.float64).tiny)
        a, b = ((x[name].double() - truth[name]) / size for x in (got, theirs))
        along, square, other = (
            along + (a * b).sum().item(),
            square + (a * a).sum().item(),
            other + (b * b).sum().item(),
        )
    return along / (square * other) ** 0.5 if square and other else 0.0


def _case_of(id: str) -> Case | None:
    return next((case for case in CASES if case.id == id), None)


def _bench(adapter: Adapter, contract: Contract) -> Bench:
    return Bench(adapter, adapter.capabilities(), contract)


def repro_script(case: Case, where: str) -> str:
    """Ten lines that run one case and print the ratios of each row."""
    want = list(GRADIENTS if case.has("gradients") else RESULTS)
    return f'''"""{case.comment}"""
from kimi_linear.conformance.adapter import checked_capabilities, load_adapter
from kimi_linear.conformance.catalogue import by_id
from kimi_linear.conformance.problem import problem_of
from kimi_linear.conformance.verdict import row_ratios

adapter = load_adapter("{where}")
caps = checked_capabilities(adapter)
problem = problem_of(by_id("{case.id}"), caps, caps.contracts[0])
want = frozenset({want})
for name, ratio in row_ratios(adapter.run(problem.call, want), problem).items():
    print(name, "worst ratio", ratio.max().item(), "at row", (ratio == ratio.max()).nonzero()[0].tolist())
'''
