"""The suite under pytest, in processes of its own, from a folder that is no checkout."""

import os
import subprocess
import sys
import textwrap
from xml.etree import ElementTree

import pytest

KERNEL = """
    from dataclasses import replace
    from kimi_linear.conformance.panel import chunk_kernel

    kernel = chunk_kernel(16, "fp32")
    identity, convolve = kernel.identity, kernel.convolve

    def capabilities():
        return replace(kernel.capabilities(), beta_above_one=False)

    def run(call, want):
        results = kernel.run(call, want)
        wrong = call.k.shape[-1] in (60, 40) and call.do is None
        return {name: 1.5 * x if wrong else x for name, x in results.items()}
"""
WAIVERS = """
    shape.K=40,V=8: narrow values, until release 2
    gate.slow: slow gates, until release 2
"""
SUITE = ("--pyargs", "kimi_linear.conformance", "--kda-kernel", "my_kernel.py")


def pytest_in(folder, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV_"))}
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "my_kernel.py").write_text(textwrap.dedent(KERNEL))
    (tmp_path / "waivers").write_text(textwrap.dedent(WAIVERS))
    return tmp_path


def outcomes(file):
    """What pytest made of each check, and what it says."""
    found = {}
    for case in ElementTree.parse(file).iter("testcase"):
        said = next((part for part in case if part.tag in ("failure", "skipped")), None)
        kind = "passed" if said is None else said.get("type", said.tag).removeprefix("pytest.")
        found[case.get("name").partition("[")[0]] = (
            kind,
            "" if said is None else (said.text or "") + said.get("message"),
        )
    return found


@pytest.mark.parametrize("workers", ["0", pytest.param("2", marks=pytest.mark.slow)])
def test_each_check_is_an_item_with_its_verdict(folder, workers):
    wanted = "shape.K or gate.slow or gate.bound or strength.two"
    done = pytest_in(folder, *SUITE, "--kda-waivers", "waivers", "-n", workers, "-k", wanted, "--junitxml", "out.xml")
    assert done.returncode == 1, done.stdout + done.stderr
    found = outcomes(folder / "out.xml")
    kinds = {name: kind for name, (kind, _) in found.items()}
    assert kinds == {
        "shape.K=60": "failure",
        "shape.K=40,V=8": "xfail",
        "gate.slow": "failure",  # it passes, and a waiver says it does not
        "gate.bound": "passed",
        "strength.two": "skip",
    }
    assert "again: kimi-linear conformance run my_kernel.py --only shape.K=60" in found["shape.K=60"][1]
    assert "narrow values, until release 2" in found["shape.K=40,V=8"][1]
    assert "Remove the waiver" in found["gate.slow"][1]
    assert "beta above 1 is not declared" in found["strength.two"][1]
    assert "Traceback" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*SUITE[:-1], "missing.py"), "no such file: missing.py"),
        ((*SUITE, "--kda-waivers", "missing"), "No such file or directory: 'missing'"),
        (SUITE[2:], "add `--pyargs kimi_linear.conformance`"),
        (("--kda-full",), "need --kda-kernel"),
    ],
)
def test_what_cannot_be_judged_is_an_error_and_says_why(folder, arguments, message):
    done = pytest_in(folder, *arguments)
    assert done.returncode in (2, 4)  # pytest's codes for an interrupted collection and for wrong usage
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_other_peoples_sessions_get_options_and_nothing_else(tmp_path):
    (tmp_path / "test_of_theirs.py").write_text(
        "def test_it(pytestconfig):\n"
        "    import sys\n"
        "    assert pytestconfig.getoption('--kda-kernel') is None\n"
        "    assert not {'torch', 'kimi_linear.conformance', 'typer'} & set(sys.modules)\n"
    )
    done = pytest_in(tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
