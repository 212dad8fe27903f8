"""Identities between a backward's own results, and between them and derivatives taken the other way.

None of these uses the reference's adjoint: an error that the adjoint and a kernel share would show here.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .adapter import GRADIENTS
from .bench import Bench, changed, tokens
from .cases import Case, Tensors
from .closed_forms import closed_form
from .draws import Draw
from .gold import Results, envelopes_of, rows_of
from .guard import guarded_run
from .limits import GRADIENT_RATIO
from .problem import Problem
from .verdict import Verdict, judge_by_ratio

DIRECTIONS = 3


def identity_residuals(got: Results, x: Tensors, bounds: Results) -> dict[str, tuple[Tensor, Tensor]]:
    """Identities between a backward's own results: residual and allowed error, for each.

    <dq, q> = <do, o>                        a token and key head: o is linear in q
    <dk, k> + <dv, v> = 2 beta dbeta         a token: k -> c k, v -> c v, beta -> beta / c^2 changes nothing else
    <dv, v> + <dh0, h0> = <do, o> + <dht, S> over all: o and S are linear in (v, h0)
    dg_first = rowsum(h0 dh0)                the first gate scales h0
    """
    assert x.do is not None
    assert x.dht is not None
    assert x.h0 is not None
    grads = {name: y.double() for name, y in got.items()}
    H = x.q.shape[2]

    def by_key_head(y: Tensor) -> Tensor:
        return y.unflatten(2, (H, -1)).sum(3)

    def size(y: Tensor) -> Tensor:
        return y.norm(dim=-1)

    def spread(name: str, width: int) -> Tensor:
        return bounds[name] * width**0.5

    K, V = x.q.shape[-1], x.v.shape[-1]
    o, S = got["o"].double(), got["final_state"].double()
    do_o, bound_o = (x.do * o).sum(-1), size(x.do) * spread("o", V)
    dv_v, bound_v = (grads["dv"] * x.v).sum(-1), size(x.v) * spread("dv", V)
    dk_k = (grads["dk"] * x.k).sum(-1)
    bound_k, bound_q = size(x.k) * spread("dk", K), size(x.q) * spread("dq", K)
    beta_dbeta, bound_beta = 2 * x.beta * grads["dbeta"], 2 * x.beta.abs() * bounds["dbeta"].squeeze(-1)
    h0_dh0, bound_h0 = (x.h0 * grads["dh0"]).sum(-1), size(x.h0) * spread("dh0", V)
    S_dht, bound_S = (S * x.dht).sum(), (size(x.dht) * spread("final_state", V)).norm()
    total = dv_v.sum() + h0_dh0.sum() - do_o.sum() - S_dht
    allowed = bound_v.norm() + bound_h0.norm() + bound_o.norm() + bound_S
    return {
        "<dq, q> = <do, o>": ((grads["dq"] * x.q).sum(-1) - by_key_head(do_o), bound_q + by_key_head(bound_o)),
        "<dk, k> + <dv, v> = 2 beta dbeta": (
            dk_k + by_key_head(dv_v - beta_dbeta),
            bound_k + by_key_head(bound_v + bound_beta),
        ),
        "<dv, v> + <dh0, h0> = <do, o> + <dht, S>": (total, allowed),
        "dg of the first token = rowsum(h0 dh0)": (
            grads["dg"][:, 0] - h0_dh0,
            bound_h0 + spread("dg", K)[:, 0, :, None],
        ),
    }


@closed_form(
    "gradient_identities", "a term that the backward forgets", "backward", B=1, T="C+3", flags=("gradients",)
)
def gradient_identities(bench: Bench, case: Case, id: str) -> Verdict:
    """Four identities between gradients, outputs and inputs."""
    problem = bench.problem(case)
    got = guarded_run(bench.adapter, problem, bench.caps, seconds=bench.seconds)
    plain = replace(problem.case, flags=())
    forward = changed(problem.judge, do=None, dht=None)
    got |= guarded_run(bench.adapter, bench.problem(plain, forward), bench.caps, seconds=bench.seconds)
    residuals = identity_residuals(got, problem.judge, envelopes_of(problem))
    ratios = {name: (residual.abs() / bound).max().item() for name, (residual, bound) in residuals.items()}
    broken = [name for name, ratio in ratios.items() if not ratio <= GRADIENT_RATIO]
    verdict = Verdict(id, "limit", "fail" if broken else "pass", ratios=ratios, limit=GRADIENT_RATIO)
    verdict.contract = problem.contract
    verdict.reason = "; ".join(f"{name} is broken by {ratios[name]:.3g} roundings" for name in broken)
    return verdict


def input_of(x: Tensors, gradient: str) -> Tensor:
    """The input that a gradient belongs to: q of "dq"."""
    found = getattr(x, gradient[1:])
    assert isinstance(found, Tensor)
    return found


def direction(problem: Problem, bounds: Results, number: int) -> Results:
    """A random direction for each input, by gradient, in which every row counts by its own allowed error."""
    found = {}
    for name in GRADIENTS:
        shape = input_of(problem.judge, name).shape
        normal = torch.from_numpy(Draw(problem.case.seed + number, f"along_{name}").normal(*shape))
        width = bounds[name][..., None] if name != "dbeta" else bounds[name]
        found[name] = normal / width.clamp(min=width.max() * 2.0**-20)
    return found


def forward_derivative(x: Tensors, along: Results) -> float:
    """<do, change of o> + <dht, change of S> in fp64: the product rule, token by token; for a batch."""
    assert x.do is not None
    assert x.dht is not None
    assert x.h0 is not None
    group = x.v.shape[2] // x.q.shape[2]
    q, k, dq, dk = (y.repeat_interleave(group, 2) for y in (x.q, x.k, along["dq"], along["dk"]))
    S, dS, total = x.h0, along["dh0"], 0.0
    for t in range(q.shape[1]):
        decay, dg = x.g[:, t].exp()[..., None], along["dg"][:, t, ..., None]
        S, dS = decay * S, decay * dS + dg * decay * S
        error = x.v[:, t] - _read(S, k[:, t])
        derror = along["dv"][:, t] - _read(S, dk[:, t]) - _read(dS, k[:, t])
        beta, dbeta = x.beta[:, t, :, None], along["dbeta"][:, t, :, None]
        u, du = beta * error, dbeta * error + beta * derror
        dS = dS + dk[:, t, ..., None] * u[:, :, None] + k[:, t, ..., None] * du[:, :, None]
        S = S + k[:, t, ..., None] * u[:, :, None]
        total += x.scale * (x.do[:, t] * (_read(S, dq[:, t]) + _read(dS, q[:, t]))).sum().item()
    return total + (x.dht * dS).sum().item()


def _read(S: Tensor, key: Tensor) -> Tensor:
    """S^T k of every head."""
    return (S * key[..., None]).sum(-2)


@closed_form("gradient_duality", "a backward of another function", "backward", B=1, T="C+3", flags=("gradients",))
def gradient_duality(bench: Bench, case: Case, id: str) -> Verdict:
    """Gradients along three random directions are what the product rule gives there, token by token."""
    problem = bench.problem(case)
    got, bounds = bench.run(case), envelopes_of(problem)
    verdict = Verdict(id, "limit", "pass", limit=GRADIENT_RATIO, contract=bench.contract)
    for number in range(1, DIRECTIONS + 1):
        along = direction(problem, bounds, number)
        change = sum((got[name].double() * along[name]).sum().item() for name in GRADIENTS)
        allowed = sum(
            (rows_of(along[name], name) * bounds[name][..., None]).square().sum().item() for name in GRADIENTS
        )
        ratio = abs(change - forward_derivative(problem.judge, along)) / allowed**0.5
        verdict.ratios[f"direction {number}"] = ratio
        if not ratio <= GRADIENT_RATIO:
            verdict.status = "fail"
            verdict.reason = f"gradients along a random direction are off by {ratio:.3g} roundings"
    return verdict


@closed_form(
    "gradient_split", "a gradient that is lost between calls", "backward", B=1, T="2C+5", flags=("gradients",)
)
def gradient_split(bench: Bench, case: Case, id: str) -> Verdict:
    """Two backward calls, joined by the state and its gradient, are one."""
    problem = bench.problem(case)
    x, cut = problem.judge, bench.C + 1
    assert x.do is not None
    first, second = tokens(x, slice(0, cut)), tokens(x, slice(cut, None))
    S = bench.run(replace(case, flags=()), first)["final_state"].double()
    after = bench.run(case, changed(second, h0=S, do=x.do[:, cut:], dht=x.dht))
    before = bench.run(case, changed(first, do=x.do[:, :cut], dht=after["dh0"].double()))
    joined = {name: torch.cat([before[name], after[name]], 1) for name in GRADIENTS if name != "dh0"}
    return judge_by_ratio({**joined, "dh0": before["dh0"]}, problem, id, "limit")
