"""The failure report: a planted bug is told at its place, by stage, by name, made small, on a page that is safe."""

import dataclasses
import json
import math
import re
import runpy
from html.parser import HTMLParser

import pytest
import torch

from kimi_linear.conformance import explain as explaining
from kimi_linear.conformance.adapter import STAGES, Capabilities, load_adapter
from kimi_linear.conformance.as_json import SCHEMA, as_json
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.catalogue import by_id
from kimi_linear.conformance.explain import explain_failures, explain_one
from kimi_linear.conformance.mutants import MUTANTS, build
from kimi_linear.conformance.page import page
from kimi_linear.conformance.panel import chunk_kernel
from kimi_linear.conformance.report import failure_lines, text
from kimi_linear.conformance.repro import repro_script
from kimi_linear.conformance.shrink import shrink
from kimi_linear.conformance.suite import Report, all_checks, case_check, check_by_id, run_suite
from kimi_linear.conformance.suspects import suspects
from kimi_linear.conformance.trials import CheckTrial, case_of
from kimi_linear.conformance.verdict import Verdict
from strange_kernels import CONTRACT, Correct, Hangs, ReturnsNaN

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}
WRONG = "kimi_linear.conformance.adapters.wrong"


NO_HURRY = math.inf  # seconds: a search ends where nothing is left to try, so that a loaded machine finds the same


def unhurried(explaining_function, *arguments):
    """Explanations with all the time that their searches want."""
    with pytest.MonkeyPatch.context() as patch:
        for limit in ("SHRINK_SECONDS", "SUSPECT_SECONDS"):
            patch.setattr(explaining, limit, NO_HURRY)
        return explaining_function(*arguments, seconds=NO_HURRY)


def bench_of(kernel):
    return Bench(kernel, kernel.capabilities(), kernel.contract)


def planted(name):
    return bench_of(build(BY_NAME[name]))


# Suspects


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("gate.channel_ramp", "WUngated"),
        ("keys.cosine_0.9", "Neumann1"),
        ("exact.dense", "GateShift"),
        ("values.scale", "ScaleTwice"),
        ("gradients.state_only", "GradFinalStateIgnored"),
    ],
)
def test_the_first_of_all_known_bugs_is_the_one_that_was_planted(case, name):
    bench = planted(name)
    first, second, *_ = suspects(bench, bench.problem(by_id(case)), seconds=NO_HURRY)
    assert first.mutant.name == name
    assert first.likeness > 0.99
    assert abs(first.size - 1) < 0.1
    assert second.mutant.name != name


def test_bugs_of_one_direction_are_told_apart_by_size():
    bench = planted("ScaleTwice")
    near = [BY_NAME[name] for name in ("ScaleNone", "ScaleOfV", "ScaleIgnored", "ScaleTwice")]
    first, *others = suspects(bench, bench.problem(by_id("values.square_state")), near, NO_HURRY)
    assert first.mutant.name == "ScaleTwice"
    assert all(other.rank > first.rank for other in others)


def test_a_correct_kernel_looks_like_no_known_bug():
    bench = bench_of(chunk_kernel(32, "bf16", rebased=False))
    found = suspects(bench, bench.problem(by_id("gate.channel_ramp")), MUTANTS[::5], NO_HURRY)
    broken = [suspect for suspect in found if suspect.size < 0.5]  # bugs that do something on this input
    assert broken
    assert max(suspect.likeness for suspect in broken) < 0.5


def test_an_error_that_is_not_finite_is_matched_by_where_it_is_not():
    bench = planted("DecayFactored")
    near = [BY_NAME[name] for name in ("DecayFactored", "GateShift", "WUngated")]
    first, *_ = suspects(bench, bench.problem(by_id("gate.minus30")), near, NO_HURRY)
    assert first.mutant.name == "DecayFactored"
    assert first.likeness == 1


# Shrinking


@pytest.mark.parametrize(
    ("check", "name", "sizes"),
    [
        (
            "exact.packed",
            "StateOfEmptyUnwritten",
            {"lengths": (0,), "H": 1, "group": 1, "K": 1, "V": 1, "past_end": 0},
        ),
        ("gate.channel_ramp", "WUngated", {"T": 1, "H": 1, "group": 1, "state": "random"}),
        ("exact.dense", "GateShift", {"B": 1, "V": 1}),
    ],
)
def test_a_failing_case_is_made_as_small_as_it_goes_and_still_fails_alike(check, name, sizes):
    bench = planted(name)
    verdict = check_by_id(check)(bench)
    found = shrink(verdict, bench, NO_HURRY)
    assert {knob: getattr(found.case, knob) for knob in sizes} == sizes
    assert found.verdict.place.result == verdict.place.result
    assert found.tried < 150


