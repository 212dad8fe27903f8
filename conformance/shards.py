"""Several kernels judged at the same time, by a pool of processes and within a time.

Each process holds one kernel and takes its next check (under one contract) until none is left, then goes to the
kernel that would take longest. Verdicts go to a file a kernel, as `conformance run --resume` reads it. A check that
takes its process down fails, and costs no other: an error of CUDA counts as that too, because all that follows it
in the same process fails as well. What the time does not suffice for is reported as not run, never as passed.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .adapter import Adapter, BadAdapterError, Contract, checked_capabilities
from .as_json import as_json
from .bench import Bench
from .guard import KernelFailure
from .isolation import GRACE_SECONDS, Isolated
from .limits import CASE_SECONDS
from .record import Record
from .suite import Report, all_checks, benches, check_by_id, checked_identity, waived
from .tables import versions
from .verdict import Verdict

CASES_A_CHECK = 10  # a check makes several calls: so many times a case's seconds, then its process is killed
WORTH_A_START = 2  # checks left per process, below which another one would come too late
PAUSE_SECONDS = 0.1
CUDA_ERROR = re.compile(r"CUDA error|\[CUDA\]|CUDA_ERROR_|cudaError")
OUT_OF_TIME = "the time limit was reached"


@dataclass(frozen=True)
class Job:
    """A kernel to judge: as `load_adapter` takes it, how thoroughly, by which Python, and where verdicts are kept.

    `only`: some of its checks, by id. `configs`: how many of its configurations Triton's autotuner may try;
    None means all.
    """

    name: str
    where: str
    full: bool
    kept: Path
    python: str = sys.executable
    environment: Mapping[str, str] | None = None
    seconds: float = CASE_SECONDS
    configs: int | None = None
    only: tuple[str, ...] = ()


class Clock:
    """What is left of a time; None means no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.end = float("inf") if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self.end - time.monotonic())


class Judged:
    """A kernel under way: what it is, the checks that are left, and why it stopped, if it did."""

    def __init__(self, job: Job) -> None:
        self.job, self.record = job, Record(job.kept, job.where)
        self.checks = {check.id: check for check in all_checks(job.full) if not job.only or check.id in job.only}
        self.identity, self.problem = "", ""
        self.contracts: tuple[Contract, ...] = ()
        self.versions: dict[str, str] = {}
        self.left: deque[tuple[str, Contract]] = deque()
        self.workers, self.done, self.spent = 0, 0, 0.0
        self.lock, self.describing = threading.Lock(), threading.Lock()

    @property
    def finished(self) -> bool:
        return not self.workers and bool(self.identity or self.problem) and not self.left

    def seconds_left(self) -> float:
        """For one more process beside those at work; 0 where it would find nothing to do."""
        count = len(self.left) if self.identity or self.problem else len(self.checks)
        pace = self.spent / self.done if self.done else 1.0
        return pace * count / (self.workers + 1) if count > WORTH_A_START * self.workers else 0.0

    def work(self, clock: Clock) -> None:
        """Start a process and judge with it until nothing is left, the time is up, or a check takes it down."""
        job = self.job
        try:
            with closing(Isolated(job.where, job.seconds, None, job.python, job.environment)) as kernel:
                self._describe(kernel, clock)
                while (unit := self._next(clock)) and self._judge(kernel, unit, clock):
                    pass
        except Exception as error:  # no such package or GPU, a record of something else: the others go on
            told = isinstance(error, (BadAdapterError, KernelFailure, ValueError, OSError))
            self._stop(clock, str(error) if told else f"{type(error).__name__}: {error}")

    def report(self, waivers: dict[str, str]) -> dict[str, Any]:
        """As `as_json` writes it, in the order of an undivided run; with verdicts "not run" for what is missing."""
        known = self.record.known
        planned = [(id, contract) for contract in self.contracts for id in self.checks]
        found = [waived(known[unit], waivers) for unit in planned if unit in known]
        why = self.problem or OUT_OF_TIME
        missing = [unit for unit in planned if unit not in known]
        said = as_json(Report(self.identity, found, len(missing))) | {"versions": self.versions}
        rows = [_not_run(id, self.checks[id].tier, why) for id, _ in missing]
        return {**said, "verdicts": [*said["verdicts"], *rows]}

    def _describe(self, kernel: Isolated, clock: Clock) -> None:
        with self.describing:
            if self.identity or self.problem:
                return
            job = self.job
            limit = min(CASES_A_CHECK * job.seconds, clock.left)
            identity, self.contracts, self.versions = kernel.there(
                described, job.full, job.seconds, job.configs, seconds=limit
            )
            self.record.begin(identity)
            self.left.extend(unit for unit in self._in_order() if unit not in self.record.known)
            self.identity = identity

    def _in_order(self) -> Iterator[tuple[str, Contract]]:
        """Quick checks first, so that a run that is cut short has seen most; contracts of a check compile apart."""
        for check in sorted(self.checks.values(), key=lambda check: not check.quick):
            yield from ((check.id, contract) for contract in self.contracts)

    def _next(self, clock: Clock) -> tuple[str, Contract] | None:
        with self.lock:
            return self.left.popleft() if self.left and clock.left else None

    def _judge(self, kernel: Isolated, unit: tuple[str, Contract], clock: Clock) -> bool:
        """Judge a check; False where its process cannot be used any more."""
        job, started = self.job, time.monotonic()
        limit = min(CASES_A_CHECK * job.seconds, clock.left - GRACE_SECONDS)
        fit = False
        try:
            verdict, fit = kernel.there(judged, *unit, job.seconds, job.configs, seconds=max(0.0, limit))
        except KernelFailure as failure:
            if clock.left <= GRACE_SECONDS:
                self._put_back(unit)
                return False
            reason = str(failure) if str(failure).startswith("hangs") else f"crashed the process: {failure}"
            verdict = self._failed(unit, reason)
        except Exception as error:  # of the judge itself: one check is lost, and seen
            verdict = self._failed(unit, f"the judge raises {type(error).__name__}: {error}")
        with self.lock:
            self.record.keep(verdict, unit[1])
            self.done, self.spent = self.done + 1, self.spent + time.monotonic() - started
        return fit

    def _failed(self, unit: tuple[str, Contract], reason: str) -> Verdict:
        return Verdict(unit[0], self.checks[unit[0]].tier, "fail", reason, contract=unit[1])

    def _put_back(self, unit: tuple[str, Contract]) -> None:
        with self.lock:
            self.left.appendleft(unit)

    def _stop(self, clock: Clock, reason: str) -> None:
        with self.lock:
            self.problem = self.problem or (reason if clock.left else OUT_OF_TIME)
            self.left.clear()


