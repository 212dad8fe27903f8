"""`kimi-linear conformance`: exit codes, output, waivers."""

import json
import sys

import pytest
from typer.testing import CliRunner

from kimi_linear.cli.main import app
from kimi_linear.conformance.score import Score
from kimi_linear.conformance.score_text import score_lines
from kimi_linear.conformance.search import TYPICAL, Found
from kimi_linear.conformance.verdict import Verdict
from kimi_linear.reference.naive import kda_scan

WRONG = "kimi_linear.conformance.adapters.wrong"
CHUNKED = "kimi_linear.conformance.adapters.chunked"


def command(*arguments):
    return CliRunner().invoke(app, ["conformance", *arguments])


def test_a_pass_is_0_a_failure_1_and_an_error_2():
    assert command("run", CHUNKED, "--only", "shape.T=2").exit_code == 0
    assert command("run", WRONG, "--only", "gate.channel_ramp").exit_code == 1
    missing = command("run", "no_such_kernel.py")
    assert missing.exit_code == 2
    assert "no_such_kernel.py does not load" in missing.stderr
    assert command("run", WRONG, "--only", "no.such.check").exit_code == 2


def test_json_holds_every_verdict(tmp_path):
    file = tmp_path / "report.json"
    command("run", CHUNKED, "--only", "shape.T=2", "--json", str(file))
    report = json.loads(file.read_text())
    assert report["counts"]["pass"] == len(report["verdicts"]) == 3  # one a contract
    assert report["identity"].endswith("chunk_kda")


@pytest.mark.parametrize("status", ["pass", "fail"])
def test_a_search_follows_the_checks_and_decides_with_them(status, tmp_path, monkeypatch):
    asked = []

    def search(kernel, minutes, tell, folder, full, seconds):
        asked.append((minutes, folder))
        return [Found(Verdict("search", "search", status, "a reason", {"o": 9.0}), TYPICAL, 12)]

    monkeypatch.setattr("kimi_linear.cli.search.search", search)
    file, examples = tmp_path / "report.json", tmp_path / "examples"
    options = ("--search", "3", "--examples", str(examples), "--json", str(file), "--only", "shape.T=2")
    found = command("run", CHUNKED, *options)
    assert found.exit_code == (status == "fail")
    assert asked == [(3.0, examples)]
    assert "search, 12 cases" in found.stdout
    assert "Case('search', 'search', 'what published tests draw', T=64" in found.stdout
    assert json.loads(file.read_text())["search"][0]["status"] == status
    command("run", CHUNKED, "--only", "shape.T=2")
    assert len(asked) == 1


def test_a_search_without_hypothesis_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    found = command("run", CHUNKED, "--search", "1", "--only", "shape.T=2")
    assert found.exit_code == 2
    assert "pip install kimi-linear-reference[search]" in found.stderr


def test_algebra_compares_every_number_and_fails_when_one_differs(monkeypatch):
    monkeypatch.setattr("kimi_linear.conformance.algebra.SIZES", [(17,), (0, 33, 1)])
    good = command("algebra", "--heads", "1", "--seed", "3")
    assert good.exit_code == 0
    assert "0 of 8 rows differ" in good.stdout
    assert "0, 33, 1" in good.stdout
    monkeypatch.setattr("kimi_linear.conformance.algebra.kda_scan", lambda *x, scale, S: kda_scan(*x, scale=1, S=S))
    bad = command("algebra", "--heads", "1")
    assert bad.exit_code == 1
    assert "8 of 8 rows differ" in bad.stdout


def test_waivers_have_reasons_and_are_loud_when_they_are_not_needed(tmp_path):
    file = tmp_path / "waivers"
    file.write_text("# known\ngate.channel_ramp: the gate of w, until release 2\n")
    assert command("run", WRONG, "--only", "gate.channel_ramp", "--waivers", str(file)).exit_code == 0
    file.write_text("shape.T=2: no longer true\n")
    unneeded = command("run", WRONG, "--only", "shape.T=2", "--waivers", str(file))
    assert unneeded.exit_code == 1
    assert "Remove the waiver" in unneeded.stdout
    for content in ("gate.channel_ramp:\n", "no.such.check: reason\n"):
        file.write_text(content)
        assert command("run", WRONG, "--waivers", str(file)).exit_code == 2


def test_list_explain_and_repro_say_what_a_check_is():
    listed = command("list").stdout
    assert "relation.causality" in listed
    assert "keys.cosine_0.99" in listed
    assert len(command("list", "--quick").stdout.splitlines()) < len(listed.splitlines())
    assert "tt-metal #54813" in command("explain", "keys.cosine_0.99").stdout
    assert command("explain", "no.such.check").exit_code == 2


@pytest.mark.parametrize("alarms", [[], [("a correct kernel", "gate.slow", "off")]])
def test_a_false_alarm_voids_the_score(alarms):
    score = Score(kills={"a": ["x"]}, false_alarms=alarms, tiers={"x": "ratio"}, families={"x": "x"}, kernels=3)
    said = "\n".join(score_lines(score))
    assert ("VOID" in said) == bool(alarms)
    assert "1 of 1 bugs seen" in said


def test_repro_gives_a_script_of_the_smallest_failure_for_every_kind_of_check(tmp_path):
    whole = command("repro", "relation.reset")
    assert whole.exit_code == 0
    assert "load_adapter('my_kernel.py')" in whole.stdout
    failing = command("repro", "gate.channel_ramp", "--adapter", WRONG)
    assert failing.exit_code == 0
    assert "made smaller" in failing.stdout
    assert "chunk_size=32" in failing.stdout
    passing = command("repro", "shape.T=2", "--adapter", WRONG)
    assert "does not fail shape.T=2" in passing.stderr
    assert "made smaller" not in passing.stdout
    assert command("repro", "no.such.check").exit_code == 2
    assert command("repro", "gate.slow", "--adapter", "nowhere.py").exit_code == 2


def test_a_page_and_json_come_with_the_explanations_that_the_text_has(tmp_path):
    page, file = tmp_path / "out.html", tmp_path / "out.json"
    found = command("run", WRONG, "--only", "gate.channel_ramp", "--report", str(page), "--json", str(file))
    assert found.exit_code == 1
    assert "smallest failing case" in found.stdout
    (failure,) = json.loads(file.read_text())["failures"]
    assert failure["smallest"]["reason"] in found.stdout
    assert failure["smallest"]["reason"] in page.read_text()
    assert "a deliberately wrong kernel" in page.read_text()
