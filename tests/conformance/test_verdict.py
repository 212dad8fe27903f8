"""What decides a verdict, number by number: ratios, limits, reasons, and the first place that is wrong."""

import dataclasses
import functools
from itertools import pairwise

import pytest
import torch

from kimi_linear.conformance.adapter import GRADIENTS, PARAMETER_GRADIENTS, Capabilities, Contract, FrontForm
from kimi_linear.conformance.cases import Case
from kimi_linear.conformance.gold import envelopes_of, rows_of, truth_of
from kimi_linear.conformance.limits import FORWARD_RATIO, GRADIENT_RATIO
from kimi_linear.conformance.problem import problem_of
from kimi_linear.conformance.verdict import (
    DERIVED,
    Verdict,
    errors_by_channel,
    first_element,
    judge_bits,
    judge_by_ratio,
    limit_of,
    row_ratios,
    summary_line,
)

CAPS = Capabilities(operations=("chunk", "backward"))
ALL_GRADIENTS = (*GRADIENTS, *PARAMETER_GRADIENTS)
CASE = Case("small", "small", "two batch items and two heads", B=2, T=5, K=4, V=3)
STATES = ("final_state", "dh0")


@functools.cache
def problem(*flags):
    """With gradients, through a front end: then every result has a truth."""
    front = FrontForm(gate="softplus", beta="sigmoid") if "gradients" in flags else None
    contract = Contract(io="fp32", operand="fp32", chunk_size=16)
    return problem_of(dataclasses.replace(CASE, flags=flags), CAPS, contract, front=front)


def off_by(factor, name, index, x):
    """The truth with one row moved by so many of its envelopes."""
    exact, bound = truth_of(x)[name].clone(), envelopes_of(x)[name][index]
    exact[index] += factor * bound
    return {**truth_of(x), name: exact}


def row_of(name):
    if name in PARAMETER_GRADIENTS:
        return (1,)
    return (1, 0, 2) if name in STATES else (1, 3, 0)


@pytest.mark.parametrize("name", DERIVED)
def test_a_row_may_be_off_by_its_limit_and_not_by_more(name):
    x = problem("gradients")
    limit = GRADIENT_RATIO if name in ALL_GRADIENTS else FORWARD_RATIO
    assert limit_of(name) == limit
    just_right = judge_by_ratio(off_by(0.999 * limit, name, row_of(name), x), x, "an id", "a tier")
    assert just_right.status == "pass"
    assert just_right.ratios[name] == pytest.approx(0.999 * limit)
    assert just_right.place is None
    assert just_right.reason == ""
    verdict = judge_by_ratio(off_by(1.001 * limit, name, row_of(name), x), x, "an id", "a tier")
    assert verdict.failed
    assert (verdict.id, verdict.tier, verdict.contract) == ("an id", "a tier", x.contract)
    assert verdict.reason == f"{name} is off by {1.001 * limit:.3g} roundings; the limit is {limit:g}"
    assert (verdict.place.result, verdict.place.index) == (name, row_of(name))
    assert verdict.place.bad_rows == 1
    assert set(verdict.ratios) == set(DERIVED)
    assert verdict.worst == verdict.ratios[name] == pytest.approx(1.001 * limit)


@pytest.mark.parametrize(("name", "limit"), [("o", FORWARD_RATIO), ("dq", GRADIENT_RATIO)])
def test_a_ratio_of_exactly_the_limit_passes_and_counts_as_no_bad_row(name, limit, monkeypatch):
    x = problem("gradients")
    ratio = torch.full(truth_of(x)[name].shape[:3], limit).double()
    monkeypatch.setattr("kimi_linear.conformance.verdict.row_ratios", lambda results, problem: {name: ratio})
    assert judge_by_ratio(truth_of(x), x, "x", "ratio").status == "pass"
    ratio[1, 3, 0] = limit * 1.5
    verdict = judge_by_ratio(truth_of(x), x, "x", "ratio")
    assert verdict.failed
    assert verdict.place.bad_rows == 1


def test_a_place_says_which_channels_are_off():
    x = problem()
    results = {**truth_of(x), "o": truth_of(x)["o"].clone()}
    results["o"][..., 1] += 100 * envelopes_of(x)["o"]
    assert any("channel 1" in words for words in judge_by_ratio(results, x, "x", "ratio").place.spread)


def test_a_verdict_in_one_line_has_its_ratios_price_word_and_reason():
    verdict = Verdict("an.id", "ratio", "pass", ratios={"o": 0.5, "dq": 3.25}, limit=4.0, price=1.5)
    assert summary_line(verdict) == f"PASS       {'an.id':28} o 0.50, dq 3.25, ratio_rec 1.50 (pass)"
    verdict = Verdict("an.id", "limit", "fail", "off", ratios={"o": 20.0}, limit=4.0)
    assert summary_line(verdict) == f"FAIL       {'an.id':28} o 20.00 (wrong): off"
    assert summary_line(Verdict("an.id", "probe", "pass", ratios={"o": 0.5})) == f"PASS       {'an.id':28} o 0.50"
    assert summary_line(Verdict("an.id", "ratio", "skip", "no")) == f"SKIP       {'an.id':28} : no"


def test_the_limit_of_a_verdict_is_the_widest_that_it_used():
    forward, backward = problem(), problem("gradients")
    assert judge_by_ratio(truth_of(forward), forward, "x", "ratio").limit == FORWARD_RATIO
    assert judge_by_ratio(truth_of(backward), backward, "x", "ratio").limit == GRADIENT_RATIO
    assert judge_by_ratio({}, forward, "x", "ratio").limit == FORWARD_RATIO


