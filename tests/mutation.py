"""Mutation testing of the code behind a verdict: `make mutation`. Small changes there have to fail a test.

    python tests/mutation.py build/mutation                     all modules of [tool.mutmut] in pyproject.toml
    python tests/mutation.py build/mutation --only verdict      one of them
    python tests/mutation.py build/mutation --resume            go on where a run was interrupted

mutmut finds code by the path that users import, so the packages are laid out under that name first. What it cannot
change is module-level code and functions under a decorator, such as the closed forms themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
REQUIRED = 0.9  # share of the changes to a module that tests have to notice
NOTICED = ("killed", "timeout", "segfault", "caught by type check")


def modules() -> list[str]:
    """Names of the modules that are changed."""
    return [Path(path).stem for path in CONFIGURATION["mutmut"]["only_mutate"]]


def lay_out(folder: Path) -> None:
    """Copy what the run needs; mutmut sees by the dates of files what has changed since the last one."""
    for name, source in CONFIGURATION["setuptools"]["package-dir"].items():
        shutil.copytree(ROOT / source, folder.joinpath(*name.split(".")), dirs_exist_ok=True)
    shutil.copytree(ROOT / "tests", folder / "tests", dirs_exist_ok=True)
    shutil.copy2(ROOT / "pyproject.toml", folder)


def mutmut(folder: Path, *arguments: str, output: bool = False) -> str:
    """One call of mutmut in a folder; stop where it fails, as it does where a test fails without any change."""
    command = [sys.executable, "-c", "from mutmut.__main__ import cli; cli()", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE if output else None)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return done.stdout or ""


def outcomes(results: str, wanted: Iterable[str]) -> dict[str, str]:
    """What became of each change, from lines such as `kimi_linear.conformance.gold.x_truth_of__mutmut_1: killed`."""
    lines = [line.strip().rsplit(": ", 1) for line in results.splitlines() if "__mutmut_" in line]
    return {name: status for name, status in lines if _module(name) in wanted}


def scores(outcome: dict[str, str]) -> dict[str, tuple[int, int]]:
    """Changes noticed, and all changes, of each module; what an interrupted run did not try is not noticed."""
    total = Counter(_module(name) for name in outcome)
    noticed = Counter(_module(name) for name, status in outcome.items() if status in NOTICED)
    return {module: (noticed[module], count) for module, count in total.items()}


def _module(name: str) -> str:
    return name.split(".")[-2]


def too_low(score: dict[str, tuple[int, int]], wanted: Iterable[str]) -> list[str]:
    """Modules whose tests notice too little, or for which nothing was measured."""
    return [name for name in wanted if name not in score or score[name][0] < REQUIRED * score[name][1]]


def main(
    folder: Annotated[Path, typer.Argument(help="Where the copies go.")],
    only: Annotated[list[str] | None, typer.Option(help="Modules; all by default.")] = None,
    workers: Annotated[int, typer.Option(help="Changes tried at the same time.")] = 2,
    resume: Annotated[bool, typer.Option(help="Keep what an interrupted run found.")] = False,
) -> None:
    """Change the comparison code here and there, print how much of it tests notice, fail below nine of ten."""
    wanted = only or modules()
    if unknown := set(wanted) - set(modules()):
        raise typer.BadParameter(f"--only must be among {modules()}; got {sorted(unknown)}")
    if not resume:
        shutil.rmtree(folder, ignore_errors=True)
    lay_out(folder)
    mutmut(
        folder, "run", "--max-children", str(workers), *[f"kimi_linear.conformance.{name}.*" for name in only or ()]
    )
    outcome = outcomes(mutmut(folder, "results", "--all", "true", output=True), wanted)
    for name, status in outcome.items():
        if status not in NOTICED:
            print(f"{status:10} {name}")
    score = scores(outcome)
    for name, (noticed, count) in score.items():
        print(f"{name:14} {noticed} of {count} changes noticed ({noticed / count:.1%})")
    if low := too_low(score, wanted):
        sys.exit(f"below {REQUIRED:.0%}, or not measured: {', '.join(low)}")


if __name__ == "__main__":
    typer.run(main)
