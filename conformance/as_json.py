"""A report for machines. SCHEMA is the version of this form; it grows when a key changes its meaning or goes.

    schema       1
    identity     what the adapter says it runs
    ok           no check failed
    counts       pass, fail, skip, acceptable, waived: number of verdicts
    versions     of packages, Python, system, machine
    families     [{family, counts, worst_ratio, limit, worst_check, price}]       price: ratio_rec
    verdicts     [{id, tier, family, status, reason, ratios, limit, price, place, contract}], in the order of the run
                 ratios: error over envelope by result; place: the fields of `place.Place`, or null
    failures     one for each verdict that failed, in the order of the run:
        id, contract, reason
        comment, effect       what the check asks, and what a user sees of a kernel that fails it
        links                 [{name, address}] of public bugs of this kind; museum.toml says more of each
        repeats               it fails each time
        searched              whether time was left for stages, suspects and a smaller case
        results               [{name, ratio, limit, ok, first}] of the failing call, in the order of computation
        calls                 what each call of a relation is worth on its own, in words; each_call_right: all are
        growth                {result, law, gain, rate, curve}, from the first bad token on; or null
        stages                [{name, formula, ratio, ok, first}]; first_wrong_stage: a name or null
        suspects              [{name, group, bug, likeness, size, link}], nearest first
        smallest              {case or sizes, reason, tried, seconds}, or null
        script                Python that shows it again

Numbers that JSON does not know are the strings "inf", "-inf" and "nan".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .explain import Explanation
from .museum import url_of
from .stage_check import first_wrong
from .suite import Report, all_checks
from .tables import STATUSES, FamilyRow, family_rows, versions
from .trials import Smallest, case_knobs

SCHEMA = 1
SUSPECTS = 5


def as_json(report: Report, explained: Sequence[Explanation] = ()) -> dict[str, Any]:
    """The report in the form of this module's docstring; failures are those that were explained."""
    family_of = {check.id: check.family for check in all_checks()}
    entry = {
        "schema": SCHEMA,
        "identity": report.identity,
        "ok": report.ok,
        "counts": {status: report.count(status) for status in STATUSES},
        "versions": versions(),
        "families": [_family(row) for row in family_rows(report)],
        "verdicts": [{**asdict(v), "family": family_of[v.id]} for v in report.verdicts],
        "failures": [_failure(one) for one in explained],
    }
    plain: dict[str, Any] = _plain(entry)
    return plain


def _family(row: FamilyRow) -> dict[str, Any]:
    worst = row.worst
    return {
        "family": row.family,
        "counts": row.counts,
        "worst_ratio": None if worst is None else worst.worst,
        "limit": None if worst is None else worst.limit,
        "worst_check": None if worst is None else worst.id,
        "price": row.price,
    }


def _failure(one: Explanation) -> dict[str, Any]:
    verdict, check, found = one.verdict, one.check, one.ratio_map
    growth = None
    if found is not None and found.onset is not None:
        law = {"law": found.growth.law, "gain": found.growth.gain, "rate": found.growth.rate}
        growth = {"result": found.result, **law, "curve": found.curve}
    return {
        "id": verdict.id,
        "contract": None if verdict.contract is None else asdict(verdict.contract),
        "reason": verdict.reason,
        "comment": check.comment,
        "effect": check.effect,
        "links": [{"name": link, "address": url_of(link)} for link in check.links],
        "repeats": one.again,
        "searched": one.searched,
        "results": [{**asdict(row), "ok": row.ok} for row in one.results],
        "calls": one.calls,
        "each_call_right": one.each_call_right,
        "growth": growth,
        "stages": [{**asdict(row), "ok": row.ok} for row in one.stages],
        "first_wrong_stage": first_wrong(one.stages),
        "suspects": [
            {
                "name": suspect.mutant.name,
                "group": suspect.mutant.group,
                "bug": suspect.mutant.bug,
                "likeness": suspect.likeness,
                "size": suspect.size,
                "link": suspect.mutant.link or None,
            }
            for suspect in one.suspects[:SUSPECTS]
        ],
        "smallest": None if one.smallest is None else _smallest(one.smallest),
        "script": one.script,
    }


def _smallest(found: Smallest) -> dict[str, Any]:
    knobs = {"sizes": found.sizes} if found.case is None else {"case": case_knobs(found.case)}
    return {**knobs, "reason": found.verdict.reason, "tried": found.tried, "seconds": found.seconds}


def _plain(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return "nan" if math.isnan(x) else "inf" if x > 0 else "-inf"
    return x
