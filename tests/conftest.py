"""Test-wide settings: reproducible draws, one thread a worker."""

import torch
from hypothesis import HealthCheck, settings

# The same examples on every run and machine; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=60)
settings.register_profile(
    "search", deadline=None, max_examples=2000, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("repeatable")
torch.set_num_threads(1)
