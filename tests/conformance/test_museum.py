"""The museum of public bugs and the suite know each other."""

import ast
import re
from pathlib import Path

import pytest

import known_bugs
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.guard import CRASH
from kimi_linear.conformance.museum import bug_named, museum, url_of
from kimi_linear.conformance.mutants import MUTANTS, build
from kimi_linear.conformance.suite import all_checks, check_by_id

ROOT = Path(__file__).parent.parent.parent


def test_the_museum_is_large_and_no_bug_is_there_twice():
    names = [bug.bug for bug in museum()]
    assert len(names) == len(set(names)) >= 40


def test_every_link_of_a_check_or_a_mutant_is_in_the_museum():
    links = {link for check in all_checks() for link in check.links} | {
        mutant.link for mutant in MUTANTS if mutant.link
    }
    assert len(links) > 20
    for link in links:
        assert bug_named(link).bug == link


def test_every_bug_is_shown_by_a_check_or_a_test_that_exists():
    known = {check.id for check in all_checks()}
    for bug in museum():
        assert bug.all_checks or bug.tests, f"nothing shows {bug.bug}"
        assert set(bug.checks) <= known, f"{bug.bug}: {set(bug.checks) - known}"
        for test in bug.tests:
            file, _, name = test.partition("::")
            functions = {
                node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")
            }
            assert name in functions, f"{bug.bug}: no {test}"


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.link], ids=lambda mutant: mutant.name)
def test_a_bug_planted_after_a_public_one_is_seen_by_a_check_that_the_museum_names(mutant):
    kernel = build(mutant)
    bench = Bench(kernel, kernel.capabilities(), kernel.contract)
    verdicts = (check_by_id(id)(bench) for id in bug_named(mutant.link).all_checks)
    assert any(verdict.failed and not verdict.reason.startswith(CRASH) for verdict in verdicts)


def test_addresses_are_those_of_public_threads():
    assert url_of("tt-metal #54813") == "https://github.com/tenstorrent/tt-metal/issues/54813"
    for bug in museum():
        assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/issues/\d+", bug.url)
    with pytest.raises(ValueError, match="must be 'project #number'"):
        url_of("nowhere #1")
    with pytest.raises(KeyError, match="no bug 'vllm #1'"):
        bug_named("vllm #1")


def test_the_page_is_what_the_data_says():
    assert known_bugs.PAGE.read_text() == known_bugs.page(), "run python docs/known_bugs.py"
    assert set(known_bugs.TITLES) >= {bug.where for bug in museum()}
