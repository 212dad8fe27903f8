"""How mutation testing counts, and that it changes what there is to change."""

import sys
import tomllib
from types import SimpleNamespace

import pytest
import typer

import fresh_truth
import mutation
from mutation import ROOT, TESTS, lay_out, main, mutmut, outcomes, score, too_low

PATH = "kimi_linear.conformance.gold."
RESULTS = f"""
    {PATH}x_truth_of__mutmut_1: killed
    {PATH}x_truth_of__mutmut_2: timeout
    {PATH}xǁContractRoundingǁto__mutmut_1: survived
    {PATH}xǁContractRoundingǁto__mutmut_2: no tests
    {PATH}x_rows_of__mutmut_1: suspicious
    {PATH}x_rows_of__mutmut_2: not checked
    {PATH}x_rows_of__mutmut_3: caught by type check
"""


def test_what_no_test_looked_at_or_was_not_tried_is_not_noticed():
    outcome = outcomes(RESULTS)
    assert outcome[f"{PATH}xǁContractRoundingǁto__mutmut_2"] == "no tests"
    assert score(outcome) == (2, 6)
    assert score(outcomes("")) == (0, 0)


@pytest.mark.parametrize(
    ("noticed", "count", "low"), [(9, 10, False), (89, 100, True), (10, 10, False), (0, 0, True)]
)
def test_nine_of_ten_are_enough_for_a_module_and_less_or_nothing_is_not(noticed, count, low):
    assert too_low(noticed, count) == low


def test_a_module_is_laid_out_with_all_code_and_its_own_tests(tmp_path):
    lay_out(tmp_path, "verdict")
    assert (tmp_path / "kimi_linear" / "reference" / "naive" / "recurrent.py").exists()
    assert (tmp_path / "tests" / "conformance" / "test_verdict.py").exists()
    settings, ours = (tomllib.loads((path / "pyproject.toml").read_text())["tool"] for path in (tmp_path, ROOT))
    assert settings["mutmut"].pop("only_mutate") == ["kimi_linear/conformance/verdict.py"]
    assert settings["mutmut"].pop("pytest_add_cli_args_test_selection") == ["tests/conformance/test_verdict.py"]
    assert settings["mutmut"].pop("type_check_command")[-2:] == ["-m", "kimi_linear.conformance.verdict"]
    assert settings == ours


def test_every_module_and_every_test_that_is_named_exists():
    assert len(TESTS) >= 6
    for module, tests in TESTS.items():
        assert (ROOT / "conformance" / f"{module}.py").exists()
        for path, _, name in (test.partition("::") for test in tests):
            assert f"def {name}(" in (ROOT / path).read_text() if name else (ROOT / path).exists()


def test_a_module_that_is_not_changed_is_refused_by_name(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"--only must be among .*'verdict'.*; got \['suite'\]"):
        main(tmp_path, only=["verdict", "suite"])


def test_a_run_that_fails_ends_with_its_exit_code(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(typer.Exit) as ended:
        mutmut(tmp_path, "run")
    assert ended.value.exit_code == 1


def test_all_modules_are_tried_and_those_below_nine_of_ten_are_named_at_the_end(tmp_path, monkeypatch, capsys):
    found = {**dict.fromkeys(TESTS, (10, 10)), "gold": (8, 10), "integers": (0, 0)}
    monkeypatch.setattr(mutation, "try_module", lambda folder, module, workers: found[folder.name])
    with pytest.raises(SystemExit, match=r"^below 90%, or not measured: gold, integers$"):
        main(tmp_path)
    assert "gold           8 of 10 changes noticed (80.0%)" in capsys.readouterr().out
    main(tmp_path, only=["verdict"])


def test_what_an_interrupted_run_found_is_kept_where_that_is_asked_for(tmp_path, monkeypatch):
    kept = tmp_path / "verdict" / "found"
    monkeypatch.setattr(mutation, "try_module", lambda folder, module, workers: (int(kept.exists()), 1))
    kept.parent.mkdir()
    kept.touch()
    main(tmp_path, only=["verdict"], resume=True)
    with pytest.raises(SystemExit):
        main(tmp_path, only=["verdict"])


def test_quick_tests_come_first_where_their_times_are_known(tmp_path, monkeypatch):
    items = [SimpleNamespace(nodeid=name) for name in ("slow", "new", "quick")]
    monkeypatch.chdir(tmp_path)
    fresh_truth.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["slow", "new", "quick"]
    fresh_truth.SECONDS.write_text('{"duration_by_test": {"slow": 9.0, "quick": 0.5}}')
    fresh_truth.pytest_collection_modifyitems(items)
    assert [item.nodeid for item in items] == ["new", "quick", "slow"]
