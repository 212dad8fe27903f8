"""A kernel's own front end: judged from raw projections, as a whole and in the steps that it offers."""

from dataclasses import replace

import pytest
import torch

from kimi_linear.conformance.adapter import Capabilities, Contract, FrontForm, load_adapter
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.catalogue import CASES, by_id
from kimi_linear.conformance.emulated import Emulated
from kimi_linear.conformance.panel import chunk_kernel
from kimi_linear.conformance.problem import problem_of, problems_of
from kimi_linear.conformance.suite import check_by_id, run_suite

CONTRACT = Contract(chunk_size=32)
WHOLE = FrontForm(gate="softplus", beta="sigmoid")
BOUNDED = FrontForm(gate="bounded", beta="sigmoid")
FRONT = [case for case in CASES if case.family == "front"]


class Fused(Emulated):
    """A kernel that cannot be called without its front end."""

    def capabilities(self):
        return Capabilities(
            contracts=(CONTRACT,), plain=False, front_ends=(BOUNDED,), beta_above_one=False, gate_dtype="io"
        )


class Clamps(Fused):
    """Takes the bounded gate for a clamp of the softplus gate."""

    def bounded_gate(self, x, A_log, dt_bias, lower_bound):
        return self.softplus_gate(x, A_log, dt_bias, lower_bound).clamp(min=lower_bound)


def bench_of(kernel):
    return Bench(kernel, kernel.capabilities(), kernel.contract)


def test_a_case_is_asked_of_every_front_end_that_has_its_subject():
    caps = Capabilities(front_ends=(WHOLE, BOUNDED, FrontForm()))
    asked = {
        id: [p.call.front for p in problems_of(by_id(id), caps, CONTRACT)] for id in ("front.l2norm", "front.beta")
    }
    assert asked == {"front.l2norm": [WHOLE, BOUNDED, FrontForm()], "front.beta": [WHOLE, BOUNDED]}


@pytest.mark.parametrize("case", FRONT, ids=lambda case: case.id)
def test_the_judge_computes_with_what_the_raw_projections_become(case):
    caps = chunk_kernel(32, "bf16").capabilities()
    for problem in problems_of(case, caps, CONTRACT):
        call, x = problem.call, problem.judge
        assert (x.g <= 0).all()
        assert ((x.beta >= 0) & (x.beta <= 2)).all()
        assert (x.k.norm(dim=-1) <= 1.001).all()
        assert call.front.gate is None or not torch.equal(call.g.double(), x.g)
        assert x.k.isfinite().all()


def test_a_kernel_that_is_always_fused_meets_the_whole_catalogue_through_its_front_end():
    ids = ["gate.bound", "gate.slow", "keys.duplicate", "packing.past_end", "strength.zero", "values.zero_state"]
    ids += ["relation.causality", "relation.packed_is_separate", "relation.lookup", "exact.dense", "limit.deltanet"]
    report = run_suite(Fused(CONTRACT), only=[*ids, "front.whole_packed"])
    assert {v.id for v in report.verdicts if v.status == "skip"} == {"relation.lookup", "exact.dense"}
    assert report.ok


def test_a_clamped_softplus_gate_is_no_bounded_gate():
    assert check_by_id("front.bounded_sweep")(bench_of(Fused(CONTRACT))).status == "pass"
    assert check_by_id("front.bounded_sweep")(bench_of(Clamps(CONTRACT))).failed


def test_the_gates_that_a_bounded_gate_can_make_are_made_exactly_enough():
    caps = Fused(CONTRACT).capabilities()
    problem = problem_of(by_id("gate.channel_ramp"), replace(caps, gate_dtype="fp32"), CONTRACT)
    plain = problem_of(by_id("gate.channel_ramp"), Capabilities(), CONTRACT)
    torch.testing.assert_close(problem.judge.g, plain.judge.g, rtol=1e-5, atol=1e-5)
    zero = problem_of(by_id("gate.zero"), caps, CONTRACT)
    assert (zero.judge.g == 0).all()


def test_front_ends_that_are_not_declared_are_skipped_and_named():
    kernel = chunk_kernel(32, "bf16")
    caps = replace(kernel.capabilities(), front_ends=(FrontForm(),))
    verdict = check_by_id("front.softplus")(Bench(kernel, caps, kernel.contract))
    assert verdict.status == "skip"
    assert verdict.reason == "a front end with a softplus gate is not declared"


@pytest.mark.parametrize("name", ["naive", "chunked"])
def test_the_reference_passes_a_case_of_each_step(name):
    adapter = load_adapter(f"kimi_linear.conformance.adapters.{name}")
    ids = ["front.softplus_faint", "front.bounded_sweep", "front.beta_extreme", "front.l2norm_unequal"]
    report = run_suite(adapter, full=False, only=ids)
    assert report.count("pass") == len(ids)