def test_a_smaller_failure_is_never_an_accident_of_small_numbers():
    bench = planted("InverseDoublingBf16")
    found = shrink(check_by_id("keys.cosine_0.99")(bench), bench, 5)
    innocent = bench_of(chunk_kernel(32, "bf16"))
    assert found.case.T >= 4  # the first power that overflows
    assert not case_check(found.case)(innocent).failed


def test_sizes_that_a_kernel_does_not_take_are_not_tried():
    class Fixed(type(build(BY_NAME["WUngated"]))):
        def capabilities(self):
            return Capabilities(contracts=(self.contract,), K=(16, 32), V=(16,), groups=False)

        def run(self, call, want):
            assert call.k.shape[-1] in (16, 32)
            assert call.v.shape[-1] == 16
            return super().run(call, want)

    bench = bench_of(Fixed(CONTRACT))
    found = shrink(check_by_id("gate.channel_ramp")(bench), bench, NO_HURRY)
    assert (found.case.K, found.case.V, found.case.group) == (16, 16, 1)


def test_a_relation_is_made_smaller_too_and_a_hang_is_left_as_it_is():
    bench = planted("OutputAhead")
    found = shrink(check_by_id("relation.causality")(bench), bench, NO_HURRY)
    assert found.sizes["K"] == found.sizes["V"] == 1
    assert found.case is None
    hangs = bench_of(Hangs())
    hangs = dataclasses.replace(hangs, seconds=0.1)
    found = shrink(check_by_id("shape.T=1")(hangs), hangs, 10)
    assert found.tried == 0
    assert found.case.K == by_id("shape.T=1").K


def test_a_check_of_a_kind_that_has_no_sizes_is_left_as_it_is():
    bench = planted("WUngated")
    verdict = Verdict("probe.bits", "probe", "fail", "said so")
    assert shrink(verdict, bench, 1) is None  # it does not fail again
    assert shrink(check_by_id("probe.bits")(planted("FinalStateBf16")), planted("FinalStateBf16"), 1).sizes == {}
    tiers = {check.tier for check in all_checks()} - {"exact", "ratio"}
    for tier in tiers:
        (kind, *_) = (check for check in all_checks() if check.tier == tier)
        assert isinstance(CheckTrial(kind, bench).start(), dict)


# Scripts


@pytest.mark.parametrize(
    ("check", "shrunk"), [("gate.channel_ramp", True), ("exact.dense", True), ("limit.gated_deltanet", False)]
)
def test_the_script_shows_the_failure_again_and_says_so_in_its_exit_code(check, shrunk, tmp_path, capsys):
    bench = bench_of(load_adapter(WRONG)._kernel)
    verdict = check_by_id(check)(bench)
    assert verdict.failed
    smallest = shrink(verdict, bench, 3) if shrunk else None
    script = tmp_path / "repro.py"
    script.write_text(repro_script(check_by_id(check), bench.contract, WRONG, smallest, case_of(check)))
    with pytest.raises(SystemExit) as exited:
        runpy.run_path(str(script))
    assert exited.value.code is True
    assert "FAIL" in capsys.readouterr().out
    assert len(script.read_text().splitlines()) <= 15


def test_a_script_keeps_the_contract_that_failed_and_survives_any_path():
    contract = dataclasses.replace(CONTRACT, chunk_size=16, state="bf16")
    script = repro_script(check_by_id("relation.reset"), contract, 'a "strange"\\n.py', None, None)
    compile(script, "repro.py", "exec")
    assert "chunk_size=16" in script
    assert "state='bf16'" in script


# The explanation as a whole


class WrongStage(Correct):
    """A kernel that shows its stages, wrong in u from token 20 on."""

    chunked = load_adapter("kimi_linear.conformance.adapters.chunked")

    def capabilities(self):
        return self.chunked.capabilities()

    def run(self, call, want):
        if call.do is not None:
            return {name: x * (1.01 if name == "dk" else 1) for name, x in self.chunked.run(call, want).items()}
        results = self.chunked.run(call, want | frozenset(STAGES))
        for name in ("u", "v_new", "o"):
            results[name] = results[name].clone()
            results[name][:, 20:] *= 1.01
        return results