def test_results_without_a_truth_and_empty_ones_are_left_alone():
    x = problem()
    results = {"A": torch.ones(3), "o": truth_of(x)["o"], "final_state": torch.zeros(0, 2, 4, 3)}
    assert set(row_ratios(results, x)) == {"o"}


def test_the_first_wrong_result_is_the_one_that_a_kernel_computes_first():
    x = problem("gradients")
    for earlier, later in pairwise(DERIVED):
        both = off_by(100, later, row_of(later), x) | {earlier: off_by(50, earlier, row_of(earlier), x)[earlier]}
        assert judge_by_ratio(both, x, "x", "ratio").place.result == earlier


@pytest.mark.parametrize(("bad", "word"), [(torch.nan, "nan"), (torch.inf, "inf")])
def test_what_is_not_finite_is_named_with_the_first_element_in_time(bad, word):
    x = problem()
    results = {"o": truth_of(x)["o"].clone(), "final_state": truth_of(x)["final_state"]}
    results["o"][0, 4, 1, 2] = results["o"][1, 2, 0, 1] = bad
    verdict = judge_by_ratio(results, x, "x", "ratio")
    assert verdict.failed
    assert verdict.reason == f"o is {word} at [1, 2, 0, 1], 2 of {results['o'].numel()} elements"
    assert verdict.place.index == (1, 2, 0)


def test_the_first_element_is_first_in_time_for_tokens_and_first_in_order_for_states():
    odd = torch.zeros(2, 3, 2, 2, dtype=torch.bool)
    odd[0, 2, 1, 1] = odd[1, 1, 0, 1] = True
    assert first_element(odd, "o") == (1, 1, 0, 1)
    assert first_element(odd, "final_state") == (0, 2, 1, 1)
    assert first_element(odd[..., 0, :], "dbeta") == (1, 1, 1)


def test_errors_by_channel_are_in_units_of_their_rows_envelope():
    x = problem("gradients")
    for name in ("o", "dbeta"):
        results = off_by(3, name, (1, 3, 0), x)
        error = errors_by_channel(results[name], name, x)
        assert error.shape == rows_of(results[name], name).shape
        assert error[1, 3, 0].tolist() == pytest.approx([3.0] * error.shape[-1])
        assert error.sum().item() == pytest.approx(3.0 * error.shape[-1])


def test_bits_have_no_tolerance_but_zeros_have_no_sign_and_nan_is_itself():
    x = problem()
    want = {"o": torch.zeros(2, 5, 2, 3).double(), "final_state": torch.zeros(2, 2, 4, 3).double()}
    want["o"][0, 0, 0, 0] = torch.nan
    got = {"o": -want["o"].float(), "final_state": want["final_state"].float()}
    verdict = judge_bits(got, want, x, "an id", "exact")
    assert (verdict.id, verdict.tier, verdict.status, verdict.contract) == ("an id", "exact", "pass", x.contract)
    got["final_state"][1, 1, 2, 0] = 2.0**-100
    verdict = judge_bits(got, want, x, "x", "exact")
    assert verdict.failed
    assert any("key channel 2" in words for words in verdict.place.spread)
    assert verdict.reason == (
        "final_state differs in 1 of 48 elements; at [1, 1, 2, 0] it is 7.88861e-31, and 0 is exact"
    )
    assert verdict.place.index == (1, 1, 2)
    assert verdict.place.ratio == torch.inf
    got["o"][1, 1, 0, 2] = got["o"][0, 4, 0, 2] = 0.5
    verdict = judge_bits(got, want, x, "x", "exact")
    assert verdict.reason == "o differs in 2 of 60 elements; at [1, 1, 0, 2] it is 0.5, and 0 is exact"
    assert verdict.place.result == "o"
    assert verdict.place.bad_rows == 2
    assert any("channel 2" in words for words in verdict.place.spread)
    dbeta = {"dbeta": torch.zeros(2, 5, 2).double()}
    off = dbeta["dbeta"].clone()
    off[1, 3, 0] = 1
    assert judge_bits({"dbeta": off}, dbeta, x, "x", "exact").place.bad_rows == 1
    missing = {**got, "o": torch.zeros(2, 5, 2, 3)}
    assert "it is 0, and nan is exact" in judge_bits(missing, want, x, "x", "exact").reason


def test_a_price_is_asked_for_and_is_that_of_the_output_alone():
    x, backward = problem(), problem("gradients")
    alone = envelopes_of(x, recurrence_alone=True)["o"]
    results = {"o": truth_of(x)["o"].clone(), "final_state": 2 * truth_of(x)["final_state"]}
    results["o"][1, 3, 0] += 5 * alone[1, 3, 0]
    assert judge_by_ratio(results, x, "x", "ratio", price=True).price == pytest.approx(5)
    assert judge_by_ratio(results, x, "x", "ratio").price is None
    assert judge_by_ratio({"final_state": results["final_state"]}, x, "x", "ratio", price=True).price is None
    assert judge_by_ratio(truth_of(backward), backward, "x", "ratio", price=True).price is None
    empty = problem_of(dataclasses.replace(CASE, T=0), CAPS, x.contract)
    assert judge_by_ratio(truth_of(empty), empty, "x", "ratio", price=True).price == 0


def test_a_verdict_starts_with_nothing_found():
    verdict = Verdict("x", "ratio", "pass")
    assert not verdict.failed
    assert (verdict.worst, verdict.limit, verdict.reason, verdict.ratios) == (0.0, 0.0, "", {})
    assert (verdict.price, verdict.place, verdict.contract) == (None, None, None)
    assert Verdict("x", "ratio", "fail", ratios={"o": 2.0, "dq": 3.0}).worst == 3.0
    assert Verdict("x", "ratio", "fail").failed
