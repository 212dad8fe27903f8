"""Verdicts: what one check of one kernel found, and where an error begins."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from .adapter import GRADIENTS, PARAMETER_GRADIENTS, Contract
from .envelope import error_ratio
from .gold import Results, envelopes_of, rows_of, truth_of
from .limits import FORWARD_RATIO, GRADIENT_RATIO, word_for
from .place import PER_TOKEN, Place, locate
from .problem import Problem

# In the order in which a kernel computes them: the first wrong one is the nearest to the fault
DERIVED = ("o", "final_state", "dq", "dv", "dbeta", "dk", "dg", "dh0", "ddt_bias", "dA_log")


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


def summary_line(verdict: Verdict) -> str:
    """One verdict in one line, with its ratios, also where it passes."""
    ratios = ", ".join(f"{name} {ratio:.2f}" for name, ratio in verdict.ratios.items())
    word = f" ({word_for(verdict.worst, verdict.limit)})" if verdict.tier in ("ratio", "limit") and ratios else ""
    price = "" if verdict.price is None else f", ratio_rec {verdict.price:.2f}"
    reason = f": {verdict.reason}" if verdict.reason else ""
    return f"{verdict.status.upper():10} {verdict.id:28} {ratios}{price}{word}{reason}"


def limit_of(name: str) -> float:
    """The limit of a result's ratio."""
    return GRADIENT_RATIO if name in (*GRADIENTS, *PARAMETER_GRADIENTS) else FORWARD_RATIO


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
        first = min(over, key=DERIVED.index)
        errors = errors_by_channel(results[first], first, problem)
        verdict.place = locate(rows[first], first, limit_of(first), problem, errors)
        verdict.reason = _too_far(first, results[first], ratios[first])
    if price and "o" in results and not problem.case.has("gradients"):
        verdict.price = _price(results, problem)
    return verdict


def errors_by_channel(got: Tensor, name: str, problem: Problem) -> Tensor:
    """Each element's error over the envelope of its row."""
    error = (rows_of(got, name).double() - rows_of(truth_of(problem)[name], name)).abs()
    return error / envelopes_of(problem)[name][..., None].clamp(min=torch.finfo(torch.float64).tiny)


def _too_far(name: str, got: Tensor, ratio: float) -> str:
    odd = ~got.isfinite()
    if odd.any():
        at = first_element(odd, name)
        return f"{name} is {got[at].item():g} at {list(at)}, {int(odd.sum())} of {got.numel()} elements"
    return f"{name} is off by {ratio:.3g} roundings; the limit is {limit_of(name):g}"


def first_element(odd: Tensor, name: str) -> tuple[int, ...]:
    """The first true element: in time, where dimension 1 is tokens."""
    if name not in PER_TOKEN:
        return tuple(odd.nonzero()[0].tolist())
    t, b, *rest = odd.transpose(0, 1).nonzero()[0].tolist()
    return b, t, *rest


def judge_bits(results: Results, want: Results, problem: Problem, id: str, tier: str) -> Verdict:
    """The verdict without a tolerance; +0 and -0 are one number."""
    verdict = Verdict(id, tier, "pass", contract=problem.contract)
    for name, expected in want.items():
        got = results[name].double()
        different = ~((got == expected) | (got.isnan() & expected.isnan()))
        if different.any() and verdict.place is None:
            rows = rows_of(different, name).any(-1)
            verdict.status = "fail"
            verdict.place = locate(rows.double() * torch.inf, name, 0.0, problem, rows_of(different, name).double())
            at = first_element(different, name)
            verdict.reason = f"{name} differs in {int(different.sum())} of {different.numel()} elements; "
            verdict.reason += f"at {list(at)} it is {got[at].item():g}, and {expected[at].item():g} is exact"
    return verdict


def _price(results: Results, problem: Problem) -> float:
    """ratio_rec: the error over the envelope of the plain recurrence, what the chosen algorithm costs."""
    truth, alone = truth_of(problem), envelopes_of(problem, recurrence_alone=True)
    ratio = error_ratio(results["o"], truth["o"], alone["o"])
    return ratio.max().item() if ratio.numel() else 0.0
