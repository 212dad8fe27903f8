"""What `benchmarks/tune.py` takes for a valid candidate, and how it goes on after others."""

import json
from contextlib import closing

import pytest

import tune
import tune_trial
from expendable import Expendable, LostError
from kimi_linear.triton_kernels import chunk_launch, tuning
from kimi_linear.triton_kernels.chunk_plan import Shape
from tune_trial import Case, try_shapes

CASE = Case("float32", "softplus", channels=32, heads=1, tokens=100)
OTHER = {"tiles": Shape(32, 2), "chunks": Shape(32, 4), "state": Shape(32, 4)}


@pytest.fixture
def timed(monkeypatch):
    """Names of the kernels that were timed last."""
    names = []

    def instead(launches):
        names[:] = [x.kernel.__name__ for x in launches]
        return 0.25

    monkeypatch.setattr(tune_trial, "milliseconds", instead)
    return names


@pytest.fixture
def plant(monkeypatch):
    """Change the launches of a call with the other state shape."""
    original = chunk_launch.chunk_launches

    def planted(change):
        def launches(tensors, ws, call):
            made = original(tensors, ws, call)
            return change(made, ws) if call.plan.state == OTHER["state"] else made

        monkeypatch.setattr(chunk_launch, "chunk_launches", launches)

    return planted


class Spoil:
    """In place of a launch."""

    def __init__(self, spoil):
        self.run, self.kernel = spoil, Spoil


@pytest.mark.parametrize("kernel", OTHER)
def test_a_shape_that_differs_by_rounding_counts(timed, kernel):
    built_in = tune_trial.built_in(CASE)[kernel].shape
    assert built_in.block != OTHER[kernel].block
    assert try_shapes(CASE, {kernel: OTHER[kernel]}) == 0.25
    assert timed == [tune_trial.KERNELS[kernel]]
    assert tune_trial.built_in(CASE)[kernel].shape == built_in, "a table is left in use"


def test_all_kernels_are_timed_where_none_is_named(timed):
    assert try_shapes(CASE, {}) == 0.25
    assert timed == list(tune_trial.KERNELS.values())


def test_a_product_that_is_wrong_from_row_16_on_does_not_count(timed, plant):
    plant(lambda made, ws: [*made[:2], Spoil(lambda: ws.wq[:, :, 16:64].zero_()), made[2]])
    assert try_shapes(CASE, {"state": OTHER["state"]}).startswith("o differs from that of the built-in shapes by")
    assert not timed


def test_one_wrong_row_of_a_state_does_not_count(timed, plant):
    plant(lambda made, ws: [*made[:2], Spoil(lambda: ws.kg[1, 0, 30].mul_(1.1)), made[2]])
    assert try_shapes(CASE, {"state": OTHER["state"]}).startswith("final_state differs")


def test_all_memory_is_nan_before_a_call(plant):
    seen = []
    plant(lambda made, ws: [Spoil(lambda: seen.extend(x.isnan().all() for x in ws if x.is_floating_point()))])
    with tune_trial.in_use(CASE, {"state": OTHER["state"]}):
        _, results = tune_trial.run_call(CASE)
    assert seen
    assert all(seen)
    assert all(x.isnan().all() for x in results.values())


def test_results_that_are_never_written_do_not_count(timed, plant):
    plant(lambda made, ws: made[:2])
    assert "by nan" in try_shapes(CASE, {"state": OTHER["state"]})


def test_a_wrong_candidate_cannot_spoil_what_later_ones_are_held_to(timed, plant):
    plant(lambda made, ws: [*made, Spoil(lambda: tune_trial.expected(CASE)["o"].fill_(7))])
    assert try_shapes(CASE, {"state": OTHER["state"]}).startswith("o differs")
    assert try_shapes(CASE, {"chunks": OTHER["chunks"]}) == 0.25


def test_what_follows_from_a_shape_changes_with_it():
    case = CASE._replace(dtype="float16", channels=64)
    tensors, options = tune_trial.example(case)
    assert not chunk_launch.prepare(tensors, options).plan.wide
    with tune_trial.in_use(case, {"state": Shape(64, 4)}):
        assert chunk_launch.prepare(tensors, options).plan.wide


def fails(text):
    def fail(*_):
        raise RuntimeError(text)

    return fail


def test_what_does_not_compile_is_left_out_and_a_lost_context_ends_the_process(monkeypatch, plant):
    plant(lambda made, ws: [Spoil(fails("PassManager::run failed\nat ..")), *made])
    assert try_shapes(CASE, {"state": OTHER["state"]}) == "RuntimeError: PassManager::run failed"
    monkeypatch.setattr(tune_trial, "synchronize", fails("CUDA error: an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        try_shapes(CASE, {"state": OTHER["state"]})


class Process:
    """Answers from a rule, in place of a GPU's."""

    def __init__(self, rule):
        self.rule = rule

    def run(self, job, case, shapes=None, seconds=None):
        return self.rule(shapes) if job is try_shapes else job(case)


def rule(shapes):
    """Wider is faster; the widest tiles are wrong, and 8 warps take the process down. As built in: 100."""
    if not shapes:
        return 100.0
    if any(shape.warps == 8 for shape in shapes.values()):
        raise LostError("raises AcceleratorError: CUDA error: an illegal memory access")
    if shapes.get("tiles", Shape(16, 1)).block == 32:
        return "o differs"
    return sum(1 / shape.block + shape.stages + shape.warps for shape in shapes.values())


def test_the_fastest_valid_shapes_make_a_table(tmp_path, capsys):
    ticks = []
    launches = tune.tune(CASE, Process(rule), lambda *tick: ticks.append(tick))
    assert [Shape(**launch) for launch in launches.values()] == [Shape(16, 1), Shape(32, 4), Shape(32, 4)]
    assert [key.split()[0] for key in launches] == list(tune_trial.KERNELS)
    said = capsys.readouterr().out.splitlines()
    left_out = [line for line in said if "left out" in line]
    assert sum("illegal memory access" in line for line in left_out) == 8
    assert len(left_out) == 8 + 6
    assert {total for _, total in ticks} == {len(ticks)}
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"device": "x", "launches": launches}))
    assert tuning.read_table(path)["launches"] == launches


def test_winners_that_are_wrong_together_are_left_out(capsys):
    assert tune.tune(CASE, Process(lambda shapes: "o differs" if len(shapes) == 3 else 1.0), lambda *_: None) == {}
    assert "since together: o differs" in capsys.readouterr().out


def test_winners_that_are_no_faster_together_are_left_out(capsys):
    assert tune.tune(CASE, Process(lambda shapes: 0.5 if len(shapes) == 1 else 2.0), lambda *_: None) == {}
    assert "the built-in shapes stay" in capsys.readouterr().out


def test_there_is_no_tuning_against_shapes_that_fail():
    with pytest.raises(RuntimeError, match=r"nothing to compare with: .* as built in: o differs by nan"):
        tune.tune(CASE, Process(lambda shapes: "o differs by nan"), lambda *_: None)


def test_a_process_of_its_own_plans_the_same_call():
    with closing(Expendable(tune_trial.start, 60)) as process:
        assert process.run(tune_trial.built_in, CASE) == tune_trial.built_in(CASE)
