"""Test-wide settings: draws that repeat, one thread a worker."""

import torch
from hypothesis import HealthCheck, settings

# The same examples on every run and machine; `--hypothesis-profile=search` looks for new ones.
# No time decides: a draw that a loaded machine makes slowly is as good.
TIMELESS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, max_examples=60, **TIMELESS)
settings.register_profile("search", max_examples=2000, print_blob=True, **TIMELESS)
settings.load_profile("repeatable")
torch.set_num_threads(1)


def pytest_runtest_setup():
    """What a test draws does not depend on the tests that ran before it in its process."""
    torch.manual_seed(0)
