"""Limits in which KDA is something simpler, and splits: judged by ratio.

The truth here comes from another formula than the recurrence, or from no formula at all, so that an error of the
reference itself would show. Limits are the rounding envelopes of the case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .bench import Bench, changed, joined, tokens
from .cases import Case, Tensors
from .envelope import error_ratio
from .gold import Results, envelopes_of, rows_of
from .guard import guarded_run
from .limits import FORWARD_RATIO
from .place import locate
from .problem import Problem
from .verdict import Verdict, judge_by_ratio, limit_of


@dataclass(frozen=True)
class ClosedForm:
    """A check by ratio: its case, and what it compares."""

    id: str
    catches: str
    knobs: dict[str, object]
    judge: Callable[[Bench, Case, str], Verdict]
    needs: str = ""

    def __call__(self, bench: Bench) -> Verdict:
        return self.judge(bench, bench.case(**self.knobs), self.id)


CLOSED_FORMS: list[ClosedForm] = []
Judge = Callable[[Bench, Case, str], Verdict]


def closed_form(id: str, catches: str, needs: str = "", **knobs: object) -> Callable[[Judge], Judge]:
    """Add a check to CLOSED_FORMS."""

    def add(judge: Judge) -> Judge:
        CLOSED_FORMS.append(ClosedForm(f"limit.{id}", catches, knobs, judge, needs))
        return judge

    return add


def against(want: Results, got: Results, problem: Problem, id: str) -> Verdict:
    """The verdict of results against a truth of their own, with the envelopes of the problem."""
    bounds = envelopes_of(problem)
    rows = {name: error_ratio(rows_of(got[name], name), want[name], bounds[name]) for name in want}
    ratios = {name: ratio.max().item() for name, ratio in rows.items()}
    verdict = Verdict(id, "limit", "pass", ratios=ratios, limit=FORWARD_RATIO, contract=problem.contract)
    for name, ratio in ratios.items():
        if not ratio <= limit_of(name) and verdict.place is None:
            verdict.status, verdict.place = "fail", locate(rows[name], name, limit_of(name), problem)
            verdict.reason = f"{name} is off by {ratio:.3g} roundings; the limit is {limit_of(name):g}"
    return verdict


@closed_form("decay_only", "a decay that is lost, doubled or applied to the wrong channel", beta="zero", gate="mild")
def decay_only(bench: Bench, case: Case, id: str) -> Verdict:
    """beta = 0: S_T = exp(sum of g) h0."""
    problem = bench.problem(case)
    x = problem.judge
    assert x.h0 is not None
    got = guarded_run(bench.adapter, problem, bench.caps, seconds=bench.seconds)
    return against({"final_state": x.g.sum(1).exp()[..., None] * x.h0}, got, problem, id)


def transition_form(x: Tensors) -> Results:
    """Gated DeltaNet by its transition matrices, alpha (I - beta k k^T), one gate a token and head."""
    B, T, HV, V = x.v.shape
    K, group = x.q.shape[-1], HV // x.q.shape[2]
    q, k = (y.repeat_interleave(group, 2) for y in (x.q, x.k))
    S = torch.zeros(B, HV, K, V).double() if x.h0 is None else x.h0
    outputs = []
    for t in range(T):
        key, beta = k[:, t], x.beta[:, t, :, None, None]
        transition = torch.eye(K).double() - beta * key[..., :, None] * key[..., None, :]
        S = x.g[:, t, :, :1, None].exp() * (transition @ S) + beta * key[..., :, None] * x.v[:, t, :, None]
        outputs.append(x.scale * (q[:, t, :, None] @ S).squeeze(-2))
    return {"o": torch.stack(outputs, 1), "final_state": S}


def _as_transition(bench: Bench, case: Case, id: str) -> Verdict:
    problem = bench.problem(case)
    got = guarded_run(bench.adapter, problem, bench.caps, seconds=bench.seconds)
    return against(transition_form(problem.judge), got, problem, id)


@closed_form("gated_deltanet", "a gate applied twice, or to the prediction only", gate="constant_per_token")
def gated_deltanet(bench: Bench, case: Case, id: str) -> Verdict:
    """One gate for all key channels: Gated DeltaNet, by its transition matrices."""
    return _as_transition(bench, case, id)


@closed_form("deltanet", "a gate where there is none", gate="zero", T="C+3")
def deltanet(bench: Bench, case: Case, id: str) -> Verdict:
    """No gate: DeltaNet, by its transition matrices."""
    return _as_transition(bench, case, id)


@closed_form("reflection", "a beta that is clamped to 1", "above_one", gate="zero", beta="two", values="zero", T=40)
def reflection(bench: Bench, case: Case, id: str) -> Verdict:
    """beta = 2, unit keys, v = 0: a product of reflections."""
    return _as_transition(bench, case, id)


@closed_form("no_op_tail", "padding that decays or writes", T="C+5")
def no_op_tail(bench: Bench, case: Case, id: str) -> Verdict:
    """Tokens with beta = 0 and g = 0 at the end leave the state as it was."""
    x = bench.inputs(case)
    nothing = tokens(x, slice(0, 9))
    nothing = changed(nothing, g=torch.zeros_like(nothing.g), beta=torch.zeros_like(nothing.beta))
    got = bench.run(case, joined(x, nothing))
    return judge_by_ratio({"final_state": got["final_state"]}, bench.problem(case, x), id, "limit")


@closed_form("split", "a state that is lost, stale or rounded between calls", T="2C+5")
def split(bench: Bench, case: Case, id: str) -> Verdict:
    """Two calls joined by the state are one call, wherever the cut."""
    x, whole = bench.inputs(case), bench.problem(case)
    verdicts = []
    for cut in (1, bench.C - 1, bench.C, bench.C + 1):
        first = bench.run(case, tokens(x, slice(0, cut)))
        rest = changed(tokens(x, slice(cut, None)), h0=first["final_state"].double())
        second = bench.run(case, rest)
        o = torch.cat([first["o"], second["o"]], 1)
        verdicts.append(judge_by_ratio({"o": o, "final_state": second["final_state"]}, whole, id, "limit"))
    return max(verdicts, key=lambda verdict: verdict.worst)
