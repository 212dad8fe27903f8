"""Writes docs/known-bugs.md from the museum: `python docs/known_bugs.py`."""

from __future__ import annotations

from pathlib import Path

from kimi_linear.conformance.museum import Bug, museum

PAGE = Path(__file__).parent / "known-bugs.md"
TITLES = {
    "inverse": "The triangular inverse",
    "gate": "Gates and exponents",
    "strength": "Write strength, scale, normalisation",
    "state": "States",
    "packing": "Packing",
    "shape": "Shapes and indices",
    "race": "Races, caches, tuning, compilers",
    "backward": "The backward",
    "serving": "Serving",
    "model": "The model around the kernel",
    "testing": "Tests that could not fail",
}
INTRODUCTION = """# Known bugs

Public bugs of delta-rule kernels, and of models and engines that use them: {count}, of which {planted} are planted as
mutants. They were read in public threads and are retold here; no kernel was run again for this page, and numbers are
those of the threads. A line says what the code did, what came of it, and what of ours shows it: a check of the
conformance suite (`kimi-linear conformance explain ID`), or a test of this repository where the bug lies outside the
operator.

Most of them passed their own tests, and the reasons repeat: gates near 0, random keys, K = V, one head, lengths that
are multiples of 64, one call a process, a cosine or a correlation as the measure.

Written by `python docs/known_bugs.py` from `conformance/museum.toml`; a test compares the two.
"""


def line(bug: Bug) -> str:
    """A row of the table."""
    effect = f"{bug.effect}. Missed: {bug.missed}" if bug.missed else bug.effect
    seen = [f"`{check}`" for check in bug.all_checks]
    seen += [f"[{test.rpartition('::')[0].rpartition('/')[2]}](../{test.partition('::')[0]})" for test in bug.tests]
    seen += [f"mutant `{name}`" for name in bug.mutants]
    return f"| [{bug.bug}]({bug.url}) | {bug.broke} | {effect} | {', '.join(dict.fromkeys(seen))} |"


def page() -> str:
    """The whole page."""
    bugs = museum()
    planted = sum(bool(bug.mutants) for bug in bugs)
    parts = [INTRODUCTION.format(count=len(bugs), planted=planted)]
    for where, title in TITLES.items():
        rows = [line(bug) for bug in bugs if bug.where == where]
        head = "| bug | what broke | effect | shown by |\n|---|---|---|---|"
        parts.append(f"## {title}\n\n" + "\n".join([head, *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
