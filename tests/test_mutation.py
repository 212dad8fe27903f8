"""How mutation testing counts, and that it changes what there is to change."""

import sys
from types import SimpleNamespace

import pytest
import typer

import fresh_truth
from mutation import ROOT, lay_out, main, modules, mutmut, outcomes, scores, too_low

PATH = "kimi_linear.conformance."
RESULTS = f"""
    {PATH}gold.x_truth_of__mutmut_1: killed
    {PATH}gold.x_truth_of__mutmut_2: timeout
    {PATH}gold.xǁContractRoundingǁto__mutmut_1: survived
    {PATH}gold.xǁContractRoundingǁto__mutmut_2: no tests
    {PATH}verdict.x_limit_of__mutmut_1: killed
    {PATH}verdict.x_limit_of__mutmut_2: suspicious
    {PATH}envelope.x_rms__mutmut_1: not checked
"""


def test_what_no_test_looked_at_or_was_not_tried_is_not_noticed():
    outcome = outcomes(RESULTS, ["gold", "verdict"])
    assert outcome[f"{PATH}gold.xǁContractRoundingǁto__mutmut_2"] == "no tests"
    assert scores(outcome) == {"gold": (2, 4), "verdict": (1, 2)}
    assert scores(outcomes(RESULTS, ["envelope"])) == {"envelope": (0, 1)}


def test_nine_of_ten_are_enough_for_a_module_and_less_or_nothing_is_not():
    score = {"gold": (9, 10), "verdict": (89, 100), "envelope": (10, 10)}
    assert too_low(score, ["gold", "envelope"]) == []
    assert too_low(score, ["gold", "verdict", "precision"]) == ["verdict", "precision"]


def test_every_module_that_is_changed_is_laid_out(tmp_path):
    lay_out(tmp_path)
    assert len(modules()) >= 6
    for name in modules():
        assert (tmp_path / "kimi_linear" / "conformance" / f"{name}.py").exists()
    assert (tmp_path / "kimi_linear" / "reference" / "naive" / "recurrent.py").exists()
    assert (tmp_path / "tests" / "conformance" / "test_verdict.py").exists()
    assert (tmp_path / "pyproject.toml").read_text() == (ROOT / "pyproject.toml").read_text()


def test_a_module_that_is_not_changed_is_refused_by_name(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"--only must be among .*'verdict'.*; got \['suite'\]"):
        main(tmp_path, only=["verdict", "suite"])


def test_a_run_that_fails_ends_with_its_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(typer.Exit) as ended:
        mutmut(tmp_path, "run")
    assert ended.value.exit_code == 1


def test_quick_tests_come_first_where_their_times_are_known(tmp_path, monkeypatch):
    items = [SimpleNamespace(nodeid=name) for name in ("slow", "new", "quick")]
    monkeypatch.chdir(tmp_path)
    fresh_truth.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["slow", "new", "quick"]
    fresh_truth.SECONDS.write_text('{"duration_by_test": {"slow": 9.0, "quick": 0.5}}')
    fresh_truth.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["new", "quick", "slow"]
