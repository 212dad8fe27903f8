"""Making a failing input smaller, as property testing does: the smallest one that still fails alike.

Sizes are lowered one by one, in coarse steps and then to the smallest, for as long as the check fails in the same
result; a state and a gate go where the failure does not need them. The first trial ends where the first bad row was.

Rows of one channel have coarse statistics, so a smaller failure counts only where it is as clear as the first, and
where a kernel known to be correct, under the same contract, passes.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .bench import Bench
from .emulated import Emulated, EmulatedRecurrent
from .trials import Knobs, Smallest, Trial, trial_of
from .verdict import Verdict

SHRINK_SECONDS = 8.0  # a failure; the search stops where it is
TRIAL_SECONDS = 5.0  # a kernel that hangs on a smaller case is no smaller failure
CLEAR = 4.0  # times the limit: a failure that is clearer than this may lose some of it


def shrink(verdict: Verdict, bench: Bench, seconds: float = SHRINK_SECONDS) -> Smallest | None:
    """The smallest input on which the check fails in the same result; None where it does not fail again."""
    bench = replace(bench, seconds=min(bench.seconds, TRIAL_SECONDS))
    trial, control = (trial_of(verdict.id, each) for each in (bench, _control(bench)))
    search = _Search(trial, control, clearness(verdict), time.monotonic() + seconds)
    knobs = trial.start()
    best = trial.failure(knobs)
    if best is None or likeness(best) != likeness(verdict):
        return None
    if "hangs" not in verdict.reason:
        knobs, best = search.run(knobs, best)
    return trial.smallest(knobs, best, search.tried, time.monotonic() - search.started)


def _control(bench: Bench) -> Bench:
    """A correct kernel of the same contract."""
    contract = bench.contract
    kernel = Emulated(contract) if contract.chunk_size is not None else EmulatedRecurrent(contract)
    return Bench(kernel, kernel.capabilities(), contract)


def clearness(verdict: Verdict) -> float:
    """The worst row over its limit; infinite where no ratio decides."""
    if verdict.place is None or verdict.tier not in ("ratio", "limit"):
        return math.inf
    return verdict.place.ratio / verdict.limit


def likeness(verdict: Verdict) -> tuple[object, ...]:
    """What failures of one bug have in common: the result that is wrong, or the words without numbers."""
    if verdict.place is not None:
        return verdict.tier, verdict.place.result, verdict.place.law == "not finite"
    return verdict.tier, re.sub(r"[-+]?[\d.]+(e[-+]?\d+)?|\b(nan|inf)\b", "#", verdict.reason)[:80]


@dataclass
class _Search:
    """Knob after knob lowered, and again until nothing gets smaller or the time is up."""

    trial: Trial
    control: Trial
    clear_enough: float
    deadline: float
    tried: int = 0
    started: float = field(default_factory=time.monotonic)

    def run(self, knobs: Knobs, best: Verdict) -> tuple[Knobs, Verdict]:
        knobs, best = self.first_of(self.trial.hints(best), knobs, best)
        for names in self.trial.rounds(knobs):
            before = None
            while knobs != before:
                before = knobs
                for name in names:
                    knobs, best = self.first_of(self.trial.smaller(name, knobs), knobs, best)
        return knobs, best

    def first_of(self, candidates: Iterable[Knobs], knobs: Knobs, best: Verdict) -> tuple[Knobs, Verdict]:
        """The first candidate that fails alike, or what there is."""
        for smaller in candidates:
            if time.monotonic() > self.deadline:
                break
            self.tried += 1
            found = self.trial.failure(smaller)
            if found is not None and likeness(found) == likeness(best) and self.is_clear(found, smaller):
                return smaller, found
        return knobs, best

    def is_clear(self, found: Verdict, knobs: Knobs) -> bool:
        """Whether the failure is the kernel's, and no accident of small numbers."""
        innocent = self.control.failure(knobs) is None
        return innocent and clearness(found) >= min(self.clear_enough, CLEAR)
