"""Launches that were seen before, replayed: the same kernels with the same arguments, or Triton's own way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("plays the driver of a machine without one", allow_module_level=True)

RUNS_KERNELS = False
PROBE = Path(__file__).parents[1] / "replay_probe.py"


@pytest.fixture(scope="module")
def heard():
    """Launches of each scene of the probe, which plays the driver and cannot run beside the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, str(PROBE)], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("op", ["chunk_kda", "chunk_kda packed", "fused_recurrent_kda", "decode_step"])
def test_a_replay_starts_the_same_kernels_with_the_same_arguments(heard, op):
    scenes = heard[op]
    assert scenes["replayed"] == scenes["through triton"]
    assert len(scenes["replayed"]) >= 1
    assert scenes["binder calls"] == {"first": len(scenes["replayed"]), "replayed": 0}


def test_other_tensors_of_the_same_shapes_are_the_ones_that_a_replay_reads(heard):
    scenes = heard["chunk_kda"]
    assert scenes["other tensors"] != scenes["replayed"]
    assert scenes["other tensors"] == scenes["other tensors, through triton"]


@pytest.mark.parametrize("scene", ["a profiler listens", "an address is no multiple of 16"])
def test_where_a_short_cut_could_differ_triton_is_asked(heard, scene):
    assert heard[scene]["binder calls"] > 0
