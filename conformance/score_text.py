"""The score in words, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from .score import Score

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


def _crashed(found: Score, name: str) -> str:
    checks = found.crashes.get(name, [])
    return f" (it crashes in {', '.join(checks)})" if checks else ""
