"""How good the judge is: bugs planted in emulated kernels, and correct kernels that must pass.

    score = killed / planted, void if a correct kernel fails anything

A mutant is killed by a check that fails it and passes the same kernel without the bug; a check in which it crashes
does not count. Mutants that nothing kills are listed by name, and so are checks without which the suite would kill
as much.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import Any

import torch

from .adapter import RESULTS
from .bench import Bench
from .emulated import Emulated
from .guard import CRASH
from .limits import FULL_KILLED, QUICK_KILLED
from .mutants import MUTANTS, Mutant, build
from .mutants.registry import BASES
from .panel import panel
from .suite import Check, all_checks
from .verdict import Verdict

Tell = Callable[[str], None]


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


def steps(mutants: Sequence[Mutant] = MUTANTS, kernels: Sequence[Emulated] | None = None) -> int:
    """How many lines `measure` tells."""
    return len(judged_kernels(mutants, panel() if kernels is None else kernels)) + len(mutants)


def measure(
    mutants: Sequence[Mutant] = MUTANTS,
    kernels: Sequence[Emulated] | None = None,
    full: bool = True,
    first_kill: bool = False,
    tell: Tell = lambda line: None,
    workers: int = 1,
) -> Score:
    """Judge correct kernels, then every mutant; `first_kill` stops at a mutant's first kill."""
    kernels = panel() if kernels is None else kernels
    checks = all_checks(full)
    score = Score(full=full, kernels=len(kernels))
    score.tiers = {check.id: check.tier for check in checks}
    score.families = {check.id: check.family for check in checks}
    correct = judged_kernels(mutants, kernels)
    with in_processes(workers) as run:
        found = run(_verdicts, [(kernel, full) for kernel in correct.values()])
        verdicts = dict(told(found, correct, tell))
        for kernel in kernels:
            _enter_kernel(score, kernel.identity(), verdicts[kernel.identity()])
        innocent = {mutant.on: _passed(verdicts[BASES[mutant.on]().identity()]) for mutant in mutants}
        tasks = [(mutant, innocent[mutant.on], full, first_kill) for mutant in mutants]
        for name, (kills, crashes) in told(run(_kills, tasks), [mutant.name for mutant in mutants], tell):
            score.kills[name] = kills
            if crashes:
                score.crashes[name] = crashes
    return score


def judged_kernels(mutants: Sequence[Mutant], kernels: Sequence[Emulated]) -> dict[str, Emulated]:
    """The correct kernels by identity, and those that mutants are planted in."""
    bases = [BASES[on]() for on in dict.fromkeys(mutant.on for mutant in mutants)]
    return {kernel.identity(): kernel for kernel in (*kernels, *bases)}


Run = Callable[[Callable[..., Any], list[tuple[Any, ...]]], Iterable[Any]]


@contextmanager
def in_processes(workers: int) -> Iterator[Run]:
    """A function that runs work on each task, in order, in this process or in several."""
    if workers <= 1:
        yield lambda work, tasks: (work(*task) for task in tasks)
        return
    context, one_thread = get_context("spawn"), functools.partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=one_thread) as pool:
        yield lambda work, tasks: pool.map(work, *zip(*tasks, strict=True)) if tasks else iter(())


def told(results: Iterable[Any], names: Iterable[str], tell: Tell) -> Iterator[tuple[str, Any]]:
    """Results with their names, each told as it comes."""
    for name, result in zip(names, results, strict=True):
        tell(name)
        yield name, result


@functools.cache
def _checks(full: bool) -> list[Check]:
    return all_checks(full)


def _verdicts(kernel: Emulated, full: bool) -> list[Verdict]:
    """What every check says of a kernel."""
    bench = Bench(kernel, kernel.capabilities(), kernel.contract)
    return [check(bench) for check in _checks(full)]


def _enter_kernel(score: Score, identity: str, verdicts: Sequence[Verdict]) -> None:
    score.false_alarms += [(identity, verdict.id, verdict.reason) for verdict in verdicts if verdict.failed]
    ratios = [
        (n, r) for v in verdicts if v.tier in ("ratio", "limit") and v.status == "pass" for n, r in v.ratios.items()
    ]
    score.panel.append(
        KernelScore(
            identity,
            passed=len(_passed(verdicts)),
            skipped=sum(verdict.status == "skip" for verdict in verdicts),
            forward=max((ratio for name, ratio in ratios if name in RESULTS), default=0.0),
            backward=max((ratio for name, ratio in ratios if name not in RESULTS), default=0.0),
        )
    )


def _passed(verdicts: Sequence[Verdict]) -> set[str]:
    return {verdict.id for verdict in verdicts if verdict.status == "pass"}


def _kills(mutant: Mutant, usable: set[str], full: bool, first_kill: bool) -> tuple[list[str], list[str]]:
    """The checks that fail a mutant, and those in which it crashes."""
    kernel = build(mutant)
    bench = Bench(kernel, kernel.capabilities(), kernel.contract)
    kills: list[str] = []
    crashes: list[str] = []
    for check in _checks(full):
        verdict = check(bench) if check.id in usable else None
        if verdict is not None and verdict.failed:
            (crashes if verdict.reason.startswith(CRASH) else kills).append(check.id)
            if first_kill and kills:
                break
    return kills, crashes
