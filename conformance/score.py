"""How good the judge is: bugs planted in emulated kernels, and correct kernels that must pass.

    score = killed / planted, void if a correct kernel fails anything

A mutant is killed by a check that fails it and passes the same kernel without the bug. Mutants that nothing kills
are listed by name, and so are checks without which the suite would kill as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .bench import Bench
from .emulated import Emulated
from .mutants import MUTANTS, Mutant, build
from .mutants.registry import BASES
from .panel import panel
from .suite import Check, all_checks


@dataclass
class Score:
    """The kill matrix and what follows from it."""

    kills: dict[str, list[str]] = field(default_factory=dict)  # mutant to the checks that kill it
    false_alarms: list[tuple[str, str, str]] = field(default_factory=list)  # kernel, check, reason
    tiers: dict[str, str] = field(default_factory=dict)  # check to tier
    families: dict[str, str] = field(default_factory=dict)  # check to family
    kernels: int = 0

    @property
    def survivors(self) -> list[str]:
        return [name for name, checks in self.kills.items() if not checks]

    @property
    def killed(self) -> int:
        return len(self.kills) - len(self.survivors)

    def by_tier(self) -> dict[str, int]:
        """Mutants that each tier kills."""
        return dict(Counter(tier for checks in self.kills.values() for tier in {self.tiers[id] for id in checks}))

    def alone(self) -> dict[str, list[str]]:
        """Checks that are alone in killing a mutant."""
        found: dict[str, list[str]] = {}
        for name, checks in self.kills.items():
            if len(checks) == 1:
                found.setdefault(checks[0], []).append(name)
        return found

    def redundant_families(self) -> list[str]:
        """Families without which every killed mutant would still be killed."""
        needed = set()
        for checks in self.kills.values():
            families = {self.families[id] for id in checks}
            if len(families) == 1:
                needed |= families
        return sorted(set(self.families.values()) - needed)

    def smallest_cover(self) -> list[str]:
        """A greedy smallest set of checks that kills all that is killed."""
        left = {name: set(checks) for name, checks in self.kills.items() if checks}
        chosen = []
        while left:
            counts = Counter(id for checks in left.values() for id in checks)
            best = max(sorted(counts), key=lambda id: counts[id])
            chosen.append(best)
            left = {name: checks for name, checks in left.items() if best not in checks}
        return chosen

    def as_json(self) -> dict[str, Any]:
        return {
            "planted": len(self.kills),
            "killed": self.killed,
            "survivors": self.survivors,
            "correct_kernels": self.kernels,
            "false_alarms": [list(alarm) for alarm in self.false_alarms],
            "by_tier": self.by_tier(),
            "alone": self.alone(),
            "redundant_families": self.redundant_families(),
            "smallest_cover": self.smallest_cover(),
            "kills": self.kills,
        }


def measure(
    mutants: Sequence[Mutant] = MUTANTS,
    kernels: Sequence[Emulated] | None = None,
    full: bool = True,
    first_kill: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Score:
    """Judge correct kernels, then every mutant; `first_kill` stops at a mutant's first kill."""
    checks, score = all_checks(full), Score()
    score.tiers = {check.id: check.tier for check in checks}
    score.families = {check.id: check.family for check in checks}
    kernels = panel() if kernels is None else kernels
    score.kernels = len(kernels)
    for kernel in kernels:
        tell(kernel.identity())
        score.false_alarms += false_alarms(kernel, checks)
    innocent = {name: _passed(BASES[name](), checks) for name in {mutant.on for mutant in mutants}}
    for mutant in mutants:
        tell(mutant.name)
        usable = [check for check in checks if check.id in innocent[mutant.on]]
        score.kills[mutant.name] = kills(mutant, usable, first_kill)
    return score


def false_alarms(kernel: Emulated, checks: Sequence[Check]) -> list[tuple[str, str, str]]:
    """What fails a correct kernel."""
    bench = Bench(kernel, kernel.capabilities(), kernel.contract)
    verdicts = [check(bench) for check in checks]
    return [(kernel.identity(), verdict.id, verdict.reason) for verdict in verdicts if verdict.failed]


def kills(mutant: Mutant, checks: Sequence[Check], first_kill: bool = False) -> list[str]:
    """The checks that fail a mutant."""
    kernel = build(mutant)
    bench, found = Bench(kernel, kernel.capabilities(), kernel.contract), []
    for check in checks:
        if check(bench).failed:
            found.append(check.id)
            if first_kill:
                break
    return found


def _passed(kernel: Emulated, checks: Sequence[Check]) -> set[str]:
    bench = Bench(kernel, kernel.capabilities(), kernel.contract)
    return {check.id for check in checks if check(bench).status == "pass"}
