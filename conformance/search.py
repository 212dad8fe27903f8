"""Search for inputs that a kernel gets wrong, where the catalogue ends: `kimi-linear conformance run K --search 5`.

Hypothesis draws knobs, not tensors: how alike keys are, how fast the state decays, how strong writes are, sizes and
lengths. It climbs towards a large log2 of the worst ratio, and shrinks what fails to the dullest case that still
does. A search of minutes finds what a kernel was not asked yet; it proves nothing about what it did not try.

    search(adapter, minutes) -> [Found(verdict, worst case, tries), ..]      one a contract
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapter import Adapter, Capabilities
from .bench import Bench
from .cases import Case
from .fitting import why_not
from .guard import KernelFailure, guarded_run
from .limits import CASE_SECONDS
from .problem import problem_of
from .suite import benches
from .verdict import Verdict, judge_by_ratio

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

ID = "search"
ROUND = 200  # examples between two looks at the clock; half of them climb
MAX_LOG2 = 100.0  # of a ratio: what is not finite counts as this
TYPICAL = Case(ID, ID, "what published tests draw", T=64, gate="mean_-1", keys="cosine_0", values="times_1")


@dataclass
class Found:
    """The outcome of a search: its worst case, the verdict on it, and how many cases were tried."""

    verdict: Verdict
    case: Case
    tries: int

    def __str__(self) -> str:
        word = "FAILS" if self.verdict.failed else "passes"
        ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.verdict.ratios.items())
        lines = [f"search, {self.tries} cases [{self.verdict.contract}]: the worst {word} ({ratios or 'no result'})"]
        lines += [f"  {self.verdict.reason}"] if self.verdict.reason else []
        return "\n".join([*lines, f"  {code_of(self.case)}"])

    def as_json(self) -> dict[str, Any]:
        """The outcome for machines; the case as code."""
        finite = {name: r if math.isfinite(r) else "inf" for name, r in self.verdict.ratios.items()}
        known = {"status": self.verdict.status, "reason": self.verdict.reason, "contract": str(self.verdict.contract)}
        return {**known, "tries": self.tries, "ratios": finite, "case": code_of(self.case)}


def code_of(case: Case) -> str:
    """The case as the Python expression that makes it."""
    plain = {"id", "family", "comment"}
    knobs = [f for f in fields(case) if f.name not in plain and getattr(case, f.name) != f.default]
    said = "".join(f", {f.name}={getattr(case, f.name)!r}" for f in knobs)
    return f"Case({case.id!r}, {case.family!r}, {case.comment!r}{said})"


def search(
    adapter: Adapter,
    minutes: float,
    tell: Callable[[str], None] = lambda line: None,
    folder: Path | None = None,
    full: bool = True,
    tries: int | None = None,
    seconds: float = CASE_SECONDS,
) -> list[Found]:
    """Search under each contract for its share of the time, or for that many cases.

    folder: where examples are kept, failing ones first in the next search. Without one, every search is the same.
    Raises ImportError where hypothesis is missing.
    """
    found = benches(adapter, full, seconds)
    return [_Hunt(bench, minutes * 60 / len(found), tell, folder, tries).run() for bench in found]


@dataclass
class _Hunt:
    """One contract's search: verdicts by case, so that what failed once fails again while it is shrunk."""

    bench: Bench
    seconds: float
    tell: Callable[[str], None]
    folder: Path | None
    tries: int | None
    verdicts: dict[Case, Verdict] = field(default_factory=dict)
    minimal: Case | None = None
    end: float = math.inf

    def run(self) -> Found:
        """Rounds until something fails or the time is over; the first case is judged however short that is."""
        self.judge(TYPICAL)
        self.end = time.monotonic() + self.seconds
        number = 0
        while self.minimal is None and not self.over():
            self.round(number)
            number += 1
        case = self.minimal or max(self.verdicts, key=lambda case: log2_ratio(self.verdicts[case]))
        return Found(self.verdicts[case], case, len(self.verdicts))

    def round(self, number: int) -> None:
        """So many examples, from the folder's first; `minimal` is the shrunk failure, if there is one."""
        import hypothesis as h

        database = None if self.folder is None else h.database.DirectoryBasedExampleDatabase(self.folder)
        options = h.settings(
            max_examples=ROUND,
            deadline=None,
            database=database,
            derandomize=False,
            report_multiple_bugs=False,
            suppress_health_check=list(h.HealthCheck),
            verbosity=h.Verbosity.quiet,
        )

        @options
        @h.given(knobs(self.bench))
        def try_one(case: Case) -> None:
            verdict = self.judge(case)
            h.target(log2_ratio(verdict), label="log2 of the ratio")
            if verdict.failed:
                self.minimal = case  # the last one that hypothesis shows is the smallest
                raise _WrongError

        again = h.seed(number)(try_one) if self.folder is None else try_one  # a seed would leave the folder alone
        try:
            again()
        except _WrongError:
            return
        self.minimal = None

    def judge(self, case: Case) -> Verdict:
        """The verdict; what was not tried in time passes, and is not kept."""
        if case in self.verdicts:
            return self.verdicts[case]
        if self.over():
            return Verdict(ID, "search", "pass")
        verdict = verdict_on(case, self.bench)
        self.verdicts[case] = verdict
        self.tell(f"{len(self.verdicts)} cases tried ({self.bench.contract})")
        return verdict

    def over(self) -> bool:
        """Whether the time, or the number of cases, is used up."""
        return time.monotonic() > self.end or (self.tries is not None and len(self.verdicts) >= self.tries)


