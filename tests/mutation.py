"""Mutation testing of the code behind a verdict: `make mutation`. Small changes there have to fail a test.

    python tests/mutation.py build/mutation                     all modules
    python tests/mutation.py build/mutation --only verdict      one of them
    python tests/mutation.py build/mutation --resume            go on where a run was interrupted

Each module is changed in a folder of its own and has to be held by its own tests: what only a kernel's test would
notice is hard to place. What the type checker refuses is left out of the count. mutmut finds code by the path that
users import, so the packages are laid out under that name first. What it cannot change is module-level code and
functions under a decorator, such as the closed forms themselves.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
REQUIRED = 0.9  # share of the changes to a module that its tests have to notice
NOTICED = ("killed", "timeout", "segfault")
REFUSED = "caught by type check"
TYPES = [sys.executable, "-m", "mypy", "--output", "json"]
TYPES += ["--no-warn-unused-ignores"]  # mutmut writes lines of its own
TYPES += ["--cache-dir", "../../.mypy_cache", "-m"]  # of all modules
FRONT = "tests/conformance/test_front_gradients.py::"
TESTS = {
    "verdict": ["tests/conformance/test_verdict.py"],
    "envelope": ["tests/test_envelope.py"],
    "gold": [
        "tests/conformance/test_allowance.py",
        "tests/conformance/test_gold.py",
        FRONT + "test_errors_of_tokens_add_up_like_noise",
        FRONT + "test_the_truth_is_what_finite_differences_give",
        FRONT + "test_the_same_gate_of_other_raw_inputs_is_another_truth",
    ],
    "integers": ["tests/conformance/test_cases.py"],
    "precision": ["tests/conformance/test_allowance.py"],
    "closed_forms": ["tests/conformance/test_closed_forms.py"],
}


def lay_out(folder: Path, module: str) -> None:
    """Copy what the run needs; mutmut sees by the dates of files what has changed since the last one."""
    for name, source in PACKAGES.items():
        shutil.copytree(ROOT / source, folder.joinpath(*name.split(".")), dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests", folder / "tests", dirs_exist_ok=True)
    own = f"only_mutate = {json.dumps([f'kimi_linear/conformance/{module}.py'])}\n"
    own += f"pytest_add_cli_args_test_selection = {json.dumps(TESTS[module])}\n"
    own += f"type_check_command = {json.dumps([*TYPES, f'kimi_linear.conformance.{module}'])}\n"
    settings = (ROOT / "pyproject.toml").read_text().replace("[tool.mutmut]\n", f"[tool.mutmut]\n{own}")
    (folder / "pyproject.toml").write_text(settings)


def mutmut(folder: Path, *arguments: str, output: bool = False) -> str:
    """One call of mutmut in a folder; stop where it fails, as it does where a test fails without any change."""
    command = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE if output else None)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return done.stdout or ""


def outcomes(results: str) -> dict[str, str]:
    """What became of each change, from lines such as `kimi_linear.conformance.gold.x_truth_of__mutmut_1: killed`."""
    lines = [line.strip().rsplit(": ", 1) for line in results.splitlines() if "__mutmut_" in line]
    return dict(lines)


def score(outcome: dict[str, str]) -> tuple[int, int]:
    """Changes noticed, and all that types allow; what an interrupted run did not try is not noticed."""
    count = Counter(status in NOTICED for status in outcome.values() if status != REFUSED)
    return count[True], count.total()


def too_low(noticed: int, count: int) -> bool:
    """Whether the tests of a module notice too little, or nothing was measured."""
    return count == 0 or noticed < REQUIRED * count


def try_module(folder: Path, module: str, workers: int) -> tuple[int, int]:
    """Change one module here and there; print what its tests miss, and how much they notice."""
    lay_out(folder, module)
    mutmut(folder, "run", "--max-children", str(workers))
    outcome = outcomes(mutmut(folder, "results", "--all", "true", output=True))
    for name, status in outcome.items():
        if status not in (*NOTICED, REFUSED):
            print(f"{status:10} {name}")
    noticed, count = score(outcome)
    refused = len(outcome) - count
    print(f"{module:14} {noticed} of {count} changes noticed; {refused} are refused by their types", flush=True)
    return noticed, count


def main(
    folder: Annotated[Path, typer.Argument(help="Where the copies go.")],
    only: Annotated[list[str] | None, typer.Option(help="Modules; all by default.")] = None,
    workers: Annotated[int, typer.Option(help="Changes tried at the same time.")] = 2,
    resume: Annotated[bool, typer.Option(help="Keep what an interrupted run found.")] = False,
) -> None:
    """Change the comparison code here and there, print how much of it tests notice, fail below nine of ten."""
    wanted = only or list(TESTS)
    if unknown := set(wanted) - set(TESTS):
        raise typer.BadParameter(f"--only must be among {list(TESTS)}; got {sorted(unknown)}")
    scores = {}
    for module in wanted:
        if not resume:
            shutil.rmtree(folder / module, ignore_errors=True)
        scores[module] = try_module(folder / module, module, workers)
    for module, (noticed, count) in scores.items():
        print(f"{module:14} {noticed} of {count} changes noticed ({noticed / max(count, 1):.1%})")
    if low := [module for module, found in scores.items() if too_low(*found)]:
        sys.exit(f"below {REQUIRED:.0%}, or not measured: {', '.join(low)}")


if __name__ == "__main__":
    typer.run(main)
