"""What shrinking tries: a check run with some of its knobs lowered.

A case of the catalogue has all knobs to lower. A relation or a closed form makes its own cases, so it gets a bench
that lowers their sizes; a probe, a statistic, keeps its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .bench import Bench
from .cases import Case
from .catalogue import CASES
from .fitting import fitted
from .problem import Problem
from .suite import Check, case_check, check_by_id
from .verdict import Verdict

# Sizes tried first, edges of chunks included.
SMALL = (0, 1, 2, 3, 4, 5, 8, 12, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65)
SMALL_ENOUGH = 8  # a size from which coarse steps save nothing
LEAST = {"T": 0, "past_end": 0}  # 1 for every other size
BENCH_SIZES = {
    "relation": ("B", "H", "group", "K", "V"),
    "limit": ("B", "T", "H", "group", "K", "V"),
    "probe": (),
}
PLAIN = {"state": "none", "gate": "zero"}

Knobs = dict[str, Any]


@dataclass(frozen=True)
class SizedBench(Bench):
    """A bench whose cases are at most so large, and that remembers the problems that it was asked for."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    seen: list[Problem] = field(default_factory=list, compare=False)

    def case(self, **knobs: object) -> Case:
        case = super().case(**knobs)
        lowered: Knobs = {name: min(getattr(case, name), size) for name, size in self.sizes.items()}
        return fitted(replace(case, **lowered), self.caps, self.contract)

    def problem(self, case: Case, x: Any = None) -> Problem:
        problem = super().problem(case, x)
        self.seen.append(problem)
        return problem


@dataclass(frozen=True)
class Smallest:
    """The smallest failure found: `case` of a case, or the `sizes` that a check of another kind is held to.

    reduced: it is smaller than the input that failed first
    """

    case: Case | None
    sizes: dict[str, int]
    verdict: Verdict
    tried: int
    seconds: float
    reduced: bool

    def __str__(self) -> str:
        knobs = case_knobs(self.case) if self.case is not None else self.sizes
        return ", ".join(f"{name}={value}" for name, value in knobs.items())


def case_knobs(case: Case) -> Knobs:
    """The sizes of a case, and its draws."""
    names = ("B", "T") if case.lengths is None else ("lengths", "past_end")
    shown = (*names, "H", "group", "K", "V", "gate", "keys", "beta", "values", "state")
    return {name: getattr(case, name) for name in shown}


def case_of(id: str) -> Case | None:
    """The catalogue's case of that id; None for a check of another kind."""
    return next((case for case in CASES if case.id == id), None)


def trial_of(id: str, bench: Bench) -> Trial:
    """The trial of a check by its id."""
    case = case_of(id)
    if case is not None:
        return CaseTrial(fitted(case, bench.caps, bench.contract), bench)
    return CheckTrial(check_by_id(id), bench)


class Trial:
    """Runs a check with changed knobs."""

    def start(self) -> Knobs:
        raise NotImplementedError

    def verdict(self, knobs: Knobs) -> Verdict:
        raise NotImplementedError

    def hints(self, verdict: Verdict) -> Iterable[Knobs]:
        """Knobs that the place of the failure suggests."""
        return ()

    def rounds(self, knobs: Knobs) -> Iterable[tuple[str, ...]]:
        """The knobs that can be lowered, the most telling first; sizes before what can go."""
        raise NotImplementedError

    def smaller(self, name: str, knobs: Knobs) -> Iterator[Knobs]:
        """Candidates with that knob lowered."""
        raise NotImplementedError

    def smallest(self, knobs: Knobs, verdict: Verdict, tried: int, seconds: float) -> Smallest:
        raise NotImplementedError

    def failure(self, knobs: Knobs) -> Verdict | None:
        """The verdict, where it is a failure. A check that cannot take a size is no failure of the kernel."""
        try:
            verdict = self.verdict(knobs)
        except Exception:
            return None
        return verdict if verdict.failed else None


