"""The search finds what the catalogue does not ask, from typical knobs on, and nothing in a correct kernel."""

import dataclasses

import pytest

from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.cases import Case
from kimi_linear.conformance.mutants import MUTANTS, build
from kimi_linear.conformance.panel import chunk_kernel, recurrent_kernel
from kimi_linear.conformance.search import TYPICAL, code_of, log2_ratio, search, verdict_on
from kimi_linear.conformance.verdict import Verdict
from strange_kernels import Correct, Raises, WrongFromToken40

LONG = 60.0  # minutes: the number of cases ends these searches, not the clock


def planted(name):
    return build(next(mutant for mutant in MUTANTS if mutant.name == name))


def cosine_of(case):
    return float(case.keys.rpartition("_")[2])


@pytest.mark.slow
def test_a_doubling_inverse_in_half_precision_is_found_from_typical_knobs():
    kernel = planted("InverseDoublingFp16")
    assert not verdict_on(TYPICAL, Bench(kernel, kernel.capabilities(), kernel.contract)).failed
    (found,) = search(kernel, LONG, tries=25)
    assert found.verdict.failed
    assert found.case.keys.startswith("runs") or cosine_of(found.case) > 0.5
    assert "FAILS" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [chunk_kernel(16, "bf16"), recurrent_kernel("fp32")], ids=lambda k: k.identity())
def test_nothing_is_found_in_a_correct_kernel(kernel):
    (found,) = search(kernel, LONG, tries=15)
    assert found.verdict.status == "pass"
    assert found.tries >= 15
    assert 0.3 < found.verdict.worst < 8  # the worst of what was tried is shown
    assert "passes" in str(found)


def test_a_kernel_that_raises_is_found_with_the_reason_and_shrunk_to_the_dullest_case(tmp_path):
    (found,) = search(Raises(), LONG, folder=tmp_path, tries=40)
    assert "raises RuntimeError" in found.verdict.reason
    assert (found.case.T, found.case.B, found.case.lengths) == (1, 1, None)
    assert any(tmp_path.iterdir())  # the next search begins with it


def test_without_a_folder_a_search_is_the_same_every_time():
    cases = [search(WrongFromToken40(), LONG, tries=15)[0].case for _ in range(2)]
    assert cases[0] == cases[1] != TYPICAL


def test_time_ends_a_search_and_each_contract_has_its_own():
    told = []
    found = search(Correct(), 0.002, told.append)
    assert len(found) == 1
    assert found[0].tries == len(told) <= 60
    assert search(Correct(), 0.0)[0].tries == 1


def test_a_case_is_printed_as_the_code_that_makes_it():
    case = dataclasses.replace(TYPICAL, keys="cosine_0.75", lengths=(3, 0), flags=("gradients",))
    assert eval(code_of(case), {"Case": Case}) == case
    assert "B=" not in code_of(case)


@pytest.mark.parametrize(
    ("ratios", "status", "score"),
    [
        ({"o": 4.0, "dq": 1.0}, "fail", 2),
        ({"o": 0.0}, "pass", -100),
        ({"o": float("inf")}, "fail", 100),
        ({}, "fail", 100),
    ],
)
def test_what_is_climbed_is_finite(ratios, status, score):
    assert log2_ratio(Verdict("search", "search", status, ratios=ratios)) == score