def judge_jobs(jobs: Sequence[Job], workers: int, seconds: float | None = None) -> Iterator[Judged]:
    """Each kernel as soon as it is done with, or stopped; `seconds` are for all of them together."""
    clock, waiting, lock = Clock(seconds), [Judged(job) for job in jobs], threading.Lock()
    everyone = tuple(waiting)

    def serve() -> None:
        while clock.left and (chosen := _choose(everyone, lock)):
            try:
                chosen.work(clock)
            finally:
                with lock:
                    chosen.workers -= 1

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    while waiting:
        over = time.monotonic() > clock.end + GRACE_SECONDS or not any(thread.is_alive() for thread in threads)
        for one in [one for one in waiting if one.finished or over]:
            waiting.remove(one)
            one.problem = one.problem or ("" if one.identity else OUT_OF_TIME)
            yield one
        time.sleep(PAUSE_SECONDS)


def _choose(jobs: Sequence[Judged], lock: threading.Lock) -> Judged | None:
    """The kernel that would take longest, with one process more."""
    with lock:
        chosen = max(jobs, key=Judged.seconds_left)
        if not chosen.seconds_left():
            return None
        chosen.workers += 1
        return chosen


def described(
    adapter: Adapter, full: bool, seconds: float, configs: int | None
) -> tuple[str, tuple[Contract, ...], dict[str, str]]:
    """In the process of a kernel: its identity, the contracts to judge, and versions."""
    limit_autotuner(configs)
    found = benches(adapter, full, seconds)
    return checked_identity(adapter, found[0]), tuple(bench.contract for bench in found), versions()


def judged(
    adapter: Adapter, id: str, contract: Contract, seconds: float, configs: int | None
) -> tuple[Verdict, bool]:
    """In the process of a kernel: the verdict of one check, and whether the process is fit for another."""
    limit_autotuner(configs)
    check = check_by_id(id)
    verdict = check(Bench(adapter, checked_capabilities(adapter), contract, seconds))
    error = cuda_error(verdict)
    if not error:
        return verdict, True
    return Verdict(id, check.tier, "fail", f"crashed the process: {error}", contract=contract), False


def cuda_error(verdict: Verdict) -> str:
    """An error of CUDA in this process, which the check met or left behind; or nothing."""
    if verdict.failed and CUDA_ERROR.search(verdict.reason):
        return verdict.reason
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return f"leaves behind {str(error).splitlines()[0]}"
    return ""


@functools.cache
def limit_autotuner(configs: int | None) -> None:
    """From now on Triton's autotuner tries only the first configurations of each kernel, in this process."""
    if configs is None:
        return
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def first(self: Any, *arguments: Any, **options: Any) -> Any:
        return list(prune(self, *arguments, **options))[:configs]

    Autotuner.prune_configs = first


def _not_run(id: str, tier: str, why: str) -> dict[str, Any]:
    return {"id": id, "tier": tier, "status": "not run", "reason": why, "ratios": {}, "limit": 0.0}
