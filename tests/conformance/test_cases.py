"""The cases are data: the same numbers everywhere, ids that stay, inputs that keep the operator's contract."""

import dataclasses
import hashlib

import pytest
import torch

from kimi_linear.conformance import limits
from kimi_linear.conformance.adapter import Capabilities, Contract
from kimi_linear.conformance.cases import length_of, tensors_of
from kimi_linear.conformance.catalogue import CASES, by_id, subset
from kimi_linear.conformance.fitting import fitted, why_not
from kimi_linear.conformance.gold import envelopes_of, truth_of
from kimi_linear.conformance.integers import integer_truth
from kimi_linear.conformance.panel import chunk_kernel
from kimi_linear.conformance.problem import problem_of
from kimi_linear.conformance.suite import all_checks
from kimi_linear.reference.contract import check_inputs, check_values

CAPS, CONTRACT = Capabilities(), Contract(chunk_size=32)
DIGESTS = {
    "keys.cosine_0.99": "dd1fca0af42ba37c",
    "gate.spikes": "75b8756320d0f213",
    "exact.packed": "4366777ba0cbe617",
}


def digest(id):
    x = tensors_of(fitted(by_id(id), CAPS, CONTRACT))
    parts = [y.float().numpy().tobytes() for y in (x.q, x.k, x.v, x.g, x.beta, x.h0)]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


@pytest.mark.parametrize("id", DIGESTS)
def test_inputs_are_the_same_numbers_on_every_machine(id):
    assert digest(id) == DIGESTS[id]


def test_ids_are_unique_over_all_checks_and_say_their_family():
    ids = [check.id for check in all_checks()]
    assert len(set(ids)) == len(ids) > 100
    assert all(case.id.startswith(case.family + ".") for case in CASES)


def test_the_quick_subset_has_every_family_and_is_the_smaller_one():
    quick, full = subset(full=False), subset(full=True)
    assert {case.family for case in quick} == {case.family for case in full}
    assert len(quick) < len(full) / 2


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case_keeps_the_contract_of_the_operator(case):
    x = tensors_of(fitted(case, CAPS, CONTRACT))
    offsets = None if x.offsets is None else torch.tensor(x.offsets)
    check_inputs(x.q, x.k, x.v, x.g, x.beta, scale=x.scale, initial_state=x.h0, cu_seqlens=offsets)
    check_values(x.g, x.offsets, None)
    assert x.beta.numel() == 0 or 0 <= x.beta.min() <= x.beta.max() <= 2


@pytest.mark.parametrize("case", [case for case in CASES if case.has("exact")], ids=lambda case: case.id)
def test_exact_cases_have_a_third_opinion_that_agrees_bit_for_bit_and_is_not_dull(case):
    problem = problem_of(case, CAPS, CONTRACT)
    for name, want in integer_truth(problem).items():
        assert torch.equal(truth_of(problem)[name], want)
        assert want.unique().numel() > 5


def test_the_third_opinion_starts_from_0_where_there_is_no_state():
    for lengths in (None, (5, 0, 2)):
        case = dataclasses.replace(by_id("exact.packed"), state="none", lengths=lengths, K=5, V=3)
        problem = problem_of(case, CAPS, CONTRACT)
        assert problem.judge.h0 is None
        for name, want in integer_truth(problem).items():
            assert torch.equal(truth_of(problem)[name], want)


def test_a_packed_case_without_a_state_has_a_cotangent_for_each_segment():
    case = dataclasses.replace(by_id("gradients.packed"), state="none")
    x = tensors_of(fitted(case, CAPS, CONTRACT))
    assert x.h0 is None
    assert x.dht.shape == (4, 2, case.K, case.V)


def test_lengths_follow_the_chunk():
    lengths = [length_of(n, 64) for n in (7, "C", "C-1", "2C+1", "C/4+1")]
    assert lengths == [7, 64, 63, 129, 17]
    with pytest.raises(ValueError, match="2C\\+1"):
        length_of("two", 64)


def test_a_kernel_with_fixed_sizes_gets_the_nearest_that_it_takes():
    case = fitted(
        by_id("shape.K=40,V=8"), Capabilities(K=(64, 128), V=(64, 128), square=True, groups=False), CONTRACT
    )
    assert (case.K, case.V, case.group, case.H) == (64, 64, 1, 2)


@pytest.mark.parametrize(
    ("id", "caps"),
    [
        ("exact.packed", Capabilities(packed=False)),
        ("gradients.mild", Capabilities()),
        ("strength.two", Capabilities(beta_above_one=False)),
    ],
)
def test_what_is_not_declared_is_not_asked(id, caps):
    assert "not declared" in why_not(by_id(id), caps, CONTRACT)


def test_other_conventions_describe_the_same_problem():
    case = by_id("values.square_state")
    plain = problem_of(case, CAPS, CONTRACT)
    foreign = Capabilities(log_base="2", beta="logit", beta_above_one=False, state_layout="VK")
    other = problem_of(case, foreign, CONTRACT)
    assert torch.equal(other.call.initial_state.transpose(-1, -2), plain.call.initial_state)
    torch.testing.assert_close(other.call.g.double() * torch.tensor(2.0).double().log(), plain.judge.g)
    torch.testing.assert_close(other.judge.beta, plain.judge.beta, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(truth_of(other)["o"], truth_of(plain)["o"], atol=1e-5, rtol=1e-5)


def test_envelopes_grow_with_the_coarseness_of_the_contract():
    fine, coarse = (
        envelopes_of(problem_of(by_id("gate.slow"), CAPS, chunk_kernel(32, name).contract))["o"].mean()
        for name in ("fp32", "bf16")
    )
    assert 2**10 < coarse / fine < 2**18


def test_limits_never_leave_what_was_fitted():
    assert limits.FORWARD_RATIO <= 4
    assert limits.GRADIENT_RATIO <= 8
