"""The score: bugs that are planted are seen, and nothing correct is blamed."""

import pytest

from kimi_linear.conformance.mutants import MUTANTS
from kimi_linear.conformance.panel import chunk_kernel
from kimi_linear.conformance.score import Score, measure

NAMES = ("GateShift", "BetaBf16", "GradDiagonal", "StridesIgnored", "InverseOfBf16")


def test_mutants_are_many_have_names_of_their_own_and_say_what_is_broken():
    assert len(MUTANTS) >= 120
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(len(mutant.bug) > 5 for mutant in MUTANTS)


@pytest.mark.slow
def test_a_handful_of_bugs_is_seen_by_the_quick_checks_and_a_correct_kernel_passes():
    chosen = [mutant for mutant in MUTANTS if mutant.name in NAMES]
    score = measure(chosen, [chunk_kernel(32, "bf16")], full=False, first_kill=True)
    assert score.survivors == []
    assert score.false_alarms == []
    assert score.killed == len(NAMES)


def test_the_score_counts_what_is_alone_redundant_and_enough():
    kills = {"a": ["x.1"], "b": ["x.1", "y.1"], "c": ["y.1", "y.2"], "d": []}
    families = {"x.1": "x", "y.1": "y", "y.2": "y", "z.1": "z"}
    score = Score(kills=kills, tiers=dict.fromkeys(families, "ratio"), families=families)
    assert score.survivors == ["d"]
    assert score.killed == 3
    assert score.alone() == {"x.1": ["a"]}
    assert score.redundant_families() == ["z"]
    assert set(score.smallest_cover()) == {"x.1", "y.1"}
    assert score.by_tier() == {"ratio": 3}
