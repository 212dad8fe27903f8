"""Identities between the gradients of what a front end gets: no reference takes part.

<dq, q> = <dk, k> = 0    of raw rows: a normalised vector does not change with its length (but for eps)
ddt_bias = sum of dg     over all tokens: every one of them has that bias
dA_log   = sum of dg s   over all tokens and channels, s as in `rate_slope`: the rate multiplies what x enters
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .bench import Bench
from .cases import Case
from .closed_forms import closed_form
from .front_gradients import rate_slope
from .gold import Results, envelopes_of
from .guard import guarded_run
from .limits import GRADIENT_RATIO
from .problem import Problem, RawInputs, problems_of
from .verdict import Verdict

Residuals = dict[str, tuple[Tensor, Tensor]]
KNOBS: dict[str, Any] = {
    "front": "l2norm",
    "flags": ("gradients",),
    "T": "C/4+5",
    "K": 20,
    "keys": "raw",
    "queries": "raw",
}


def residuals_of_lengths(got: Results, raw: RawInputs, bounds: Results) -> Residuals:
    """<dq, q> and <dk, k> of raw rows, and what is allowed."""
    found = {}
    for name, x in (("dq", raw.q), ("dk", raw.k)):
        allowed = x.norm(dim=-1) * bounds[name] * x.shape[-1] ** 0.5
        found[f"<{name}, {name[1:]}> = 0"] = (got[name].double() * x).sum(-1), allowed
    return found


def residuals_of_sums(got: Results, raw: RawInputs, bounds: Results) -> Residuals:
    """ddt_bias and dA_log less what dg says, and what is allowed: errors of tokens add up like noise."""
    dg, slope, width = got["dg"].double(), rate_slope(raw), bounds["dg"][..., None]
    noise = (width.square().sum((0, 1)) + bounds["ddt_bias"][:, None].square()).sqrt()
    noise_of_rate = (width * slope).square().sum((0, 1, 3)).sqrt() + bounds["dA_log"]
    return {
        "ddt_bias = sum of dg": (got["ddt_bias"].double() - dg.sum((0, 1)), noise),
        "dA_log = sum of dg s": (got["dA_log"].double() - (dg * slope).sum((0, 1, 3)), noise_of_rate),
    }


def ratios_of(problem: Problem, bench: Bench) -> dict[str, float]:
    """Each identity's residual over what is allowed, for one front end."""
    assert problem.raw is not None
    got = guarded_run(bench.adapter, problem, bench.caps, seconds=bench.seconds)
    bounds, form = envelopes_of(problem), problem.raw.form
    residuals = residuals_of_lengths(got, problem.raw, bounds)
    residuals |= {} if form.gate is None else residuals_of_sums(got, problem.raw, bounds)
    ratios = {name: (residual.abs() / allowed).max().item() for name, (residual, allowed) in residuals.items()}
    return {f"{name}, {form.gate or 'no'} gate": ratio for name, ratio in ratios.items()}


@closed_form("front_gradients", "a sum over tokens that misses some, or a gradient along a normalised row", **KNOBS)
def front_gradients(bench: Bench, case: Case, id: str) -> Verdict:
    """Identities between gradients of raw projections and of a gate's parameters, for every front end."""
    ratios: dict[str, float] = {}
    for problem in problems_of(case, bench.caps, bench.contract):
        ratios |= ratios_of(problem, bench)
    broken = [name for name, ratio in ratios.items() if not ratio <= GRADIENT_RATIO]
    reason = "; ".join(f"{name} is broken by {ratios[name]:.3g} roundings" for name in broken)
    status = "fail" if broken else "pass"
    return Verdict(id, "limit", status, reason, ratios, GRADIENT_RATIO, contract=bench.contract)