def explained(kernel, check, **options):
    bench = Bench(kernel, kernel.capabilities(), kernel.capabilities().contracts[-1])
    return explain_one(check_by_id(check)(bench), bench, "x.py", **options)


def test_the_first_wrong_stage_is_named_with_its_place_and_formula():
    said = "\n".join(failure_lines(explained(WrongStage(), "shape.T=61", seconds=1), "x.py"))
    assert "G ok" in said
    assert "w ok" in said
    assert "first wrong stage: u, at token 20 (chunk 1, row 4), head 0 (stage 4: T (beta v))" in said


def test_the_first_wrong_gradient_is_named_and_a_right_forward_points_to_the_backward():
    one = explained(WrongStage(), "gradients.mild", seconds=1)
    assert one.first_wrong.name == "dk"
    assert [row.name for row in one.results if not row.ok] == ["dk"]
    assert all(row.ok for row in one.stages if row.name in ("G", "A", "T", "w"))
    said = "\n".join(failure_lines(one, "x.py"))
    assert "first wrong gradient: dk" in said


def test_the_law_of_growth_is_told():
    class Doubles(Correct):
        """Wrong by a factor that grows a tenth with every token from 5 on."""

        def run(self, call, want):
            results = super().run(call, want)
            if call.do is None:
                wrong = 1 + 0.05 * 1.1 ** torch.arange(-5, results["o"].shape[1] - 5)
                wrong[:5] = 1
                results["o"] = (results["o"].float() * wrong[:, None, None]).to(results["o"].dtype)
            return results

    one = explained(Doubles(), "gate.typical", seconds=0)
    assert one.ratio_map.growth.law == "exponential"
    assert 1.05 < one.ratio_map.growth.rate < 1.15
    assert one.verdict.place.index[1] in (5, 6)


def test_what_is_not_finite_is_told_at_its_first_place():
    one = unhurried(explained, ReturnsNaN(), "shape.K=7")
    assert "o is nan at [0, 3, 0, 0]" in one.verdict.reason
    assert one.verdict.place.index == (0, 3, 0)
    assert one.verdict.place.spread[0] == "token 3 alone"
    assert one.smallest.case.T == 4


def test_the_calls_of_a_relation_are_judged_one_by_one():
    one = explained(build(BY_NAME["OutputAhead"]), "relation.causality", cause=False)
    assert len(one.calls) > 1
    assert one.calls[0].startswith("call 1: o ")
    assert not one.first_wrong.ok
    assert not one.each_call_right
    rerun = explained(build(BY_NAME["SumOrder"]), "relation.rerun", cause=False)
    assert rerun.each_call_right
    assert "Each is right on its own" in "\n".join(failure_lines(rerun, "x.py"))


def test_a_failure_that_does_not_come_again_is_told_to_be_one():
    class Once(Correct):
        runs = 0

        def run(self, call, want):
            self.runs += 1
            results = super().run(call, want)
            results["o"] *= 2 if self.runs == 1 else 1
            return results

    one = explained(Once(), "shape.K=7")
    assert not one.again
    assert one.smallest is None
    assert "run again, it passes" in "\n".join(failure_lines(one, "x.py"))


def test_time_for_explanations_is_limited_and_one_of_each_family_comes_first():
    kernel = build(BY_NAME["ScaleNone"])
    report = run_suite(kernel, only=["gate.slow", "gate.channel_ramp", "keys.positive"])
    assert report.count("fail") == 3
    found = explain_failures(report, kernel, "x.py", seconds=0)
    assert [one.verdict.id for one in found] == [v.id for v in report.verdicts]
    assert not any(one.searched for one in found)
    order = explaining._one_of_each_family_first(report.verdicts)
    assert {report.verdicts[index].id.split(".")[0] for index in order[:2]} == {"gate", "keys"}


