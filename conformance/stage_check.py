"""Which stage goes wrong first, for a kernel that shows its stages: each against the fp64 one, in its own envelope.

A stage is judged by what the whole kernel made of it, so the first wrong one is where the fault is; those after it
may only have inherited it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from .adapter import STAGES
from .bench import Bench, changed
from .envelope import error_ratio
from .gold import stage_truth
from .guard import KernelFailure, guarded_run
from .limits import FORWARD_RATIO
from .problem import Problem, problem_of
from .spread import grid_of

FORMULAS = {
    "G": "stage 1: g_1 + .. + g_i inside the chunk",
    "A": "stage 2: beta_i <k_i, k_j exp(G_i - G_j)>, j < i",
    "Aqk": "stage 2: scale <q_i, k_j exp(G_i - G_j)>, j <= i",
    "T": "stage 3: (I + A)^-1",
    "w": "stage 4: T (beta k exp(G))",
    "u": "stage 4: T (beta v)",
    "v_new": "stage 5: u - w S",
}


@dataclass(frozen=True)
class StageRow:
    """One stage: its worst ratio and its first bad row."""

    name: str
    formula: str
    ratio: float
    first: str

    @property
    def ok(self) -> bool:
        return self.ratio <= FORWARD_RATIO


def can_be_staged(bench: Bench) -> bool:
    """Whether a kernel shows stages under this contract."""
    return bool(bench.caps.stages) and bench.contract.chunk_size is not None


def stage_rows(bench: Bench, problem: Problem) -> list[StageRow]:
    """Every declared stage, in the order of the computation. Raises KernelFailure with what is wrong with them.

    Gradients have no stages of their own: their forward's are checked.
    """
    case = replace(problem.case, flags=tuple(flag for flag in problem.case.flags if flag != "gradients"))
    forward = problem_of(case, bench.caps, bench.contract, changed(problem.judge, do=None, dht=None))
    declared = [name for name in STAGES if name in bench.caps.stages]
    want = frozenset(("o", "final_state", *declared))
    got = guarded_run(bench.adapter, forward, bench.caps, want, bench.seconds, finite=False)
    exact, bounds = stage_truth(forward)
    rows = []
    for name in declared:
        if got[name].shape != exact[name].shape:
            raise KernelFailure(f"{name} must be {list(exact[name].shape)}; got {list(got[name].shape)}")
        ratio = error_ratio(got[name], exact[name], bounds[name])
        worst = ratio.max().item() if ratio.numel() else 0.0
        first = "" if worst <= FORWARD_RATIO else _first(~(ratio <= FORWARD_RATIO), forward)
        rows.append(StageRow(name, FORMULAS[name], worst, first))
    return rows


def _first(bad: Tensor, problem: Problem) -> str:
    t, b, head = bad.transpose(0, 1).nonzero()[0].tolist()
    token, C = int(grid_of(problem).token[b, t]), problem.contract.chunk_size or 1
    return f"token {t} (chunk {token // C}, row {token % C}), head {head}"


def first_wrong(rows: list[StageRow]) -> str | None:
    """The first stage over the limit."""
    return next((row.name for row in rows if not row.ok), None)
