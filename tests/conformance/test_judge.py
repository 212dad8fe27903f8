"""The judge is judged: planted bugs are reported at their place, correct kernels pass, no tier is vacuous."""

import dataclasses

import pytest
import torch

from kimi_linear.conformance.adapter import Capabilities, Contract, load_adapter
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.catalogue import CASES, by_id
from kimi_linear.conformance.fitting import why_not
from kimi_linear.conformance.guard import guarded_run
from kimi_linear.conformance.mutants import MUTANTS, build
from kimi_linear.conformance.mutants.registry import BASES
from kimi_linear.conformance.panel import chunk_kernel, panel, recurrent_kernel
from kimi_linear.conformance.problem import problem_of
from kimi_linear.conformance.report import as_json, text
from kimi_linear.conformance.suite import Check, check_by_id, run_suite, waived
from kimi_linear.conformance.verdict import Verdict, judge_by_ratio
from strange_kernels import CONTRACT, Correct, WrongFromToken40

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}


def bench_of(kernel):
    return Bench(kernel, kernel.capabilities(), kernel.contract)


def planted(name):
    return bench_of(build(BY_NAME[name]))


def test_the_first_bad_token_head_and_batch_item_are_named():
    case = dataclasses.replace(by_id("shape.no_groups"), T=61)
    problem = problem_of(case, Capabilities(), CONTRACT)
    kernel = WrongFromToken40()
    verdict = judge_by_ratio(guarded_run(kernel, problem, kernel.capabilities()), problem, case.id, "ratio")
    assert verdict.place.index == (1, 40, 1)
    assert "batch 1, token 40 (chunk 1, row 8), head 1" in str(verdict.place)
    assert verdict.place.heads == (1,)
    assert verdict.place.ratio_before < 2


# One planted bug a tier: the tier sees it, and sees nothing in the kernel without it

TIERS = {
    "exact.dense": "GateShift",
    "exact.long_sums": "AccumulateBf16",
    "exact.packed": "StateOfEmptyUnwritten",
    "relation.causality": "OutputAhead",
    "relation.batch_order": "BatchFirst",
    "relation.head_order": "GateFirstHead",
    "relation.packed_is_separate": "StateLeaks",
    "relation.packed_no_state": "StateLeaksUnlessPassed",
    "relation.batch_neighbours": "MaskMultiplies",
    "relation.scaled_values": "StateFlushed",
    "values.square_state": "FinalStateTransposed",
    "relation.rerun": "SumOrder",
    "relation.strides": "StridesIgnored",
    "relation.dirty_memory": "OutputUnwritten",
    "relation.linear_gradients": "GradClipped",
    "limit.decay_only": "StateUndecayed",
    "limit.gated_deltanet": "WUngated",
    "limit.reflection": "BetaClamped",
    "limit.split": "InitialStateIgnored",
    "limit.gradient_identities": "GradKeysOfW",
    "keys.cosine_0.99": "InverseDoublingBf16",
    "keys.flipped": "InverseOfBf16",
    "gate.bound": "DecayFactored",
    "gradients.state_only": "GradFinalStateIgnored",
    "probe.beta_bf16": "BetaBf16",
    "probe.gate_bf16": "GateBf16",
    "probe.log2e": "Log2eOfState",
    "probe.state_bf16": "StateBf16Between",
    "probe.l2norm_eps": "EpsOutsideRoot",
    "probe.bits": "FinalStateBf16",
    "limit.gradient_duality": "GradGateOfKeys",
    "limit.gradient_split": "GradBetaOfKeys",
}


@pytest.mark.parametrize(("check", "name"), TIERS.items(), ids=TIERS.keys())
def test_each_tier_sees_a_bug_and_passes_the_kernel_without_it(check, name):
    guilty = planted(name)
    assert check_by_id(check)(guilty).failed
    innocent = bench_of(BASES[BY_NAME[name].on]())
    assert check_by_id(check)(innocent).status == "pass"


SEEDS = (101, 202)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kernel",
    [
        chunk_kernel(32, "bf16"),
        chunk_kernel(16, "fp16"),
        chunk_kernel(64, "fp32", rebased=False),
        recurrent_kernel("bf16"),
    ],
    ids=lambda kernel: kernel.identity(),
)
def test_correct_kernels_pass_at_seeds_never_seen(kernel, seed):
    bench = bench_of(kernel)
    for case in CASES:
        asked = why_not(case, bench.caps, bench.contract) is None
        if asked and case.has("quick") and case.family in ("gate", "keys", "strength", "values"):
            fresh = dataclasses.replace(case, seed=seed)
            problem = problem_of(fresh, bench.caps, bench.contract)
            verdict = judge_by_ratio(guarded_run(kernel, problem, bench.caps), problem, case.id, "ratio")
            assert verdict.status == "pass", (case.id, verdict.ratios)


def test_the_panel_has_a_dozen_different_kernels():
    assert len({kernel.identity() for kernel in panel()}) >= 12


def test_a_crash_in_a_check_of_ours_is_not_blamed_on_the_kernel():
    def broken(bench):
        raise ZeroDivisionError

    check = Check("x", "ratio", "x", "", broken, lambda bench: None)
    with pytest.raises(ZeroDivisionError):
        check(bench_of(Correct()))


def test_the_price_of_the_chunk_form_is_higher_on_keys_that_repeat():
    bench = bench_of(chunk_kernel(32, "fp32"))
    mild, hard = (check_by_id(f"keys.{name}")(bench).price for name in ("random", "flipped"))
    assert hard > 2 * mild


# Reports


def test_a_report_says_where_why_and_how_to_see_it_again():
    wrong = load_adapter("kimi_linear.conformance.adapters.wrong")
    report = run_suite(wrong, only=["gate.channel_ramp", "shape.T=2"])
    said = text(report, wrong, "wrong.py", every=True)
    assert "first bad row of o: batch 0, token 8 (chunk 0, row 8)" in said
    assert "looks like: no gate in w" in said
    assert "kimi-linear conformance repro gate.channel_ramp --adapter wrong.py" in said
    assert "PASS       shape.T=2" in said
    assert "1 pass, 1 fail" in said
    plain = as_json(report)
    assert plain["ok"] is False
    assert plain["verdicts"][0]["ratios"]["o"] > 0


def test_a_waiver_excuses_a_failure_and_shouts_when_it_is_not_needed():
    failed = Verdict("x", "ratio", "fail", "off by 9")
    passed = Verdict("x", "ratio", "pass")
    assert waived(failed, {"x": "known"}).status == "waived"
    assert waived(failed, {"y": "other"}).failed
    of_64 = dataclasses.replace(failed, contract=Contract(chunk_size=64))
    assert waived(of_64, {"x @ chunk 32": "known"}).failed
    assert waived(of_64, {"x @ chunk 32": "known", "x @ chunk 64": "known"}).status == "waived"
    loud = waived(passed, {"x": "known"})
    assert loud.failed
    assert "Remove the waiver" in loud.reason


def test_the_judge_refuses_nan_rather_than_compare_it():
    problem = problem_of(by_id("shape.K=7"), Capabilities(), CONTRACT)
    results = {"o": torch.full_like(problem.call.v, torch.nan)}
    assert judge_by_ratio(results, problem, "x", "ratio").failed
