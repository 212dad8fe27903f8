"""Closed forms: their truths are right without the reference, and their verdicts say what is off."""

import dataclasses

import pytest
import torch

from kimi_linear.conformance.bench import Bench, RelationBroken
from kimi_linear.conformance.closed_forms import CLOSED_FORMS, against, closed_form, transition_form
from kimi_linear.conformance.emulated import EmulatedRecurrent
from kimi_linear.conformance.gold import envelopes_of, truth_of
from kimi_linear.conformance.limits import FORWARD_RATIO, GRADIENT_RATIO
from kimi_linear.conformance.panel import recurrent_kernel
from kimi_linear.conformance.verdict import Verdict

KERNEL = recurrent_kernel("fp32")
FORMS = {form.id: form for form in CLOSED_FORMS}


def bench_of(kernel=KERNEL):
    return Bench(kernel, kernel.capabilities(), kernel.contract)


def small(**knobs):
    """A problem of two batch items and grouped heads."""
    bench = bench_of()
    return bench.problem(bench.case(**{"T": 5, "K": 4, "V": 3, "group": 2, "gate": "constant_per_token", **knobs}))


@pytest.mark.parametrize("knobs", [{}, {"state": "none"}, {"beta": "two", "gate": "zero"}, {"scale": 0.3}], ids=str)
def test_transition_matrices_give_the_recurrence_where_a_token_has_one_gate(knobs):
    problem = small(**knobs)
    assert problem.judge.v.shape[2] > problem.judge.q.shape[2]
    got = transition_form(problem.judge)
    assert set(got) == {"o", "final_state"}
    for name, want in truth_of(problem).items():
        torch.testing.assert_close(got[name], want, rtol=1e-12, atol=1e-12)


def test_transition_matrices_are_another_operator_where_channels_have_their_own_gates():
    problem = small(gate="mild")
    assert (transition_form(problem.judge)["o"] - truth_of(problem)["o"]).abs().max() > 1e-3


def off_by(factor, name, index, problem):
    exact = truth_of(problem)[name].clone()
    exact[index] += factor * envelopes_of(problem)[name][index]
    return {**truth_of(problem), name: exact}


@pytest.mark.parametrize(
    ("name", "index", "limit"),
    [
        ("o", (1, 3, 0), FORWARD_RATIO),
        ("final_state", (1, 0, 2), FORWARD_RATIO),
        ("dq", (1, 3, 0), GRADIENT_RATIO),
    ],
)
def test_a_row_may_be_off_a_closed_form_by_the_limit_and_not_by_more(name, index, limit):
    problem = small(flags=("gradients",)) if name == "dq" else small()
    want = {result: truth_of(problem)[result] for result in ("o", "final_state", name)}
    verdict = against(want, off_by(0.999 * limit, name, index, problem), problem, "an id")
    assert (verdict.id, verdict.tier, verdict.status, verdict.limit) == ("an id", "limit", "pass", FORWARD_RATIO)
    assert verdict.contract == problem.contract
    assert (verdict.place, verdict.reason) == (None, "")
    assert verdict.ratios[name] == pytest.approx(0.999 * limit)
    verdict = against(want, off_by(1.001 * limit, name, index, problem), problem, "an id")
    assert verdict.failed
    assert (verdict.place.result, verdict.place.index, verdict.place.bad_rows) == (name, index, 1)
    assert verdict.reason == f"{name} is off by {1.001 * limit:.3g} roundings; the limit is {limit:g}"
    assert set(verdict.ratios) == set(want)


def test_a_ratio_of_exactly_the_limit_passes_a_closed_form(monkeypatch):
    problem = small()
    ratio = torch.full(envelopes_of(problem)["o"].shape, FORWARD_RATIO).double()
    monkeypatch.setattr("kimi_linear.conformance.closed_forms.error_ratio", lambda got, want, bounds: ratio)
    want = {"o": truth_of(problem)["o"]}
    assert against(want, want, problem, "x").status == "pass"


def test_the_first_of_two_wrong_results_is_named_and_nan_is_wrong():
    problem = small()
    want = truth_of(problem)
    both = {**off_by(9, "o", (0, 1, 1), problem), "final_state": torch.full_like(want["final_state"], torch.nan)}
    verdict = against(want, both, problem, "x")
    assert verdict.failed
    assert verdict.place.result == "o"
    assert verdict.ratios["final_state"] == torch.inf
    only = against({"final_state": want["final_state"]}, both, problem, "x")
    assert only.failed
    assert only.place.result == "final_state"


class Slips(EmulatedRecurrent):
    """A kernel whose o or state is off by a part in ten thousand."""

    def __init__(self, name):
        super().__init__(KERNEL.contract, name="a kernel of the tests")
        self.slip = name

    def run(self, call, want):
        results = super().run(call, want)
        return {**results, self.slip: results[self.slip] * 1.0001}


@pytest.mark.parametrize("id", ["decay_only", "gated_deltanet", "deltanet", "reflection", "no_op_tail", "split"])
def test_a_closed_form_passes_a_right_kernel_and_fails_one_whose_state_is_off(id):
    form = FORMS[f"limit.{id}"]
    right, wrong = form(bench_of()), form(bench_of(Slips("final_state")))
    assert (right.id, right.tier, right.status) == (f"limit.{id}", "limit", "pass")
    assert 0 < right.worst <= FORWARD_RATIO
    assert wrong.failed
    assert wrong.ratios["final_state"] > FORWARD_RATIO


@pytest.mark.parametrize("id", ["gated_deltanet", "deltanet", "reflection", "split"])
def test_a_closed_form_with_an_output_fails_a_kernel_whose_output_is_off(id):
    assert FORMS[f"limit.{id}"](bench_of(Slips("o"))).place.result == "o"


def test_a_kernel_that_hangs_in_a_closed_form_is_stopped_after_the_seconds_of_its_bench(monkeypatch):
    asked = []

    def stopped(adapter, problem, caps, *arguments, seconds):
        asked.append(seconds)
        return truth_of(problem)

    monkeypatch.setattr("kimi_linear.conformance.closed_forms.guarded_run", stopped)
    bench = dataclasses.replace(bench_of(), seconds=7.0)
    for id in ("decay_only", "gated_deltanet"):
        assert FORMS[f"limit.{id}"](bench).status == "pass"
    assert asked == [7.0, 7.0]


def test_a_closed_form_is_registered_with_its_case_and_what_it_catches(monkeypatch):
    monkeypatch.setattr("kimi_linear.conformance.closed_forms.CLOSED_FORMS", mine := [])

    @closed_form("mine", "a slip", "packed", T=7, beta="zero")
    def judge(bench, case, id):
        return Verdict(id, "limit", "pass", reason=f"{case.T} {case.beta}")

    @closed_form("plain", "another")
    def other(bench, case, id):
        raise RelationBroken

    assert callable(judge)
    assert [(form.id, form.catches, form.needs, form.knobs) for form in mine] == [
        ("limit.mine", "a slip", "packed", {"T": 7, "beta": "zero"}),
        ("limit.plain", "another", "", {}),
    ]
    assert mine[0].judge is judge
    assert mine[1].judge is other
    verdict = mine[0](bench_of())
    assert (verdict.id, verdict.reason) == ("limit.mine", "7 zero")
