"""Measuring the score: every check on every correct kernel, then on every mutant, in one process or in several."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

from .adapter import RESULTS
from .bench import Bench
from .emulated import Emulated
from .guard import CRASH
from .mutants import MUTANTS, Mutant, build
from .mutants.registry import BASES
from .panel import panel
from .score import KernelScore, Score
from .score_record import Found, ScoreRecord
from .suite import Check, all_checks
from .verdict import Verdict

Tell = Callable[[str], None]
Run = Callable[[Callable[..., Any], list[tuple[Any, ...]]], Iterable[Any]]


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
    record: ScoreRecord | None = None,
) -> Score:
    """Judge correct kernels, then every mutant; `first_kill` stops at a mutant's first kill.

    What the record knows is not measured again.
    """
    kernels = panel() if kernels is None else kernels
    record = record or ScoreRecord()
    record.begin(full)
    checks = all_checks(full)
    score = Score(full=full, kernels=len(kernels))
    score.tiers = {check.id: check.tier for check in checks}
    score.families = {check.id: check.family for check in checks}
    correct = {name: (kernel, full) for name, kernel in judged_kernels(mutants, kernels).items()}
    with in_processes(workers) as run:
        judged = recorded(run, record, tell, judge_correct, correct)
        passed = {on: set(judged[BASES[on]().identity()]["passed"]) for on in {mutant.on for mutant in mutants}}
        by_base = sorted(mutants, key=lambda mutant: str(BASES[mutant.on]().contract))  # its envelopes are at hand
        tasks = {mutant.name: (mutant, passed[mutant.on], full, first_kill) for mutant in by_base}
        killed = recorded(run, record, tell, judge_mutant, tasks)
    for kernel in kernels:
        enter_kernel(score, kernel.identity(), judged[kernel.identity()])
    score.kills = {mutant.name: killed[mutant.name]["kills"] for mutant in mutants}
    score.crashes = {name: found["crashes"] for name, found in killed.items() if found["crashes"]}
    return score


def judged_kernels(mutants: Sequence[Mutant], kernels: Sequence[Emulated]) -> dict[str, Emulated]:
    """The correct kernels by identity, and those that mutants are planted in."""
    bases = [BASES[on]() for on in dict.fromkeys(mutant.on for mutant in mutants)]
    return {kernel.identity(): kernel for kernel in (*kernels, *bases)}


@contextmanager
def in_processes(workers: int) -> Iterator[Run]:
    """A function that runs work on each task, in order, in this process or in several."""
    if workers <= 1:
        yield lambda work, tasks: (work(*task) for task in tasks)
        return
    context, one_thread = get_context("spawn"), functools.partial(torch.set_num_threads, 1)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=one_thread) as pool:
        yield lambda work, tasks: pool.map(work, *zip(*tasks, strict=True)) if tasks else iter(())


def recorded(
    run: Run,
    record: ScoreRecord,
    tell: Tell,
    work: Callable[..., Found],
    tasks: Mapping[str, tuple[Any, ...]],
) -> dict[str, Found]:
    """What was found of each task by its name, each told and kept as it comes."""
    left = {name: task for name, task in tasks.items() if name not in record.known}
    for name in tasks:
        if name in record.known:
            tell(name)
    for name, found in zip(left, run(work, list(left.values())), strict=True):
        record.keep(name, found)
        tell(name)
    return {name: record.known[name] for name in tasks}


@functools.cache
def _checks(full: bool) -> list[Check]:
    return all_checks(full, price=False)


def judge_correct(kernel: Emulated, full: bool) -> Found:
    """Of a kernel that is correct: what passed, false alarms with reasons, and its worst ratios."""
    bench = Bench(kernel, kernel.capabilities(), kernel.contract)
    verdicts = [check(bench) for check in _checks(full)]
    return {
        "passed": [verdict.id for verdict in verdicts if verdict.status == "pass"],
        "alarms": [[verdict.id, verdict.reason] for verdict in verdicts if verdict.failed],
        "skipped": sum(verdict.status == "skip" for verdict in verdicts),
        **worst_ratios(verdicts),
    }


def worst_ratios(verdicts: Iterable[Verdict]) -> dict[str, float]:
    """The worst ratio of the checks that passed, of outputs and states and of gradients."""
    judged = [v for v in verdicts if v.tier in ("ratio", "limit") and v.status == "pass"]
    ratios = [(name, ratio) for verdict in judged for name, ratio in verdict.ratios.items()]
    return {
        "forward": max((ratio for name, ratio in ratios if name in RESULTS), default=0.0),
        "backward": max((ratio for name, ratio in ratios if name not in RESULTS), default=0.0),
    }


def enter_kernel(score: Score, identity: str, found: Found) -> None:
    """Put a correct kernel down in the score."""
    score.false_alarms += [(identity, check, reason) for check, reason in found["alarms"]]
    ratios = {name: found[name] for name in ("forward", "backward")}
    score.panel.append(KernelScore(identity, len(found["passed"]), found["skipped"], **ratios))


def judge_mutant(mutant: Mutant, usable: set[str], full: bool, first_kill: bool) -> Found:
    """The checks that fail a mutant, of those that pass the kernel without it, and those in which it crashes."""
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
    return {"kills": kills, "crashes": crashes}
