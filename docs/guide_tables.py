"""Fills the tables of the porting guide that are computed: `python docs/guide_tables.py`.

stages      shapes, work and bytes of each stage, from formulas
time        the performance model beside the recorded times (benchmarks/time_model.py)
precision   what each choice costs (benchmarks/precision.py, recorded)
symptoms    from what a user sees to the bug that did it and the check that shows it
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import precision
import time_model
from kimi_linear.conformance.museum import Bug, bug_named

PAGE = ROOT / "docs" / "porting-guide.md"
MARKER = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)
K = V = 128
C = 64
HALF, FULL = 2, 4

SYMPTOMS = [
    ("NaN or inf, forward", "an exponent that is not a sum of gates", ["sglang #27488", "TIRx-kernels #214"]),
    ("NaN in gradients only", "exp before the mask", ["transformers #48455"]),
    ("wrong only where tokens repeat", "the triangular inverse", ["tt-metal #54813"]),
    (
        "wrong only at strong gates, finite",
        "a clamped or factored decay",
        ["megagdn-pto #26", "cudnn-frontend #1017"],
    ),
    ("earlier outputs move with later tokens", "a gate reference that looks ahead", ["flash-linear-attention #1240"]),
    ("benchmarks collapse, unit tests pass", "the state transposed where K = V", ["vllm #41292"]),
    ("right at once, wrong in pieces", "the state lost between calls", ["vllm #52909", "xllm #1873"]),
    ("wrong at lengths no multiple of C", "the tail's mask", ["cuLA #43", "flash-linear-attention #1142"]),
    ("wrong at K = 60 or 100", "the mask past K", ["flash-linear-attention #1134"]),
    (
        "wrong with several heads only",
        "an offset without the head",
        ["flash-linear-attention #1115", "vllm-ascend #3309"],
    ),
    ("one user's text in another's answer", "empty segments, padding, slots", ["FlashKDA #24", "flashinfer #5042"]),
    ("other bits on every run", "a race", ["FlashKDA #25", "sglang #37289"]),
    ("wrong on the second call only", "a cache keyed by too little", ["flash-linear-attention #770", "aiter #4577"]),
    ("drifts with the length of the text", "beta or the state in bf16", ["sglang #38975", "sglang #40362"]),
    ("dg wrong, the rest right", "terms that ought to cancel", ["attention-gym #461", "FlashQLA #28"]),
    ("fluent, but repeats itself", "the wrong gate for the checkpoint", ["FlashKDA #3", "tokenspeed #847"]),
]


def stages() -> str:
    """Work of each stage for a token of one value head; products count as full tiles."""
    row, square = K * HALF, C * HALF
    rows = [
        ("front end", "q, k [T, K], g [T, K], beta [T]", 0, 3 * row + HALF, "tokens, heads", "fp32 inside"),
        ("1 decays", "[C, K] a level", 0, row + K * FULL, "chunks, heads, channels", "fp32; sums of g only"),
        ("2 A, Aqk", "[C, C] each", 4 * C * K, 3 * row + 2 * square, "chunks, heads, blocks", "operands may be half"),
        ("3 T", "[C, C]", 2 * C * C // 3, 2 * square, "chunks, heads", "fp32 sums; half operands from 16 x 16 up"),
        ("4 w, u", "[C, K], [C, V]", 2 * C * (K + V), square + 4 * row, "chunks, heads, slices of K and V", "half"),
        ("5 v_new, S", "[C, V], [K, V]", 4 * K * V, 5 * row, "segments, heads, slices of V", "S in fp32"),
        ("6 o", "[C, V]", 2 * K * V + 2 * C * V, square + 3 * row, "as 5, or chunks too if S is kept", "half"),
    ]
    lines = ["| stage | makes | flop | bytes | parallel over | precision |", "|---|---|--:|--:|---|---|"]
    lines += [f"| {a} | {b} | {flop:,} | {size:,} | {axes} | {note} |" for a, b, flop, size, axes, note in rows]
    total, moved = (sum(r[i] for r in rows) for i in (2, 3))
    return "\n".join([*lines, f"| all | | {total:,} | {moved:,} | | |"])


def symptoms() -> str:
    """Symptoms with their public bugs and the first checks that show each."""
    lines = ["| symptom | likely cause | seen in | shown by |", "|---|---|---|---|"]
    for symptom, cause, names in SYMPTOMS:
        bugs = [bug_named(name) for name in names]
        links = ", ".join(f"[{bug.bug}]({bug.url})" for bug in bugs)
        shown = dict.fromkeys(item for bug in bugs for item in shown_by(bug))
        lines.append(f"| {symptom} | {cause} | {links} | {', '.join(shown)} |")
    return "\n".join(lines)


def shown_by(bug: Bug) -> list[str]:
    """Two checks of a bug, or the tests that hold the line outside the operator."""
    if bug.all_checks:
        return [f"`{check}`" for check in bug.all_checks[:2]]
    return [f"[{Path(file).name}](../{file})" for file in (test.partition("::")[0] for test in bug.tests[:1])]


TABLES = {
    "stages": stages,
    "time": time_model.table,
    "precision": lambda: precision.table(json.loads(precision.RECORD.read_text())),
    "symptoms": symptoms,
}


def page() -> str:
    """The guide with its computed tables."""
    return MARKER.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}\n{match[3]}", PAGE.read_text())


if __name__ == "__main__":
    PAGE.write_text(page())
