"""The truth itself: the fp64 recurrence and its gradients against fifty digits."""

import dataclasses
import functools

import mpmath
import numpy as np
import pytest
import torch

from kimi_linear.conformance.adapter import Capabilities, Contract
from kimi_linear.conformance.cases import Case
from kimi_linear.conformance.envelope import error_ratio
from kimi_linear.conformance.gold import envelopes_of, rows_of, truth_of
from kimi_linear.conformance.problem import problem_of

FINEST = (Contract(io="fp32", operand="fp32", chunk_size=16), Contract(io="fp32", operand="fp32", chunk_size=None))
CAPS = Capabilities(operations=("chunk", "recurrent", "backward"))
CERTIFIED = 0.01  # the truth's own error, in units of the smallest envelope that it is a truth for
STEP = mpmath.mpf(10) ** -20  # a central difference with fifty digits is right to forty
NAMES = ("q", "k", "v", "g", "beta", "h0")
exp = np.vectorize(mpmath.exp, otypes=[object])

SMALL = Case("gold", "gold", "small enough for fifty digits", T=7, group=1, K=4, V=3, flags=("gradients",))
HARD = {
    "mild gates": {},
    "keys of cosine 0.99": {"keys": "cosine_0.99", "gate": "slow", "beta": "high"},
    "one key and its negative, beta 2": {"keys": "flipped", "gate": "slow", "beta": "two"},
    "gates of -20 between slow ones": {"gate": "half_strong"},
    "gates of -5": {"gate": "bound"},
    "a needle": {"values": "needle"},
}


@pytest.fixture(autouse=True)
def _fifty_digits():
    with mpmath.workdps(50):
        yield


def in_digits(x):
    """An fp64 tensor as an array of numbers with fifty digits."""
    return np.vectorize(mpmath.mpf, otypes=[object])(x.numpy())


def recurrence(q, k, v, g, beta, h0, scale):
    """One head, token by token, in whatever numbers the arrays hold."""
    S, outputs = h0, []
    for t in range(len(q)):
        S = exp(g[t])[:, None] * S
        S = S + np.outer(k[t], beta[t] * (v[t] - k[t] @ S))
        outputs.append(scale * (q[t] @ S))
    return np.array(outputs), S


def gradients(arrays, do, dht, scale):
    """Central differences of <do, o> + <dht, S> with respect to every number."""

    def loss(name, index, step):
        moved = {**arrays, name: arrays[name].copy()}
        moved[name][index] += step
        o, S = recurrence(**moved, scale=scale)
        return (do * o).sum() + (dht * S).sum()

    found = {}
    for name, x in arrays.items():
        found[f"d{name}"] = np.empty(x.shape, dtype=object)
        for index in np.ndindex(x.shape):
            found[f"d{name}"][index] = (loss(name, index, STEP) - loss(name, index, -STEP)) / (2 * STEP)
    return found


@functools.cache
def fifty_digits(case):
    """o, final_state and the gradients of a case of one head, rounded to fp64 at the very end."""
    problem = problem_of(case, CAPS, FINEST[0])
    x = problem.judge
    arrays = {name: in_digits(getattr(x, name)[0, :, 0]) for name in NAMES[:5]} | {"h0": in_digits(x.h0[0, 0])}
    o, S = recurrence(**arrays, scale=mpmath.mpf(x.scale))
    found = {"o": o, "final_state": S}
    found |= gradients(arrays, in_digits(x.do[0, :, 0]), in_digits(x.dht[0, 0]), mpmath.mpf(x.scale))
    return {name: torch.tensor(y.astype(np.float64)) for name, y in found.items()}


def own_ratios(problem, got=None):
    """The truth's error over the envelope of the finest contract, for each result."""
    got, bounds = got or truth_of(problem), envelopes_of(problem)
    ratios = {}
    for name, want in fifty_digits(problem.case).items():
        want = want[None, None] if name in ("final_state", "dh0") else want[None, :, None]
        ratios[name] = error_ratio(rows_of(got[name], name), rows_of(want, name), bounds[name]).max().item()
    return ratios


@pytest.mark.parametrize("contract", FINEST, ids=str)
@pytest.mark.parametrize("hard", HARD, ids=HARD.keys())
def test_the_truth_and_its_gradients_agree_with_fifty_digits(hard, contract):
    case = dataclasses.replace(SMALL, **HARD[hard])
    ratios = own_ratios(problem_of(case, CAPS, contract))
    assert set(ratios) == {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dh0"}
    assert max(ratios.values()) < CERTIFIED, ratios


def test_a_truth_that_is_off_by_a_quarter_of_an_fp32_rounding_would_not_be_certified():
    problem = problem_of(SMALL, CAPS, FINEST[0])
    off = {name: x * (1 + 2.0**-26) for name, x in truth_of(problem).items()}
    assert max(own_ratios(problem).values()) < CERTIFIED < min(own_ratios(problem, off).values())