@dataclass
class CaseTrial(Trial):
    """A case of the catalogue; knobs are its own."""

    case: Case
    bench: Bench

    def start(self) -> Knobs:
        return {}

    def made(self, knobs: Knobs) -> Case:
        return fitted(replace(self.case, **knobs), self.bench.caps, self.bench.contract)

    def verdict(self, knobs: Knobs) -> Verdict:
        return case_check(self.made(knobs), price=False)(self.bench)

    def hints(self, verdict: Verdict) -> Iterable[Knobs]:
        """One sequence up to the first bad token."""
        place = verdict.place
        if place is None or place.segment is None or place.token_of_segment is None or place.result != "o":
            return ()
        length = place.token_of_segment + 1
        return ({"B": 1, "T": length},) if self.case.lengths is None else ({"lengths": (length,), "past_end": 0},)

    def rounds(self, knobs: Knobs) -> Iterable[tuple[str, ...]]:
        tokens = ("B", "T") if self.case.lengths is None else ("lengths", "past_end")
        sizes = (*tokens, "H", "group", "K", "V")
        return sizes, (*PLAIN, *sizes)

    def smaller(self, name: str, knobs: Knobs) -> Iterator[Knobs]:
        case = self.made(knobs)
        now = getattr(case, name)
        if name == "lengths":
            yield from ({**knobs, name: lengths} for lengths in _shorter(now))
        elif name in PLAIN:
            needed = now == PLAIN[name] or (name == "state" and case.has("gradients"))
            yield from () if needed else ({**knobs, name: PLAIN[name]},)
        else:
            found = ({**knobs, name: size} for size in _sizes(name, now))
            yield from (smaller for smaller in found if getattr(self.made(smaller), name) < now)

    def smallest(self, knobs: Knobs, verdict: Verdict, tried: int, seconds: float) -> Smallest:
        return Smallest(self.made(knobs), {}, verdict, tried, seconds, reduced=bool(knobs))


@dataclass
class CheckTrial(Trial):
    """A relation, a closed form or a probe; knobs are the largest sizes that it gets."""

    check: Check
    bench: Bench

    def sized(self, knobs: Knobs) -> SizedBench:
        return SizedBench(**vars(self.bench), sizes=knobs)

    def start(self) -> Knobs:
        """The largest sizes that the check asks for."""
        bench = self.sized({})
        self.check(bench)
        names = BENCH_SIZES.get(self.check.tier, ())
        cases = [problem.case for problem in bench.seen]
        return {name: max(int(getattr(case, name)) for case in cases) for name in names} if cases else {}

    def verdict(self, knobs: Knobs) -> Verdict:
        return self.check(self.sized(knobs))

    def rounds(self, knobs: Knobs) -> Iterable[tuple[str, ...]]:
        return (tuple(knobs),)

    def smaller(self, name: str, knobs: Knobs) -> Iterator[Knobs]:
        return ({**knobs, name: size} for size in _sizes(name, knobs[name]))

    def smallest(self, knobs: Knobs, verdict: Verdict, tried: int, seconds: float) -> Smallest:
        start = self.start()
        lowered = {name: size for name, size in knobs.items() if size < start[name]}
        return Smallest(None, lowered, verdict, tried, seconds, reduced=bool(lowered))


def _sizes(name: str, now: int) -> Iterator[int]:
    """Candidates below a size: coarse steps first, which make the next trials cheap, then the smallest and up."""
    coarse = [now // 4, now // 2] if now > SMALL_ENOUGH else []
    candidates = dict.fromkeys([*coarse, *sorted({*SMALL, now // 2, now - now // 4, now - 1})])
    return (n for n in candidates if LEAST.get(name, 1) <= n < now)


def _shorter(lengths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Fewer segments: one alone, each half, then one less; then shorter ones."""
    if len(lengths) > 1:
        yield from ((length,) for length in sorted(set(lengths)))
    if len(lengths) > 3:
        yield lengths[: len(lengths) // 2]
        yield lengths[len(lengths) // 2 :]
    if len(lengths) > 2:
        yield from (lengths[:n] + lengths[n + 1 :] for n in range(len(lengths)))
    for n, length in enumerate(lengths):
        yield from ((*lengths[:n], size, *lengths[n + 1 :]) for size in _sizes("T", length))
