"""Slips below any honest tolerance, found by their direction.

A write strength rounded to bf16 moves every output by less than the roundings that a bf16 kernel makes anyway; but
it moves them in one direction that can be computed. The kernel's error is projected on it:

    coefficient = <error, slip> / <slip, slip>       each row over its envelope first

near 1 where the slip is, near 0 where it is not, since roundings point nowhere in particular. A stored format
shows in the bits: an fp32 state whose low 16 bits are all zero was a bf16 state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..reference.naive import recurrent_kda
from .bench import Bench
from .gold import Results, envelopes_of, truth_of
from .limits import PROBE_BEYOND, PROBE_COEFFICIENT
from .precision import MANTISSA, to_format
from .problem import Problem, state_format
from .verdict import Verdict

PROBE_KNOBS = {
    "B": 3,
    "T": "2C+9",
    "H": 2,
    "group": 1,
    "keys": "random",
    "beta": "uniform",
    "K": 24,
    "V": 32,
    "seed": 5,
}
LOG2E_BF16 = 1.4453125  # log2(e) in bf16


@dataclass(frozen=True)
class Probe:
    """A slip by name: the inputs of a recurrence that commits it."""

    id: str
    catches: str
    gate: str
    slip: Callable[[Problem], Problem]
    applies: Callable[[Bench], bool]


def _with(problem: Problem, **tensors: Tensor) -> Problem:
    return replace(problem, judge=replace(problem.judge, **tensors))  # type: ignore[arg-type]


def beta_in_bf16(problem: Problem) -> Problem:
    """beta rounded to bf16."""
    return _with(problem, beta=to_format(problem.judge.beta, "bf16"))


def gate_in_bf16(problem: Problem) -> Problem:
    """The gate rounded to bf16."""
    return _with(problem, g=to_format(problem.judge.g, "bf16"))


def cumulative_gate_in_bf16(problem: Problem) -> Problem:
    """G rounded in each chunk: the gates become differences of rounded sums."""
    pieces = []
    for g in problem.judge.g.split(problem.contract.chunk_size or 1, dim=1):
        G = to_format(g.cumsum(1), "bf16")
        pieces.append(torch.cat([G[:, :1], G[:, 1:] - G[:, :-1]], 1).clamp(max=0))
    return _with(problem, g=torch.cat(pieces, 1))


def log2e_in_bf16(problem: Problem) -> Problem:
    """Gates times log2(e) as bf16 holds it, over log2(e)."""
    return _with(problem, g=problem.judge.g * (LOG2E_BF16 * math.log(2)))


def _wide_io(bench: Bench) -> bool:
    return True


def _chunked(bench: Bench) -> bool:
    return bench.contract.chunk_size is not None


PROBES = [
    Probe("probe.beta_bf16", "a write strength rounded to bf16", "mild", beta_in_bf16, _wide_io),
    Probe("probe.gate_bf16", "a gate rounded to bf16", "mild", gate_in_bf16, _wide_io),
    Probe("probe.cumulative_bf16", "a cumulative gate rounded to bf16", "mild", cumulative_gate_in_bf16, _chunked),
    Probe("probe.log2e", "a gate converted to log2 units with a rounded constant", "mild", log2e_in_bf16, _wide_io),
]


def run_probe(probe: Probe, bench: Bench) -> Verdict:
    """Project the kernel's error on the slip's direction."""
    case = bench.case(**PROBE_KNOBS, gate=probe.gate)
    problem = bench.problem(case)
    got = bench.run(case)
    coefficient = coefficient_of(got, problem, probe.slip(problem))
    verdict = Verdict(probe.id, "probe", "pass", ratios={"coefficient": coefficient}, contract=bench.contract)
    verdict.limit = PROBE_COEFFICIENT
    if PROBE_COEFFICIENT < coefficient < PROBE_BEYOND:
        verdict.status = "fail"
        verdict.reason = f"{probe.catches}: its direction is in the error with coefficient {coefficient:.2f}"
    return verdict


def coefficient_of(got: Results, problem: Problem, slipped: Problem) -> float:
    """How much of the slip's own error is in the kernel's."""
    truth, bounds = truth_of(problem), envelopes_of(problem)
    o, S = recurrent_kda(*slipped.inputs(), **slipped.options(), output_final_state=True)
    assert S is not None
    along, square = 0.0, 0.0
    for name, moved in (("o", o), ("final_state", S)):
        weight = 1 / bounds[name][..., None]
        slip = (moved - truth[name]) * weight
        error = (got[name].double() - truth[name]) * weight
        along += (error * slip).sum().item()
        square += (slip * slip).sum().item()
    return along / square if square else 0.0


def run_bits(bench: Bench) -> Verdict:
    """Whether a result's low bits are all zero: it was stored in a shorter format than the contract says."""
    case = bench.case(**PROBE_KNOBS)
    got = bench.run(case)
    declared = {"final_state": _longest_state(bench), "o": bench.contract.io}
    verdict = Verdict("probe.bits", "probe", "pass", contract=bench.contract)
    for name, format in declared.items():
        for shorter in ("bf16", "fp16", "tf32"):
            x = got[name]
            if MANTISSA[shorter] < MANTISSA[format] and torch.equal(to_format(x, shorter), x) and x.any():
                verdict.status = "fail"
                verdict.reason = f"every element of {name} is a {shorter} number; the contract says {format}"
    return verdict


def _longest_state(bench: Bench) -> str:
    """The format that the final state has to use in full."""
    returned, stored = state_format(bench.contract, bench.caps), bench.contract.state
    return min(returned, stored, key=lambda name: MANTISSA[name])


BITS_COMMENT = "A result whose low bits are all zero was stored in a shorter format than declared."
