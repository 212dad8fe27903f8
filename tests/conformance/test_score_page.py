"""The page of the score is about the mutants, the kernels and the checks that there are."""

import re
from pathlib import Path

import pytest

from kimi_linear.conformance.mutants import MUTANTS
from kimi_linear.conformance.panel import panel
from kimi_linear.conformance.score_page import INTRODUCTION, STAYS, row
from kimi_linear.conformance.suite import all_checks

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "conformance-score.md").read_text()
AGAIN = "run kimi-linear conformance score --full --markdown docs/conformance-score.md"


def test_the_page_says_how_it_was_made():
    assert INTRODUCTION in PAGE
    made = r"Written by `kimi-linear conformance score --full .*` on \d{4}-\d\d-\d\d with kimi-linear-reference \S+,"
    assert re.search(made + r" torch \S+, Python \d", PAGE)


def test_the_page_has_every_mutant_as_it_is_now_and_no_other():
    for mutant in MUTANTS:
        assert row(mutant) in PAGE, f"{mutant.name}: {AGAIN}"
    bugs = PAGE.split("## Bugs")[1].split("## Families")[0]
    rows = re.findall(r"^\| ([A-Z]\w+) \|", bugs, re.M)
    assert sorted(rows) == sorted(mutant.name for mutant in MUTANTS), AGAIN


def test_the_page_has_every_correct_kernel():
    for kernel in panel():
        assert f"| {kernel.identity()} |" in PAGE, AGAIN


@pytest.mark.parametrize(("mode", "required"), [("quick", 0.9), ("full", 1.0)])
def test_the_score_is_what_is_required(mode, required):
    (line,) = re.findall(rf"^\| {mode} \| (\d+) of (\d+) \| .* \| (\d+) on (\d+) kernels \|", PAGE, re.M)
    seen, planted, alarms, kernels = map(int, line)
    assert planted == len(MUTANTS), AGAIN
    assert kernels == len(panel())
    assert alarms == 0
    assert seen >= required * planted


def test_every_row_of_a_bug_has_a_check_that_sees_it():
    for mutant in MUTANTS:
        counts = PAGE.split(row(mutant))[1].split("\n")[0]
        assert re.search(r"\d", counts), mutant.name


def test_families_and_checks_on_the_page_exist():
    families = PAGE.split("## Families")[1].split("## Checks")[0]
    assert set(re.findall(r"^\| (\w+) \| \d+ \|", families, re.M)) == {check.family for check in all_checks()}, AGAIN
    alone = dict(re.findall(r"^\| (\w+) \| \d+ \| (\d+) \|", families, re.M))
    explained = re.findall(r"^- (\w+): (.*)$", families, re.M)
    assert explained == [(family, STAYS[family]) for family in sorted(alone) if alone[family] == "0"]
    assert set(re.findall(r"^- `(\S+)`:", PAGE, re.M)) <= {check.id for check in all_checks()}
