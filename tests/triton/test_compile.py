"""Every kernel with every gate compiles for GPUs that are not here, and fits them; `make kernels-report` has all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUNS_KERNELS = False
REPORT = Path(__file__).parents[2] / "benchmarks" / "kernels_report.py"
TARGETS = ["cuda:80", "cuda:90", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx950"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(REPORT), "--json", "--brief", "--target", target]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in run.stdout.splitlines()]
    assert not [row for row in rows if not row["fits"]]
    assert run.returncode == 0, run.stderr
    kernels = {row["kernel"] for row in rows}
    assert {"recurrent_kernel", "decode_kernel", "conv_kernel", "conv_state_kernel", "conv_update_kernel"} <= kernels
    assert {"kda_chunk_table_kernel", "kda_tiles_kernel", "kda_chunks_kernel", "kda_state_kernel"} <= kernels
