"""A correct kernel at inputs that are in no catalogue: nothing is blamed. A draw's name says what it draws."""

import random

import numpy as np
import pytest

from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.cases import Case
from kimi_linear.conformance.draws import BETAS, GATES, KEYS, KEYS_BY_NUMBER, VALUES, Draw, drawn
from kimi_linear.conformance.guard import guarded_run
from kimi_linear.conformance.mutants import MUTANTS, build
from kimi_linear.conformance.panel import panel
from kimi_linear.conformance.problem import problem_of
from kimi_linear.conformance.verdict import judge_by_ratio

DRAWS = 100
UNIT = [
    "random",
    "positive",
    "duplicate",
    "flipped",
    "runs",
    "one_hot",
    "signed_one_hot",
    "cycle",
    "tiny",
    "zero",
    "long",
]
UNIT += ["cosine_0.9", "cosine_0.97", "flipped_0.9", "runs_5"]
DEFINED = sorted(set(GATES) - {"minus_infinity"})  # which other kernels need not take


def random_case(rng, C):
    """Sizes, lengths, draws and a seed of which the catalogue has none (its seeds are below 1000)."""
    lengths = tuple(rng.randrange(C + 9) for _ in range(rng.randrange(1, 5))) if rng.random() < 0.25 else None
    keys = rng.choice(UNIT)
    return Case(
        "drawn", "drawn", "drawn",
        flags=("gradients",) if rng.random() < 0.3 else (),
        B=1 if lengths else rng.randrange(1, 4),
        T=rng.randrange(1, 2 * C + 7),
        lengths=lengths,
        past_end=rng.randrange(3) if lengths else 0,
        H=rng.randrange(1, 4), group=rng.randrange(1, 4), K=rng.randrange(1, 41), V=rng.randrange(1, 41),
        gate=rng.choice(DEFINED),
        keys=keys,
        beta=rng.choice(sorted(BETAS) if keys != "long" else ["uniform", "high", "one"]),  # beta |k|^2 below 2
        values=rng.choice(sorted(set(VALUES) - {"large", "needle"})),
        state=rng.choice(["none", "zero", "random"]),
        scale=rng.choice([None, 0.3]),
        seed=1000 + rng.randrange(10**6),
    )  # fmt: skip


def judged(kernel, case):
    bench = Bench(kernel, kernel.capabilities(), kernel.contract)
    problem = problem_of(case, bench.caps, bench.contract)
    return judge_by_ratio(guarded_run(kernel, problem, bench.caps), problem, case.id, "ratio")


@pytest.mark.slow
def test_a_hundred_draws_of_sizes_and_seeds_never_seen_raise_no_alarm_on_correct_kernels():
    rng, kernels, alarms, worst = random.Random(7), panel(), [], []
    for n in range(DRAWS):
        kernel = kernels[n % len(kernels)]
        case = random_case(rng, kernel.contract.chunk_size or 16)
        verdict = judged(kernel, case)
        worst.append(verdict.worst)
        if verdict.failed:
            alarms.append((kernel.identity(), case, verdict.reason))
    assert alarms == []
    assert sum(ratio > 0.1 for ratio in worst) > DRAWS / 2  # something was judged


def test_the_same_draws_see_a_mild_bug():
    rng, kernel = random.Random(7), build(next(m for m in MUTANTS if m.name == "GateShift"))
    assert any(judged(kernel, random_case(rng, 32)).failed for _ in range(4))


def test_a_draw_may_have_a_number_in_its_name():
    keys = drawn("cosine_0.95", KEYS, KEYS_BY_NUMBER)(Draw(1, "k"), (2, 50, 1, 64))
    cosines = keys[0, :, 0] @ keys[0, :, 0].T
    assert 0.85 < np.median(cosines) < 0.95  # 0.95 to the common direction, so 0.9 to each other
    with pytest.raises(ValueError, match=r"one of random, .*cosine_NUMBER.*; got 'cosine_high'"):
        drawn("cosine_high", KEYS, KEYS_BY_NUMBER)
    with pytest.raises(ValueError, match="got 'no_such'"):
        drawn("no_such", KEYS, KEYS_BY_NUMBER)
