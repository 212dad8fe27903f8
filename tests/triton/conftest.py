"""Kernels run on the GPU where there is one, and in Triton's interpreter on the CPU where there is none."""

import os
import sys

import pytest
import torch

ON_GPU = torch.cuda.is_available()
# The interpreter is chosen when triton is imported: later is too late.
TOO_LATE = not ON_GPU and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
if not ON_GPU and not TOO_LATE:
    os.environ["TRITON_INTERPRET"] = "1"
# Triton 3.9 warns where this is left to its default, and a warning is an error in tests.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


@pytest.fixture(autouse=True)
def _kernels_can_run(request: pytest.FixtureRequest) -> None:
    """Say why a kernel cannot run; a module with RUNS_KERNELS = False needs none."""
    if TOO_LATE and getattr(request.module, "RUNS_KERNELS", True):
        pytest.skip("triton was imported before these tests: start pytest with TRITON_INTERPRET=1")