def test_an_interrupt_while_explaining_leaves_what_was_found(monkeypatch):
    kernel = build(BY_NAME["ScaleNone"])
    report = run_suite(kernel, only=["shape.T=2", "keys.positive"])

    def interrupted(verdict, *rest):
        if verdict.id == "keys.positive":
            raise KeyboardInterrupt
        return explain_one(verdict, *rest)

    monkeypatch.setattr(explaining, "explain_one", interrupted)
    found = explain_failures(report, kernel, "x.py", seconds=0)
    assert [one.verdict.id for one in found] == ["shape.T=2"]
    assert "keys.positive" in text(report, kernel, "x.py", explained=found)
    assert "<b>keys.positive</b>: " in page(report, found, "x.py")
    report.missing = 7
    assert "7 checks were not judged" in page(report, found, "x.py")


# JSON and the page


class Hostile(type(build(BY_NAME["WUngated"]))):
    """Wrong, and with markup in everything it says."""

    def identity(self):
        return "<script>alert('x')</script> & co"

    def run(self, call, want):
        if call.q.shape[1] == 2:
            raise RuntimeError("<img src=http://example.org/x.png>")
        return super().run(call, want)


@pytest.fixture(scope="module")
def hostile():
    kernel = Hostile(CONTRACT)
    report = run_suite(kernel, only=["gate.channel_ramp", "shape.T=2", "keys.random", "exact.wide", "relation.signs"])
    return report, unhurried(explain_failures, report, kernel, "<b>x</b>.py")


def test_json_has_its_version_and_every_part_of_an_explanation_as_plain_data(hostile):
    report, found = hostile
    entry = json.loads(json.dumps(as_json(report, found), allow_nan=False))
    assert entry["schema"] == SCHEMA == 1
    assert entry["counts"]["fail"] == len(entry["failures"]) == len(found)
    (failure,) = (one for one in entry["failures"] if one["id"] == "gate.channel_ramp")
    assert failure["suspects"][0]["name"] == "WUngated"
    assert failure["growth"]["result"] == "o"
    assert len(failure["growth"]["curve"]) > 8
    assert failure["smallest"]["case"]["T"] < 5
    assert failure["links"][0]["address"].startswith("https://")
    assert {row["name"] for row in failure["results"]} == {"o", "final_state"}
    (row,) = (row for row in entry["families"] if row["family"] == "gate")
    assert row["worst_check"] == "gate.channel_ramp"
    assert row["price"] > 4


class Loads(HTMLParser):
    """Tags, and every attribute that makes a browser fetch something."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.fetched = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "data", "xlink:href", "poster", "action") or (name == "href" and tag != "a"):
                self.fetched.append(value)


def test_the_page_loads_nothing_and_escapes_what_a_kernel_says(hostile):
    report, found = hostile
    html = page(report, found, "<b>x</b>.py")
    loads = Loads(html)
    assert "script" not in loads.tags
    assert "img" not in loads.tags
    assert "&lt;script&gt;alert" in html
    assert "&lt;img src=http://example.org" in html
    assert "<b>x</b>" not in html
    assert all(value.startswith(("data:image/png;base64,", "#")) for value in loads.fetched)
    assert any(value.startswith("data:") for value in loads.fetched)  # the picture is there
    assert "url(http" not in html
    assert "@import" not in html


def test_the_page_says_verdict_ratios_places_and_the_way_to_see_it_again(hostile):
    report, found = hostile
    html = page(report, found, "x.py")
    for said in (
        "FAIL",
        "Families of checks",
        "first bad row of o",
        "no gate in w",
        "Smallest failing input",
        "kimi-linear conformance run x.py --only gate.channel_ramp",
        "error / envelope",
        "fit: ",
        "keys.random",
        "ratio_rec",
    ):
        assert said in html, said
    assert html.count("<svg") == 3  # rows and growth of the case, rows of the exact one
    assert html.count("<figcaption>") == html.count("<svg")
    assert "currentColor" in html


def test_a_page_of_a_kernel_that_passes_shows_its_ratios(hostile):
    kernel = chunk_kernel(32, "bf16")
    report = run_suite(kernel, only=["shape.T=2", "exact.square"])
    html = page(report, [], "x.py")
    assert "PASS" in html
    assert "All 2 checks that were judged pass" in html
    assert re.search(r"shape\.T=2</td><td>pass, [\w ]+</td>\n<td class=\"n\">[\d.]+</td>", html)
    assert page(Report("nothing ran"), [], "x.py")


def test_text_explains_some_failures_and_lists_the_others(hostile):
    report, found = hostile
    said = text(report, None, "x.py", explained=found)
    assert said.count("\nFAIL ") == min(len(found), 5)
    assert all(v.id in said for v in report.verdicts if v.failed)
