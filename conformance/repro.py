"""A failure as a short script: the smallest input that fails, its contract, and the kernel by its path.

The names that such a script needs are importable from here.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from .adapter import Contract, load_adapter
from .bench import Bench
from .cases import Case
from .gold import truth_of
from .suite import Check, case_check, check_by_id
from .trials import SizedBench, Smallest
from .verdict import summary_line

__all__ = [
    "Bench",
    "Case",
    "Contract",
    "SizedBench",
    "case_check",
    "check_by_id",
    "load_adapter",
    "repro_script",
    "summary_line",
    "truth_of",
]

FOR_A_CASE = '''"""{title}"""
from kimi_linear.conformance.repro import Bench, Case, Contract, case_check, load_adapter, summary_line, truth_of

adapter = load_adapter({where!r})
case = {case}
bench = Bench(adapter, adapter.capabilities(), {contract})
verdict = case_check(case)(bench)
print(summary_line(verdict), verdict.place or "", sep="\\n")
problem = bench.problem(case)  # problem.call is what the kernel gets
if verdict.ratios:
    results, exact = bench.run(case, finite=False), truth_of(problem)
    print({{name: (results[name].double() - exact[name]).abs().max().item() for name in results}})
raise SystemExit(verdict.failed)
'''

FOR_A_CHECK = '''"""{title}"""
from kimi_linear.conformance.repro import Contract, SizedBench, check_by_id, load_adapter, summary_line

adapter = load_adapter({where!r})
bench = SizedBench(adapter, adapter.capabilities(), {contract}, sizes={sizes})
verdict = check_by_id({id!r})(bench)
print(summary_line(verdict), verdict.place or "", sep="\\n")
for problem in bench.seen:  # problem.call is what the kernel gets
    print({{name: tuple(x.shape) for name, x in problem.call.tensors().items()}})
raise SystemExit(verdict.failed)
'''


def repro_script(check: Check, contract: Contract, where: str, smallest: Smallest | None, case: Case | None) -> str:
    """About ten lines that run one check on its smallest failure; exit code 1 as long as it fails.

    case: the catalogue's, where nothing smaller is known; None for a check of another kind.
    """
    case = smallest.case if smallest is not None else case
    title = (
        f"{check.id}{', made smaller' if smallest is not None and smallest.reduced else ''}: {check.comment}".replace(
            '"""', "'''"
        )
    )
    known = {"title": title, "where": where, "contract": as_code(contract), "id": check.id}
    if case is not None:
        return FOR_A_CASE.format(**known, case=as_code(case))
    return FOR_A_CHECK.format(**known, sizes={} if smallest is None else smallest.sizes)


def as_code(x: Any) -> str:
    """A dataclass as a call that makes it, without what is as by default; a case without its story."""
    given = []
    for known in fields(x):
        value = getattr(x, known.name)
        if known.name in ("comment", "effect", "links") and isinstance(x, Case):
            given += ["''"] if known.name == "comment" else []
        elif known.name == "flags" and isinstance(x, Case):
            kept = tuple(flag for flag in x.flags if flag != "quick")
            given += [f"flags={kept!r}"] if kept else []
        elif known.default is MISSING:
            given.append(repr(value))
        elif value != known.default or isinstance(x, Contract):
            given.append(f"{known.name}={value!r}")
    return f"{type(x).__name__}({', '.join(given)})"