class _WrongError(Exception):
    """A case that fails, for hypothesis to shrink."""


def verdict_on(case: Case, bench: Bench) -> Verdict:
    """The verdict of one searched case, with the reason of a kernel that gives no result."""
    if why_not(case, bench.caps, bench.contract) is not None:
        return Verdict(ID, "search", "skip", contract=bench.contract)
    problem = problem_of(case, bench.caps, bench.contract)
    try:
        got = guarded_run(bench.adapter, problem, bench.caps, seconds=bench.seconds)
    except KernelFailure as error:
        return Verdict(ID, "search", "fail", str(error), contract=bench.contract)
    return judge_by_ratio(got, problem, ID, "search")


def log2_ratio(verdict: Verdict) -> float:
    """What is climbed: log2 of the worst ratio over its limit."""
    if verdict.failed and not verdict.ratios:
        return MAX_LOG2
    worst = verdict.worst
    return max(-MAX_LOG2, min(MAX_LOG2, math.log2(worst))) if worst > 0 else -MAX_LOG2


def knobs(bench: Bench) -> SearchStrategy[Case]:
    """Cases for a kernel, from dull to odd: each knob shrinks towards what published tests draw."""
    from hypothesis import strategies as st

    caps, C = bench.caps, bench.contract.chunk_size or 32
    size = 6 if bench.half else 10
    return st.builds(
        _case,
        T=st.integers(1, 2 * C + 5),
        lengths=_lengths(caps, C),
        B=st.integers(1, 2),
        H=st.integers(1, 2),
        group=st.integers(1, 2),
        K=st.sampled_from(caps.K or (16, 4, 24, 33, 64)),
        V=st.sampled_from(caps.V or (16, 4, 20, 40)),
        gate=st.integers(-12, 5).map(lambda n: f"mean_{-(2.0**n):g}"),
        keys=_keys(),
        queries=st.sampled_from(("random", "positive")),
        beta=st.sampled_from(_betas(caps)),
        values=st.integers(-size, size).map(lambda n: f"times_{2.0**n:g}"),
        state=st.sampled_from(("none", "random")),
        seed=st.integers(1, 999),
        backward=st.booleans() if "backward" in caps.operations else st.just(False),
    )


def _case(backward: bool, lengths: tuple[int, ...] | None, B: int, **rest: Any) -> Case:
    flags = ("gradients",) if backward else ()
    return Case(ID, ID, "found by search", flags=flags, lengths=lengths, B=1 if lengths else B, **rest)


def _keys() -> SearchStrategy[str]:
    """Cosines 1 - 2^-n, the same with signs, and runs of equal tokens."""
    from hypothesis import strategies as st

    cosines = st.integers(0, 12).map(lambda n: f"cosine_{1 - 2.0**-n:g}")
    flipped = st.integers(0, 12).map(lambda n: f"flipped_{1 - 2.0**-n:g}")
    return st.one_of(cosines, flipped, st.integers(2, 16).map(lambda n: f"runs_{n}"))


def _betas(caps: Capabilities) -> list[str]:
    above = ("up_to_two", "two") if caps.beta_above_one else ()
    return ["uniform", "constant_0.5", "constant_0.9", "constant_0.99", "one", *above]


def _lengths(caps: Capabilities, C: int) -> SearchStrategy[tuple[int, ...] | None]:
    """No packing, or up to four segments, empty ones among them."""
    from hypothesis import strategies as st

    packed = st.lists(st.integers(0, C + 1), min_size=1, max_size=4).map(tuple)
    return st.one_of(st.none(), packed) if caps.packed else st.none()
