"""Tables over a whole run: families of checks, skipped checks by reason, and the versions that ran."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from .suite import Report, all_checks
from .verdict import Verdict

STATUSES = ("pass", "fail", "skip", "acceptable", "waived")
PACKAGES = ("kimi-linear-reference", "torch", "triton", "numpy")


def skipped(report: Report) -> dict[str, list[str]]:
    """Skipped checks by reason."""
    reasons: dict[str, list[str]] = {}
    for verdict in report.verdicts:
        if verdict.status == "skip" and verdict.id not in reasons.setdefault(verdict.reason, []):
            reasons[verdict.reason].append(verdict.id)
    return reasons


@dataclass(frozen=True)
class FamilyRow:
    """A family of checks: how many passed, failed.., the worst ratio of a limit, and the highest price."""

    family: str
    counts: dict[str, int]
    worst: Verdict | None
    price: float | None


def family_rows(report: Report) -> list[FamilyRow]:
    """Families in the order of the run."""
    family_of = {check.id: check.family for check in all_checks()}
    families: dict[str, list[Verdict]] = {}
    for verdict in report.verdicts:
        families.setdefault(family_of[verdict.id], []).append(verdict)
    rows = []
    for family, verdicts in families.items():
        judged = [v for v in verdicts if v.ratios and v.limit and v.tier in ("ratio", "limit")]
        prices = [v.price for v in verdicts if v.price is not None]
        rows.append(
            FamilyRow(
                family,
                {status: sum(v.status == status for v in verdicts) for status in STATUSES},
                max(judged, key=lambda v: v.worst / v.limit, default=None),
                max(prices, default=None),
            )
        )
    return rows


def versions() -> dict[str, str]:
    """What was installed, and the machine."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # a tree that is imported without being installed; triton is optional
            continue
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {**found, "python": platform.python_version(), "system": platform.system(), "machine": machine}
