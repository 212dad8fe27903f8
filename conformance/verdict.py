"""Verdicts: what one check of one kernel found, and where an error begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .adapter import GRADIENTS, Contract
from .envelope import error_ratio
from .gold import Results, envelopes_of, rows_of, truth_of
from .limits import FORWARD_RATIO, GRADIENT_RATIO
from .problem import Problem

PER_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")  # rows [B, T, heads]; the others are [N, heads, K]
FLAT = 1.3  # growth a token below which an error does not accumulate


@dataclass(frozen=True)
class Place:
    """The first bad row of a result, and how the error goes on from there."""

    result: str
    index: tuple[int, ...]
    ratio: float
    bad_rows: int
    rows: int
    heads: tuple[int, ...]
    ratio_before: float = 0.0
    growth: str = ""
    chunk_size: int | None = None

    def __str__(self) -> str:
        if self.result not in PER_TOKEN:
            n, head, channel = self.index
            return f"first bad row of {self.result}: segment {n}, head {head}, key channel {channel}"
        b, t, head = self.index
        chunk = f" (chunk {t // self.chunk_size}, row {t % self.chunk_size})" if self.chunk_size else ""
        return f"first bad row of {self.result}: batch {b}, token {t}{chunk}, head {head}"


@dataclass
class Verdict:
    """The outcome of one check. status: pass, fail, skip, acceptable or waived."""

    id: str
    tier: str
    status: str
    reason: str = ""
    ratios: dict[str, float] = field(default_factory=dict)
    limit: float = 0.0
    price: float | None = None
    place: Place | None = None
    contract: Contract | None = None

    @property
    def failed(self) -> bool:
        return self.status == "fail"

    @property
    def worst(self) -> float:
        return max(self.ratios.values(), default=0.0)


def limit_of(name: str) -> float:
    """The limit of a result's ratio."""
    return GRADIENT_RATIO if name in GRADIENTS else FORWARD_RATIO


def row_ratios(results: Results, problem: Problem) -> Results:
    """Each row's error over its envelope, for every result that has a truth."""
    truth, bounds = truth_of(problem), envelopes_of(problem)
    return {
        name: error_ratio(rows_of(got, name), rows_of(truth[name], name), bounds[name])
        for name, got in results.items()
        if name in truth and got.numel()
    }


def judge_by_ratio(results: Results, problem: Problem, id: str, tier: str, price: bool = False) -> Verdict:
    """The verdict of the worst row of each result; its place, where it is too large."""
    rows = row_ratios(results, problem)
    ratios = {name: ratio.max().item() for name, ratio in rows.items()}
    over = [name for name in rows if not ratios[name] <= limit_of(name)]
    verdict = Verdict(id, tier, "fail" if over else "pass", ratios=ratios, contract=problem.contract)
    verdict.limit = max((limit_of(name) for name in rows), default=FORWARD_RATIO)
    if over:
        worst = max(over, key=lambda name: ratios[name] / limit_of(name))
        verdict.place = locate(rows[worst], worst, limit_of(worst), problem)
        verdict.reason = f"{worst} is off by {ratios[worst]:.3g} roundings; the limit is {limit_of(worst):g}"
    if price and "o" in results and not problem.case.has("gradients"):
        verdict.price = _price(results, problem)
    return verdict


def judge_bits(results: Results, want: Results, problem: Problem, id: str, tier: str) -> Verdict:
    """The verdict without a tolerance; +0 and -0 are one number."""
    verdict = Verdict(id, tier, "pass", contract=problem.contract)
    for name, expected in want.items():
        got = results[name].double()
        different = ~((got == expected) | (got.isnan() & expected.isnan()))
        if different.any() and verdict.place is None:
            rows = rows_of(different, name).any(-1)
            verdict.status = "fail"
            verdict.place = locate(rows.double() * torch.inf, name, 0.0, problem)
            at = tuple(different.nonzero()[0].tolist())
            verdict.reason = f"{name} differs in {int(different.sum())} of {different.numel()} elements; "
            verdict.reason += f"at {list(at)} it is {got[at].item():g}, and {expected[at].item():g} is exact"
    return verdict


def locate(ratio: Tensor, name: str, limit: float, problem: Problem) -> Place:
    """The first row over the limit: first in time where rows are tokens, else first in order."""
    ratio = torch.where(ratio.isnan(), torch.zeros_like(ratio), ratio)
    bad = ratio > limit
    heads = tuple(bad.any(dim=0).any(dim=0).nonzero().flatten().tolist()) if name in PER_TOKEN else ()
    if name not in PER_TOKEN:
        index = tuple(bad.nonzero()[0].tolist())
        return Place(name, index, ratio.max().item(), int(bad.sum()), bad.numel(), heads)
    by_time = bad.transpose(0, 1).nonzero()[0].tolist()
    t, b, head = by_time[0], by_time[1], by_time[2]
    before = ratio[:, :t].max().item() if t else 0.0
    return Place(
        name, (b, t, head), ratio.max().item(), int(bad.sum()), bad.numel(), heads,
        ratio_before=before,
        growth=growth_of(ratio.amax(dim=(0, 2))[t:].tolist()),
        chunk_size=problem.contract.chunk_size if problem.judge.offsets is None else None,
    )  # fmt: skip


def growth_of(ratios: Sequence[float]) -> str:
    """How an error goes on after its first bad token, in words."""
    finite = [r for r in ratios if 0 < r < float("inf")]
    if len(finite) < len([r for r in ratios if r > 0]):
        return "reaches inf or NaN"
    if len(finite) < 8:
        return "too few tokens to tell growth"
    quarter = len(finite) // 4
    first, last = max(finite[:quarter]), max(finite[-quarter:])
    gain = last / first
    if gain < 1 / FLAT:
        return f"fades (x{gain:.2g} from the first to the last quarter)"
    if gain <= FLAT:
        return "constant: not accumulation"
    middle = max(finite[len(finite) // 2 - quarter // 2 : len(finite) // 2 + quarter // 2 + 1])
    exponential = middle < (first + last) / 4  # a straight line has its mean in the middle
    kind = "exponential" if exponential else "linear" if gain > 2.5 else "like a square root"
    return f"grows, {kind} (x{gain:.2g} from the first to the last quarter)"


def _price(results: Results, problem: Problem) -> float:
    """ratio_rec: the error over the envelope of the plain recurrence, what the chosen algorithm costs."""
    truth, alone = truth_of(problem), envelopes_of(problem, recurrence_alone=True)
    ratio = error_ratio(results["o"], truth["o"], alone["o"])
    return ratio.max().item() if ratio.numel() else 0.0
