"""What each choice of precision costs: emulated kernels that differ in one choice, in units of one envelope.

    python benchmarks/precision.py        writes results/precision.json and prints the table

The unit is the rounding envelope of the usual contract: bf16 in and out, bf16 operands, sums, state and inverse in
fp32, chunks of 32. A kernel of just that contract costs about 1; the suite's limit is 4. The inputs are cases of the
catalogue, K and V at 24 and 20; a long text is 12 chunks, over which an error of the state would add up. Kernels that
go token by token have a unit of their own: the same formats, but fp32 operands.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kimi_linear.conformance.adapter import Contract
from kimi_linear.conformance.cases import length_of
from kimi_linear.conformance.catalogue import by_id
from kimi_linear.conformance.emulated import Emulated, EmulatedRecurrent
from kimi_linear.conformance.guard import guarded_run
from kimi_linear.conformance.limits import FORWARD_RATIO
from kimi_linear.conformance.mutants import MUTANTS
from kimi_linear.conformance.problem import problem_of
from kimi_linear.conformance.verdict import row_ratios

RECORD = Path(__file__).parent / "results" / "precision.json"
USUAL = Contract(io="bf16", operand="bf16", accumulate="fp32", state="fp32", chunk_size=32)
TOKENS = replace(USUAL, operand="fp32", chunk_size=None)
CASES = {
    "random keys, slow gate": "keys.random",
    "the same, 12 chunks": "keys.random",
    "strong gate": "gate.strong",
    "keys of cosine 0.97": "keys.cosine_0.97",
    "runs of a token": "keys.runs",
}
LONG = "12C"


def usual(**contract: str) -> Emulated:
    """The usual kernel, other formats in some places."""
    return Emulated(replace(USUAL, **contract))


def planted(name: str) -> Emulated:
    """The usual kernel with one step replaced, as the mutant of that name does it."""
    (mixin,) = (mutant.mixin for mutant in MUTANTS if mutant.name == name)
    return type(name, (mixin, Emulated), {})(USUAL)


CHOICES: dict[str, Callable[[], Emulated]] = {
    "the usual: bf16 operands, the rest fp32": usual,
    "fp16 operands": lambda: usual(operand="fp16"),
    "tf32 operands": lambda: usual(operand="tf32"),
    "fp32 operands": lambda: usual(operand="fp32"),
    "state rounded to bf16 after each chunk": lambda: usual(state="bf16"),
    "state rounded to fp16 after each chunk": lambda: usual(state="fp16"),
    "A rounded to bf16 before the inverse": lambda: planted("InverseOfBf16"),
    "inverse by doubling products, fp32": lambda: planted("InverseDoublingFp32"),
    "inverse by doubling products, bf16": lambda: planted("InverseDoublingBf16"),
    "cumulative gate in fp16": lambda: planted("CumulativeFp16"),
    "cumulative gate in bf16": lambda: planted("CumulativeBf16"),
    "gate in bf16": lambda: planted("GateBf16"),
    "write strength in bf16": lambda: planted("BetaBf16"),
    "exponential with 7 bits": lambda: planted("ExpApproximate"),
    "sums in bf16": lambda: planted("AccumulateBf16"),
    "w in 8 bits": lambda: planted("WShort"),
    "token by token: the state in fp32": lambda: EmulatedRecurrent(TOKENS),
    "token by token: rounded to fp16 each time": lambda: EmulatedRecurrent(replace(TOKENS, state="fp16")),
    "token by token: rounded to bf16 each time": lambda: EmulatedRecurrent(replace(TOKENS, state="bf16")),
}


def cost(kernel: Emulated, name: str) -> list[float]:
    """The worst row's error of o, and of the final state, in units of the envelope."""
    case = by_id(CASES[name])
    case = replace(case, T=LONG) if name.startswith("the same") else case
    unit = TOKENS if kernel.contract.chunk_size is None else USUAL
    if unit is TOKENS and not isinstance(case.T, int):
        case = replace(case, T=length_of(case.T, USUAL.chunk_size or 1))
    problem = problem_of(case, kernel.capabilities(), unit)
    results = guarded_run(kernel, problem, kernel.capabilities(), finite=False)
    ratios = row_ratios(results, problem)
    return [ratios[name].max().item() for name in ("o", "final_state")]


def measure() -> dict[str, dict[str, list[float]]]:
    """Every choice on every case."""
    return {choice: {name: cost(kernel(), name) for name in CASES} for choice, kernel in CHOICES.items()}


def table(costs: dict[str, dict[str, list[float]]]) -> str:
    """Costs of o / of the final state as Markdown, bold where the suite would fail them."""
    lines = ["| choice | " + " | ".join(CASES) + " |", "|---|" + "--:|" * len(CASES)]
    for choice, row in costs.items():
        lines.append(f"| {choice} | {' | '.join(' / '.join(map(number, pair)) for pair in row.values())} |")
    return "\n".join(lines)


def number(x: float) -> str:
    """Two digits; a power of ten where that is all that matters."""
    short = f"{x:.1f}" if x < 10 else f"{x:.0f}" if x < 1e5 else f"{x:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"**{short}**" if x > FORWARD_RATIO else short


if __name__ == "__main__":
    costs = measure()
    RECORD.write_text(json.dumps(costs, indent=1) + "\n")
    print(table(costs))
