"""What a run found, in text for people.

A failure says where the first bad row is, to which others it spreads, how the error goes on, which stage goes wrong
if the kernel shows its stages, which known bugs make an error in the same direction, the smallest input that fails
alike, and how to see it again. For machines: `as_json`; with pictures: `page`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .adapter import Adapter
from .as_json import as_json
from .bench import Bench
from .explain import Explanation, explain_failures, explain_one
from .place import PER_TOKEN
from .stage_check import first_wrong
from .suite import Report
from .tables import STATUSES, skipped
from .verdict import Verdict, summary_line

__all__ = ["EXPLAINED", "as_json", "explain_failure", "explain_failures", "summary_line", "text"]

EXPLAINED = 5  # failures that are explained in full; the rest get one line


def text(
    report: Report,
    adapter: Adapter,
    where: str,
    every: bool = False,
    explained: Sequence[Explanation] | None = None,
) -> str:
    """The whole report: failures explained, then totals. `explained`: of `explain_failures`, if that ran before."""
    explained = explain_failures(report, adapter, where) if explained is None else explained
    lines = [f"{report.identity}"]
    shown = report.verdicts if every else [v for v in report.verdicts if v.status in ("acceptable", "waived")]
    lines += [summary_line(verdict) for verdict in shown]
    in_full = sorted(explained, key=lambda one: not one.searched)[:EXPLAINED]
    for one in in_full:
        lines += ["", *failure_lines(one, where)]
    told = {id(one.verdict) for one in in_full}
    rest = [summary_line(v) for v in report.verdicts if v.failed and id(v) not in told]
    lines += ["", *rest] if rest else []
    lines += ["", *_skip_lines(report), *_totals(report)]
    return "\n".join(lines)


def explain_failure(verdict: Verdict, adapter: Adapter, where: str) -> Iterator[str]:
    """Everything known about one failure, line by line."""
    if verdict.contract is None:
        yield f"FAIL {verdict.id}: {verdict.reason}"
        return
    bench = Bench(adapter, adapter.capabilities(), verdict.contract)
    yield from failure_lines(explain_one(verdict, bench, where), where)


def failure_lines(one: Explanation, where: str) -> Iterator[str]:
    """An explanation in words."""
    verdict, check = one.verdict, one.check
    yield f"FAIL {verdict.id}  [{verdict.contract}]"
    yield f"  {check.comment}"
    yield f"  {verdict.reason}"
    if not one.again:
        yield "  run again, it passes: the kernel does not give the same bits each time"
    if check.effect:
        yield f"  effect: {check.effect}"
    yield from (f"  {line}" for line in place_lines(verdict))
    yield from (f"  {line}" for line in cause_lines(one))
    if one.smallest is not None and one.smallest.reduced:
        yield f"  smallest failing case: {one.smallest} ({one.smallest.tried} tried): {one.smallest.verdict.reason}"
    for link in check.links:
        yield f"  a public report of this kind: {link}"
    yield f"  again: kimi-linear conformance run {where} --only {verdict.id}"
    yield f"  as a script: kimi-linear conformance repro {verdict.id} --adapter {where}"


def place_lines(verdict: Verdict) -> Iterator[str]:
    """Where, how far, and how it goes on."""
    place = verdict.place
    if place is None:
        return
    yield f"{place}"
    yield f"{place.bad_rows} of {place.rows} rows over the limit: {'; '.join(place.spread)}"
    if place.result in PER_TOKEN and verdict.tier in ("ratio", "limit"):
        yield f"before it the ratio is at most {place.ratio_before:.2g}; from it on the error {place.growth}"


def cause_lines(one: Explanation) -> Iterator[str]:
    """What is known about the cause: results, calls, stages, suspects."""
    if len(one.results) > 2 and one.first_wrong is not None:
        yield "in the order of a backward: " + " | ".join(_mark(row.name, row.ok, row.ratio) for row in one.results)
        yield f"first wrong gradient: {one.first_wrong.name}"
    if len(one.calls) > 1:
        yield f"its calls, each against the truth: {calls_sentence(one)}"
    if one.stages:
        yield "stage check: " + " | ".join(_mark(row.name, row.ok, row.ratio) for row in one.stages)
        yield stage_sentence(one)
    elif one.stages_note:
        yield f"stage check: {one.stages_note}"
    yield from (f"looks like: {suspect}" for suspect in one.alike)
    if one.suspects and not one.alike:
        yield "no known bug makes an error in this direction"


def calls_sentence(one: Explanation) -> str:
    """What the calls of a check are worth, each on its own."""
    right = ". Each is right on its own: the failure is between them" if one.each_call_right else ""
    return "; ".join(one.calls) + right


def stage_sentence(one: Explanation) -> str:
    """The first wrong stage in words."""
    first = first_wrong(one.stages)
    if first is not None:
        row = next(row for row in one.stages if row.name == first)
        return f"first wrong stage: {first}, at {row.first} ({row.formula})"
    if one.check.family == "gradients":
        return "every stage of the forward is right: look in the backward"
    return "every stage is right: look at what follows v_new"


def _mark(name: str, ok: bool, ratio: float) -> str:
    return f"{name} {'ok' if ok else 'FAIL'} {ratio:.2g}"


def _totals(report: Report) -> list[str]:
    ratios = [v for v in report.verdicts if v.tier == "ratio" and v.status == "pass" and v.ratios]
    worst = max(ratios, key=lambda v: v.worst / v.limit, default=None)
    counts = ", ".join(f"{report.count(s)} {s}" for s in STATUSES)
    line = [] if worst is None else [f"worst passing ratio: {worst.worst:.2f} of {worst.limit:g} ({worst.id})"]
    return [*line, counts]


def _skip_lines(report: Report) -> list[str]:
    return [f"skipped, {reason}: {', '.join(ids)}" for reason, ids in skipped(report).items()]
