"""The score in words, and as a page of tables."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version

import torch

from .mutants import MUTANTS, Mutant
from .score import Score

INTRODUCTION = """\
Bugs are planted in emulated kernels, one at a time, and the suite has to see each. The same suite has to pass every
correct kernel of a panel: one false alarm voids the score. A bug counts as seen only by a check that passes the
kernel without it, and not by a crash."""
TIERS = ("exact", "relation", "limit", "ratio", "probe")  # in the order in which they run


def score_lines(found: Score) -> Iterator[str]:
    """The score in words; void where a correct kernel fails."""
    if found.false_alarms:
        yield "VOID: correct kernels fail"
        yield from (f"  {kernel}: {check}: {reason}" for kernel, check, reason in found.false_alarms)
    alarms = f"{len(found.false_alarms)} false alarms on {found.kernels} correct kernels"
    yield f"{found.killed} of {len(found.kills)} bugs seen, {alarms}"
    yield f"required: {found.required:.0%} seen, no false alarm: {'met' if found.ok else 'NOT MET'}"
    yield from (f"not seen: {name}{_crashed(found, name)}" for name in found.survivors)
    yield "seen by tier: " + ", ".join(f"{tier} {found.by_tier().get(tier, 0)}" for tier in TIERS)
    for check, names in sorted(found.alone().items()):
        yield f"only {check} sees {', '.join(names)}"
    yield f"families that could go: {', '.join(found.redundant_families()) or 'none'}"
    yield f"a smallest set: {', '.join(found.smallest_cover())}"


def markdown(scores: Sequence[Score], mutants: Sequence[Mutant] = MUTANTS, command: str = "") -> Iterator[str]:
    """A page: figures of each mode, the panel, the matrix of the last score, what its checks are worth."""
    found = scores[-1]
    yield "# How good the judge is"
    yield ""
    yield INTRODUCTION
    yield ""
    yield f"Written by `{command}` with {versions()}."
    yield ""
    yield from _figures(scores)
    yield from _panel_table(found)
    yield from _matrix(found, mutants)
    yield from _worth(found)


def versions() -> str:
    """What a measurement ran with."""
    ours = version("kimi-linear-reference")
    return f"kimi-linear-reference {ours}, torch {torch.__version__}, Python {platform.python_version()}"


def _figures(scores: Sequence[Score]) -> Iterator[str]:
    yield "| mode | bugs seen | required | false alarms | not seen |"
    yield "|---|---|---|---|---|"
    for found in scores:
        mode, survivors = "full" if found.full else "quick", ", ".join(found.survivors) or "none"
        share = f"{found.killed} of {len(found.kills)}"
        alarms = f"{len(found.false_alarms)} on {found.kernels} kernels"
        yield f"| {mode} | {share} | {found.required:.0%} | {alarms} | {survivors} |"


def _panel_table(found: Score) -> Iterator[str]:
    yield from ("", "## Correct kernels", "")
    yield "The worst ratio of an error to its rounding envelope; the limits are 4 forward and 8 backward."
    yield ""
    yield "| kernel | checks passed | skipped | worst forward | worst backward |"
    yield "|---|---|---|---|---|"
    for kernel in found.panel:
        ratios = f"{kernel.forward:.2f} | {kernel.backward:.2f}"
        yield f"| {kernel.kernel} | {kernel.passed} | {kernel.skipped} | {ratios} |"


def _matrix(found: Score, mutants: Sequence[Mutant]) -> Iterator[str]:
    yield from ("", "## Bugs", "")
    yield "How many checks of each tier see a bug. Tiers: " + ", ".join(TIERS) + "."
    yield ""
    yield f"| bug | what is broken | in | public report of its kind | {' | '.join(TIERS)} |"
    yield f"|---|---|---|---|{'---|' * len(TIERS)}"
    for mutant in mutants:
        checks = found.kills.get(mutant.name)
        if checks is not None:
            counts = [sum(found.tiers[id] == tier for id in checks) for tier in TIERS]
            cells = " | ".join(str(n) if n else "" for n in counts)
            yield f"| {mutant.name} | {mutant.bug} | {mutant.on} | {mutant.link} | {cells} |"


def _worth(found: Score) -> Iterator[str]:
    yield from ("", "## What checks are worth", "", "Bugs seen by each tier: ")
    yield ", ".join(f"{tier} {found.by_tier().get(tier, 0)}" for tier in TIERS) + "."
    yield from ("", "Bugs seen by each family: ")
    yield ", ".join(f"{family} {n}" for family, n in sorted(found.by_family().items())) + "."
    yield from ("", "Checks that are alone in seeing a bug:", "")
    yield from (f"- `{check}`: {', '.join(names)}" for check, names in sorted(found.alone().items()))
    yield from (
        "",
        f"Families without which as much would be seen: {', '.join(found.redundant_families()) or 'none'}.",
    )
    cover = ", ".join(f"`{check}`" for check in found.smallest_cover())
    yield from ("", f"A smallest set of checks that sees all: {cover}.")


def _crashed(found: Score, name: str) -> str:
    checks = found.crashes.get(name, [])
    return f" (it crashes in {', '.join(checks)})" if checks else ""
