"""How good the judge is: bugs planted in emulated kernels, and correct kernels that must pass.

    score = killed / planted, void if a correct kernel fails anything

A mutant is killed by a check that fails it and passes the same kernel without the bug; a check in which it crashes
does not count. Mutants that nothing kills are listed by name, and so are checks without which the suite would kill
as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field, replace
from typing import Any

from .limits import FULL_KILLED, QUICK_KILLED
from .suite import all_checks


@dataclass
class KernelScore:
    """What the checks say of one correct kernel: counts, and its worst ratios, forward and backward."""

    kernel: str
    passed: int = 0
    skipped: int = 0
    forward: float = 0.0
    backward: float = 0.0


@dataclass
class Score:
    """The kill matrix and what follows from it."""

    kills: dict[str, list[str]] = field(default_factory=dict)  # mutant to the checks that kill it
    false_alarms: list[tuple[str, str, str]] = field(default_factory=list)  # kernel, check, reason
    tiers: dict[str, str] = field(default_factory=dict)  # check to tier
    families: dict[str, str] = field(default_factory=dict)  # check to family
    kernels: int = 0
    full: bool = True
    panel: list[KernelScore] = field(default_factory=list)
    crashes: dict[str, list[str]] = field(default_factory=dict)  # mutant to the checks in which it crashes

    @property
    def survivors(self) -> list[str]:
        """Mutants that no check kills."""
        return [name for name, checks in self.kills.items() if not checks]

    @property
    def killed(self) -> int:
        """How many mutants some check kills."""
        return len(self.kills) - len(self.survivors)

    @property
    def required(self) -> float:
        """The share that has to be killed: all of them by all checks."""
        return FULL_KILLED if self.full else QUICK_KILLED

    @property
    def ok(self) -> bool:
        """No correct kernel fails, and enough mutants do."""
        return not self.false_alarms and self.killed >= self.required * len(self.kills)

    def quick(self) -> Score:
        """What the quick checks of a full score found; its panel is that of the full one."""
        ids = {check.id for check in all_checks(False)}
        chosen = {name: [id for id in checks if id in ids] for name, checks in self.kills.items()}
        alarms = [alarm for alarm in self.false_alarms if alarm[1] in ids]
        return replace(self, kills=chosen, false_alarms=alarms, full=False)

    def by_tier(self) -> dict[str, int]:
        """Mutants that each tier kills."""
        return dict(Counter(tier for checks in self.kills.values() for tier in {self.tiers[id] for id in checks}))

    def by_family(self) -> dict[str, int]:
        """Mutants that each family kills."""
        found = (family for checks in self.kills.values() for family in {self.families[id] for id in checks})
        return dict(Counter(found))

    def alone(self) -> dict[str, list[str]]:
        """Checks that are alone in killing a mutant."""
        found: dict[str, list[str]] = {}
        for name, checks in self.kills.items():
            if len(checks) == 1:
                found.setdefault(checks[0], []).append(name)
        return found

    def redundant_families(self) -> list[str]:
        """Families without which every killed mutant would still be killed."""
        return sorted(set(self.families.values()) - set(self.needed_families(self.families)))

    def needed_families(self, checks: Container[str]) -> dict[str, list[str]]:
        """Families to the mutants that they alone kill, where so many checks are all there is."""
        needed: dict[str, list[str]] = {}
        for name, killers in self.kills.items():
            families = {self.families[id] for id in killers if id in checks}
            if len(families) == 1:
                needed.setdefault(families.pop(), []).append(name)
        return needed

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
        """The score for machines."""
        return {
            "mode": "full" if self.full else "quick",
            "ok": self.ok,
            "planted": len(self.kills),
            "killed": self.killed,
            "required": self.required,
            "survivors": self.survivors,
            "correct_kernels": self.kernels,
            "panel": [vars(kernel) for kernel in self.panel],
            "false_alarms": [list(alarm) for alarm in self.false_alarms],
            "by_tier": self.by_tier(),
            "by_family": self.by_family(),
            "alone": self.alone(),
            "redundant_families": self.redundant_families(),
            "smallest_cover": self.smallest_cover(),
            "kills": self.kills,
            "crashes": self.crashes,
        }
