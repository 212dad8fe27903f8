"""The score: bugs that are planted are seen, and nothing correct is blamed."""

import datetime

import pytest
from typer.testing import CliRunner

from kimi_linear.cli.main import app
from kimi_linear.conformance.adapter import GRADIENTS
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.decode import first_call
from kimi_linear.conformance.emulated import Emulated
from kimi_linear.conformance.measure import in_processes, judge_mutant, measure, steps
from kimi_linear.conformance.mutants import MUTANTS, Mutant, build
from kimi_linear.conformance.panel import chunk_kernel
from kimi_linear.conformance.score import KernelScore, Score
from kimi_linear.conformance.score_page import STAYS, markdown, row
from kimi_linear.conformance.score_record import ScoreRecord
from kimi_linear.conformance.score_text import score_lines
from kimi_linear.conformance.suite import all_checks, check_by_id

NAMES = ("GateShift", "BetaBf16", "GradDiagonal", "StridesIgnored", "InverseOfBf16")


def test_mutants_are_many_have_names_of_their_own_and_say_what_is_broken():
    assert len(MUTANTS) >= 120
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert all(len(mutant.bug) > 5 for mutant in MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_runs_a_plain_call_without_a_crash(mutant):
    kernel = build(mutant)
    bench = Bench(kernel, kernel.capabilities(), kernel.contract)
    for flags in ((), ("gradients",)):
        call = bench.problem(bench.case(B=1, T=5, H=1, flags=flags)).call
        want = frozenset(GRADIENTS if flags else ("o", "final_state"))
        assert want <= kernel.run(call, want).keys()
    kernel.run(first_call(bench), frozenset(("o",)))


@pytest.mark.slow
def test_a_handful_of_bugs_is_seen_by_the_quick_checks_and_a_correct_kernel_passes():
    chosen, told = [mutant for mutant in MUTANTS if mutant.name in NAMES], []
    kernels = [chunk_kernel(32, "bf16")]
    score = measure(chosen, kernels, full=False, first_kill=True, tell=told.append)
    assert score.survivors == []
    assert score.false_alarms == []
    assert score.killed == len(NAMES)
    assert score.ok
    assert len(told) == steps(chosen, kernels)
    assert 0.3 < score.panel[0].forward < 4
    assert 0.3 < score.panel[0].backward < 8


def test_a_mutant_that_crashes_is_not_seen(one_check):
    class Crashes(Emulated):
        def inverse(self, A):
            raise RuntimeError("no such instruction")

    mutant = Mutant("Crashes", "inverse", "it raises", Crashes, "bf16")
    score = measure([mutant], [], full=True)
    assert score.survivors == ["Crashes"]
    assert score.crashes == {"Crashes": ["shape.T=2"]}
    assert "not seen: Crashes (it crashes in shape.T=2)" in list(score_lines(score))


@pytest.fixture
def one_check(monkeypatch):
    """The suite is one cheap check."""
    monkeypatch.setattr("kimi_linear.conformance.measure._checks", lambda full: [check_by_id("shape.T=2")])


def test_a_score_that_was_interrupted_goes_on_where_it_stopped(tmp_path, monkeypatch, one_check):
    chosen = [mutant for mutant in MUTANTS if mutant.name in NAMES]
    order: list[str] = []
    want, path = measure(chosen, [], tell=order.append), tmp_path / "score.jsonl"

    def interrupt(line):
        if line == order[-3]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(chosen, [], tell=interrupt, record=ScoreRecord(path))
    path.write_text(path.read_text() + '{"name": "cut o')
    judged, told = [], []
    again = lambda mutant, *rest: judged.append(mutant.name) or judge_mutant(mutant, *rest)  # noqa: E731
    monkeypatch.setattr("kimi_linear.conformance.measure.judge_mutant", again)
    found = measure(chosen, [], tell=told.append, record=ScoreRecord(path))
    assert judged == order[-2:]
    assert len(told) == steps(chosen, [])
    assert found == want
    assert found.killed > 0


def test_a_score_does_not_go_on_from_another_mode_or_other_code(tmp_path, monkeypatch, one_check):
    path = tmp_path / "score.jsonl"
    measure([], [], full=False, record=ScoreRecord(path))
    with pytest.raises(ValueError, match="the mode was 'quick' and is 'full'"):
        measure([], [], full=True, record=ScoreRecord(path))
    result = CliRunner().invoke(app, ["conformance", "score", "--full", "--resume", str(path)])
    assert result.exit_code == 2
    assert "cannot be resumed: the mode" in result.output
    monkeypatch.setattr("kimi_linear.conformance.score_record.score_version", lambda: "other code")
    with pytest.raises(ValueError, match="the suite or the mutants was"):
        measure([], [], full=False, record=ScoreRecord(path))


def test_several_processes_give_what_one_gives_in_order():
    with in_processes(1) as one, in_processes(2) as two:
        tasks = [(n, 3) for n in range(5)]
        assert list(two(pow, tasks)) == list(one(pow, tasks)) == [0, 1, 8, 27, 64]
        assert list(two(pow, [])) == []


@pytest.mark.parametrize(
    ("killed", "full", "alarms", "ok"),
    [
        (9, False, [], True),
        (8, False, [], False),
        (9, True, [], False),
        (10, True, [], True),
        (10, True, [("a correct kernel", "x.1", "off")], False),
    ],
)
def test_what_is_required_is_all_bugs_in_full_mode_and_nine_of_ten_in_quick(killed, full, alarms, ok):
    kills = {f"m{n}": ["x.1"] if n < killed else [] for n in range(10)}
    score = Score(kills=kills, full=full, false_alarms=alarms, tiers={"x.1": "ratio"}, families={"x.1": "x"})
    assert score.ok == ok
    assert f"required: {'100%' if full else '90%'}" in "\n".join(score_lines(score))


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
    assert score.by_family() == {"x": 2, "y": 2}


def test_the_page_shows_both_modes_the_panel_and_every_bug():
    bug = MUTANTS[0]
    kills = {bug.name: ["exact.dense", "gate.zero"]}
    tiers = {"exact.dense": "exact", "gate.zero": "ratio"}
    score = Score(kills, tiers=tiers, families={"exact.dense": "exact", "gate.zero": "gate"}, kernels=1)
    score.panel = [KernelScore("a correct kernel", passed=2, forward=1.25)]
    page = "\n".join(markdown([score.quick(), score], command="this command"))
    assert "| quick | 1 of 1 | 90% | 0 on 1 kernels | none |" in page
    assert "| full | 1 of 1 | 100% |" in page
    assert "| a correct kernel | 2 | 0 | 1.25 | 0.00 |" in page
    assert f"{row(bug)} 1 |  |  | 1 |  |" in page
    assert f"`this command` on {datetime.date.today()} with kimi-linear-reference" in page
    assert score.quick().kills[bug.name] == ["exact.dense"]


def test_every_family_says_why_it_stays():
    assert set(STAYS) == {check.family for check in all_checks()}


def test_a_score_that_is_interrupted_says_how_to_go_on(monkeypatch, tmp_path):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kimi_linear.cli.score.measure", interrupted)
    result = CliRunner().invoke(app, ["conformance", "score", "--resume", str(tmp_path / "score.jsonl")])
    assert result.exit_code == 2
    assert "interrupted; the same command with --resume" in result.output
