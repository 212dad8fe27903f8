"""The part of `kimi-linear verify` that runs the quick conformance suite on our own tiers, in processes beside it.

One row a family of checks. A kernel's checks are split over several processes where there are cores for them. The
naive tier is spared the cases by ratio: their truth is its own code in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

import torch

from ..conformance.adapter import load_adapter
from ..conformance.suite import all_checks, run_suite
from ..conformance.verdict import Verdict
from .rows import Row
from .verify_beside import cores

ADAPTERS = "kimi_linear.conformance.adapters"
ALL = ("exact", "relation", "limit", "ratio", "probe")
TIERS_OF_CHECKS = {"chunked": ALL, "naive": ("exact", "relation", "limit", "probe")}

Rows = Callable[[Callable[[str], None]], Iterator[Row]]


@contextmanager
def suite_in_background() -> Iterator[Rows]:
    """Start the suite; gives a function that waits for its rows and tells a progress which kernel is next."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for a core that another process has cost more than they bring
    parts = max(1, cores() // (2 * len(TIERS_OF_CHECKS)))
    with ProcessPoolExecutor(parts * len(TIERS_OF_CHECKS), get_context("spawn")) as pool:
        futures = {
            name: [pool.submit(verdicts_of, name, tiers, part, parts) for part in range(parts)]
            for name, tiers in TIERS_OF_CHECKS.items()
        }
        try:
            yield lambda progress: _rows(futures, progress)
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


def verdicts_of(name: str, tiers: tuple[str, ...], part: int = 0, parts: int = 1) -> list[Verdict]:
    """The quick suite on a shipped adapter, under its first contract: every parts-th check, from `part` on."""
    torch.set_num_threads(1)
    ids = [check.id for check in all_checks(full=False) if check.tier in tiers][part::parts]
    return run_suite(load_adapter(f"{ADAPTERS}.{name}"), full=False, only=ids).verdicts


def family_rows(name: str, verdicts: list[Verdict]) -> Iterator[Row]:
    """A row a family: its worst ratio and that one's limit; 0 and 0 where bits are compared."""
    families = {check.id: check.family for check in all_checks(full=False)}
    judged = [verdict for verdict in verdicts if verdict.status in ("pass", "fail")]
    for family in dict.fromkeys(families[verdict.id] for verdict in judged):
        members = [verdict for verdict in judged if families[verdict.id] == family]
        worst = max(members, key=lambda verdict: verdict.worst / (verdict.limit or 1.0))
        failed = [verdict for verdict in members if verdict.failed]
        tier = f"{name}, {len(members)} check{'s' if members[1:] else ''}"
        yield Row(f"suite, {family}", tier, worst.worst, worst.limit, ok=not failed)


def in_order(parts: list[list[Verdict]]) -> list[Verdict]:
    """The verdicts of all parts, in the order of the suite."""
    place = {check.id: number for number, check in enumerate(all_checks(full=False))}
    return sorted((verdict for part in parts for verdict in part), key=lambda verdict: place[verdict.id])


def _rows(futures: dict[str, list[Future[list[Verdict]]]], progress: Callable[[str], None]) -> Iterator[Row]:
    for name, parts in futures.items():
        progress(f"conformance suite: {name}")
        yield from family_rows(name, in_order([part.result() for part in parts]))
