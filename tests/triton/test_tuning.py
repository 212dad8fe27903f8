"""The opt-in table of block shapes: used when set, refused by name when it does not fit."""

import json

import pytest
import torch
from triton_inputs import DEVICE, assert_rounded_only, make_call, reference

import time_model
from kimi_linear.triton_kernels import chunk_kda, chunk_launch, chunk_plan, tuning

SHAPE = {"block": 16, "warps": 4, "stages": 1, "registers": None}
HERE = tuning.device_name(torch.device(DEVICE))


@pytest.fixture(autouse=True)
def _no_table_afterwards():
    yield
    tuning.use_table(None)


def write(path, device=HERE, **launches):
    path.write_text(json.dumps({"device": device, "versions": {}, "launches": launches}))
    return path


def planned(K=20, V=40):
    return chunk_plan.plan(torch.empty(1, 1, 1, K, device=DEVICE), V, normalised=True)


def test_a_table_changes_the_plan_of_its_sizes_only(tmp_path):
    before, other = planned(), planned(K=60)
    assert (before.state.block, before.chunks.block) == (16, 16)
    key = tuning.table_key("state", dtype=torch.float32, KP=32, VP=64, gate=1)
    tuning.use_table(write(tmp_path / "table.json", **{key: SHAPE}))
    assert planned().state == chunk_plan.Shape(**SHAPE)
    assert planned()._replace(state=before.state) == before
    assert planned(K=60) == other
    tuning.use_table(None)
    assert planned() == before


def test_a_call_under_a_table_stays_right_and_is_launched_anew(tmp_path):
    call = make_call(B=1, T=20, K=20, V=40)
    o, _ = chunk_kda(**call)
    key = tuning.table_key("state", dtype=torch.float32, KP=32, VP=64, gate=1)
    tuning.use_table(write(tmp_path / "table.json", **{key: SHAPE}))
    assert not chunk_launch._prepared
    tuned, _ = chunk_kda(**call)
    [prepared] = chunk_launch._prepared.values()
    assert prepared.plan.state.block == 16
    exact, _ = reference(**call)
    for got in (o, tuned):
        assert_rounded_only(got, exact, tokens=20)


def test_the_environment_names_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning._Chosen, "path", str(write(tmp_path / "table.json", device="another")))
    with pytest.raises(ValueError, match=f"must be a table of this device, {HERE}; got one of another"):
        planned()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("{", "must be a tuning table in JSON"),
        ("[]", 'must name its "device"'),
        ('{"device": "x"}', 'must have "launches" by kernel and size; got NoneType'),
        ('{"device": "x", "launches": {"sort KP=16 VP=16": {}}}', "must name launches like tiles .*; got sort"),
        ('{"device": "x", "launches": {"tiles KP=16 VP=16": {}}}', "must have block, warps, stages, registers"),
        (
            json.dumps({"device": "x", "launches": {"tiles KP=16 VP=64": SHAPE | {"block": 32}}}),
            r"block of tiles KP=16 VP=64 must be one of \[16\]; got 32",
        ),
    ],
)
def test_a_malformed_table_is_refused_by_name(tmp_path, table, message):
    path = tmp_path / "table.json"
    path.write_text(table)
    with pytest.raises(ValueError, match=message):
        tuning.use_table(path)


def test_a_missing_table_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"missing.json must be a tuning table; got No such file"):
        tuning.use_table(tmp_path / "missing.json")


def test_the_performance_model_takes_a_chunk_to_cost_what_launches_do():
    assert pytest.approx({block: 1e-6 * us for block, us in chunk_plan.SLICE_US.items()}) == time_model.STEP


def test_the_kernels_report_compiles_every_width_of_the_state():
    launches = [one.launch for one in chunk_launch.configurations()]
    states = [launch for launch in launches if launch.kernel.__name__ == "kda_state_kernel"]
    halves = {launch.arguments["BV"] for launch in states if launch.arguments["wq"].dtype == torch.bfloat16}
    assert halves >= set(chunk_plan.SLICE_US)
