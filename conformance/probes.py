"""Slips below any honest tolerance, found by their direction.

A write strength rounded to bf16 moves every output by less than the roundings that a bf16 kernel makes anyway; but
it moves them in one direction that can be computed. The kernel's error is projected on it:

    coefficient = <error, slip> / <slip, slip>       each row over its envelope first

near 1 where the slip is, near 0 where it is not, since roundings point nowhere in particular. Output and final
state are projected each for itself, because a kernel computes them by different ways. A stored format shows in the
bits: an fp32 state whose low 16 bits are all zero was a bf16 state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..reference.naive import recurrent_kda
from . import fitting
from .bench import TOKEN_TENSORS, Bench
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
    "gate": "mild",
    "beta": "uniform",
    "K": 24,
    "V": 32,
    "seed": 5,
}
NORM_KNOBS: dict[str, object] = {
    "front": "l2norm",
    "keys": "length_0.01",
    "queries": "length_0.01",
}  # eps is 1 % below the root
LOG2E_BF16 = 1.4453125  # log2(e) in bf16


@dataclass(frozen=True)
class Probe:
    """A slip by name: the results of a recurrence that commits it, and the input on which it shows."""

    id: str
    catches: str
    slip: Callable[[Problem], Results]
    why_not: Callable[[Bench], str | None] = lambda bench: None
    knobs: dict[str, object] = field(default_factory=dict)
    results: tuple[str, ...] = ("o", "final_state")


def results_of(problem: Problem, **tensors: Tensor) -> Results:
    """The recurrence's results for other inputs."""
    moved = replace(problem, judge=replace(problem.judge, **tensors))  # type: ignore[arg-type]
    o, S = recurrent_kda(*moved.inputs(), **moved.options(), output_final_state=True)
    assert S is not None
    return {"o": o, "final_state": S}


def beta_in_bf16(problem: Problem) -> Results:
    """beta rounded to bf16."""
    return results_of(problem, beta=to_format(problem.judge.beta, "bf16"))


def gate_in_bf16(problem: Problem) -> Results:
    """The gate rounded to bf16."""
    return results_of(problem, g=to_format(problem.judge.g, "bf16"))


def cumulative_gate_in_bf16(problem: Problem) -> Results:
    """G rounded in each chunk: the gates become differences of rounded sums."""
    pieces = []
    for g in problem.judge.g.split(problem.contract.chunk_size or 1, dim=1):
        G = to_format(g.cumsum(1), "bf16")
        pieces.append(torch.cat([G[:, :1], G[:, 1:] - G[:, :-1]], 1).clamp(max=0))
    return results_of(problem, g=torch.cat(pieces, 1))


def log2e_in_bf16(problem: Problem) -> Results:
    """Gates times log2(e) as bf16 holds it, over log2(e)."""
    return results_of(problem, g=problem.judge.g * (LOG2E_BF16 * math.log(2)))


def state_in_bf16(problem: Problem) -> Results:
    """The state rounded after every chunk but the last (after every token, where there are no chunks)."""
    x, C = problem.judge, problem.contract.chunk_size or 1
    S, outputs = x.h0, []
    for start in range(0, x.q.shape[1], C):
        part = {name: getattr(x, name)[:, start : start + C] for name in TOKEN_TENSORS}
        S = None if S is None else to_format(S, "bf16")
        piece = results_of(problem, **part, h0=S)  # type: ignore[arg-type]
        outputs.append(piece["o"])
        S = piece["final_state"]
    assert S is not None
    return {"o": torch.cat(outputs, 1), "final_state": S}


def eps_outside(problem: Problem) -> Results:
    """q and k over |x| + eps, where sqrt(|x|^2 + eps) is meant: the length that the inputs of this probe have."""
    assert problem.raw is not None
    raw_q, raw_k = problem.raw.q, problem.raw.k
    q, k = (x / (x.norm(dim=-1, keepdim=True) + problem.raw.form.l2norm_eps) for x in (raw_q, raw_k))
    return results_of(problem, q=q, k=k)


def _normalises(bench: Bench) -> str | None:
    return fitting.why_not(bench.case(**NORM_KNOBS), bench.caps, bench.contract)


def _chunked(bench: Bench) -> str | None:
    return None if bench.contract.chunk_size else "a kernel without chunks has no cumulative gate"


def _long_state(bench: Bench) -> str | None:
    short = MANTISSA[bench.contract.state] <= MANTISSA["bf16"]
    return f"its state is declared to be {bench.contract.state}" if short else None


PROBES = [
    Probe("probe.beta_bf16", "a write strength rounded to bf16", beta_in_bf16),
    Probe("probe.gate_bf16", "a gate rounded to bf16", gate_in_bf16),
    Probe("probe.cumulative_bf16", "a cumulative gate rounded to bf16", cumulative_gate_in_bf16, _chunked),
    Probe("probe.log2e", "a gate converted to log2 units with a rounded constant", log2e_in_bf16),
    Probe(
        "probe.state_bf16",
        "a state kept in bf16 between chunks, though the one that is returned has all its bits",
        state_in_bf16,
        _long_state,
        knobs={"beta": "zero"},  # products read the state in their operands' format, and no write hides the rest
        results=("final_state",),
    ),
    Probe("probe.l2norm_eps", "eps of the normalisation outside its root", eps_outside, _normalises, NORM_KNOBS),
]


def run_probe(probe: Probe, bench: Bench) -> Verdict:
    """Project the kernel's error on the slip's direction, output and final state apart."""
    case = bench.case(**{**PROBE_KNOBS, **probe.knobs})
    problem = bench.problem(case)
    got, slipped = bench.run(case), probe.slip(problem)
    coefficients = {name: coefficient_of(name, got, problem, slipped) for name in probe.results}
    verdict = Verdict(probe.id, "probe", "pass", ratios=coefficients, contract=bench.contract)
    verdict.limit = PROBE_COEFFICIENT
    found = [name for name, c in coefficients.items() if PROBE_COEFFICIENT < c < PROBE_BEYOND]
    if found:
        verdict.status = "fail"
        shares = " and ".join(f"{name} with coefficient {coefficients[name]:.2f}" for name in found)
        verdict.reason = f"{probe.catches}: its direction is in the error of {shares}"
    return verdict


def coefficient_of(name: str, got: Results, problem: Problem, slipped: Results) -> float:
    """How much of the slip's own error is in the kernel's."""
    truth, weight = truth_of(problem)[name], 1 / envelopes_of(problem)[name][..., None]
    slip = (slipped[name] - truth) * weight
    error = (got[name].double() - truth) * weight
    square = (slip * slip).sum().item()
    return (error * slip).sum().item() / square if square else 0.0


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
