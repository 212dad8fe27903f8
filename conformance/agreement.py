"""Relations by ratio: results that must agree with each other, but not to the last bit.

The allowed difference is the sum of the rounding envelopes of what is compared.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .bench import TOKEN_TENSORS, Bench, changed
from .envelope import error_ratio
from .gold import Results, envelopes_of
from .limits import FORWARD_RATIO
from .problem import Problem
from .relation import RELATIONS, Add, Check, Relation
from .verdict import Verdict


def agreement(id: str, catches: str, *needs: str) -> Add:
    """Add a check by ratio to RELATIONS."""

    def add(check: Check) -> Check:
        RELATIONS.append(
            Relation(f"agreement.{id}", catches, check, ("sequences", *needs), "agreement", tier="limit")
        )
        return check

    return add


def agree(id: str, bench: Bench, want: Results, got: Results, problems: list[Problem]) -> Verdict:
    """The verdict of two results that may differ by the envelopes of all problems together."""
    ratios = {}
    for name in ("o", "final_state"):
        allowed = torch.stack([envelopes_of(problem)[name] for problem in problems]).sum(0)
        ratios[name] = error_ratio(got[name].double(), want[name].double(), allowed).max().item()
    verdict = Verdict(id, "limit", "pass", ratios=ratios, limit=FORWARD_RATIO, contract=bench.contract)
    name = max(ratios, key=lambda name: ratios[name])
    if not ratios[name] <= FORWARD_RATIO:
        verdict.status = "fail"
        verdict.reason = f"{name} differs by {ratios[name]:.3g} roundings; the limit is {FORWARD_RATIO:g}"
    return verdict


@agreement("linear", "a term that is neither of the values nor of the state")
def linear(bench: Bench) -> Verdict:
    """f(v, h0) = f(v, 0) + f(0, h0): outputs and states are linear in values and initial state."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    assert x.h0 is not None
    parts = [x, changed(x, h0=0 * x.h0), changed(x, v=0 * x.v)]
    whole, of_values, of_state = (bench.run(case, part) for part in parts)
    both = {name: of_values[name].double() + of_state[name].double() for name in whole}
    return agree("agreement.linear", bench, both, whole, [bench.problem(case, part) for part in parts])


@agreement("columns", "a value column that depends on its neighbours")
def columns(bench: Bench) -> Verdict:
    """Value columns are independent: with the others at 0, a column's results stay."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    assert x.h0 is not None
    kept = (torch.arange(x.v.shape[-1]) % 3 == 1).double()
    part = changed(x, v=kept * x.v, h0=kept * x.h0)
    want = {name: kept * y.double() for name, y in bench.run(case, x).items()}
    problems = [bench.problem(case, x), bench.problem(case, part)]
    return agree("agreement.columns", bench, want, bench.run(case, part), problems)


@agreement("contracts", "a chunk size, or a form, that is wrong where another is right", "several")
def contracts(bench: Bench) -> Verdict:
    """Every chunk size, and the recurrent form, give one result for the same inputs."""
    others = [other for other in bench.caps.contracts if other != bench.contract and other.io == bench.contract.io]
    case = bench.case(B=1, T=70)
    x, want = bench.inputs(case), bench.run(case)
    found = [Verdict("agreement.contracts", "limit", "pass", contract=bench.contract)]
    for contract in others:
        other = replace(bench, contract=contract)
        problems = [bench.problem(case, x), other.problem(case, x)]
        found.append(agree("agreement.contracts", bench, want, other.run(case, x), problems))
    return max(found, key=lambda verdict: (verdict.failed, verdict.worst))


@agreement("key_order", "key channels that are not treated alike")
def key_order(bench: Bench) -> Verdict:
    """Key channels in reverse, of q, k, g and the state, leave o and give the state's rows in reverse."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    assert x.h0 is not None
    flipped = {name: getattr(x, name).flip(-1) for name in TOKEN_TENSORS if name in ("q", "k", "g")}
    part = changed(x, **flipped, h0=x.h0.flip(-2))
    got = bench.run(case, part)
    back = {"o": got["o"], "final_state": got["final_state"].flip(-2)}
    return agree("agreement.key_order", bench, bench.run(case, x), back, [bench.problem(case, x)] * 2)
