"""The report as one HTML file: pictures inline, nothing loaded from elsewhere, readable on a phone, light or dark.

Everything that a kernel or an adapter says (identity, error messages, paths) is escaped by the template engine; only
the pictures, which this package draws, are put in as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from .adapter import Contract
from .explain import Explanation
from .limits import word_for
from .museum import url_of
from .pictures import growth_picture, ratio_picture
from .place import PER_TOKEN
from .report import calls_sentence, place_lines, stage_sentence
from .suite import Report, all_checks
from .tables import STATUSES, family_rows, skipped, versions
from .verdict import Verdict

OPEN = 4  # failures shown unfolded, those that most is known of


def page(report: Report, explained: Sequence[Explanation], where: str) -> str:
    """The whole page."""
    contracts = list(dict.fromkeys(v.contract for v in report.verdicts if v.contract is not None))
    checks = {check.id: check for check in all_checks()}
    lines = [verdict for verdict in report.verdicts if verdict.status in ("pass", "waived", "acceptable")]
    unfolded = {id(one) for one in sorted(explained, key=lambda one: not one.searched)[:OPEN]}
    return _template().render(
        report=report,
        where=where,
        counts={status: report.count(status) for status in STATUSES},
        headline=headline(report),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        versions=versions(),
        contracts=contracts,
        families=family_rows(report),
        failures=[failure(one, number, where, id(one) in unfolded) for number, one in enumerate(explained)],
        unexplained=[v for v in report.verdicts if v.failed and all(v is not one.verdict for one in explained)],
        lines=[line(verdict, checks[verdict.id].comment, contracts) for verdict in lines],
        skipped=skipped(report),
        url_of=url_of,
    )


@cache
def _template() -> Template:
    folder = FileSystemLoader(Path(__file__).parent)
    engine = Environment(
        loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    engine.filters["number"] = number
    return engine.get_template("report.html")


def headline(report: Report) -> str:
    """The verdict in a sentence."""
    judged = len(report.verdicts) - report.count("skip")
    cut = f" The run was interrupted: {report.missing} checks were not judged." if report.missing else ""
    if not report.count("fail"):
        return f"All {judged} checks that were judged pass, or are known failures.{cut}"
    first = next(verdict for verdict in report.verdicts if verdict.failed)
    return f"{report.count('fail')} of {judged} checks fail. The first is {first.id}: {first.reason}.{cut}"


def failure(one: Explanation, number: int, where: str, unfolded: bool) -> dict[str, Any]:
    """One failure as the template shows it."""
    found = one.ratio_map
    return {
        "one": one,
        "open": unfolded,
        "anchor": f"failure-{number}",
        "calls_say": calls_sentence(one),
        "places": list(place_lines(one.verdict)),
        "picture": "" if found is None else Markup(ratio_picture(found, f"rows-{number}")),
        "picture_says": picture_says(one),
        "growth": "" if found is None else Markup(growth_picture(found, f"growth-{number}")),
        "growth_says": "" if found is None else f"From the first bad token on the error {found.growth}.",
        "stage_says": stage_sentence(one) if one.stages else one.stages_note,
        "command": f"kimi-linear conformance run {where} --only {one.verdict.id}",
    }


def picture_says(one: Explanation) -> str:
    """What to see in the picture of rows."""
    found = one.ratio_map
    if found is None:
        return ""
    cell = "one head at one token" if found.result in PER_TOKEN else "one key channel of a head's state"
    said = f"Each cell is {cell} of {found.result}. "
    said += f"Blue is rounding, red is over the limit of {found.limit:g} times that"
    said += ", purple is not finite." if not found.ratio.isfinite().all() else "."
    if one.verdict.tier == "exact":
        said += " Here rounding is no excuse: every bit is decided."
    if one.verdict.place is not None and one.verdict.place.result == found.result:
        said += f" Over it: {'; '.join(one.verdict.place.spread)}."
    return said + (" The triangle marks the first bad token." if found.onset is not None else "")


def line(verdict: Verdict, comment: str, contracts: Sequence[Contract]) -> dict[str, Any]:
    """A check that did not fail, in one row."""
    rated = bool(verdict.ratios) and verdict.limit > 0
    return {
        "verdict": verdict,
        "comment": comment,
        "contract": contracts.index(verdict.contract) + 1 if verdict.contract in contracts else "",
        "share": min(100.0, 100 * verdict.worst / verdict.limit) if rated else 0.0,
        "word": word_for(verdict.worst, verdict.limit) if rated and verdict.tier in ("ratio", "limit") else "",
    }


def number(x: float | None) -> str:
    """Three digits; a hyphen for none."""
    if x is None:
        return "-"
    if abs(x) < 10:
        return f"{x:.2f}"
    return f"{float(f'{x:.3g}'):,.0f}" if 100 <= abs(x) < 1e6 else f"{x:.3g}"
