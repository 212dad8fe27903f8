"""A pytest plugin for mutation testing: which test runs which code is seen, and quick tests come first.

Truths and envelopes are kept between calls. A test that finds them kept seems to run none of the code behind them, so
each has to compute its own, except where a change is tried: there a process starts with nothing kept. torch imports
its compiler when arithmetic is first seen from Python, as envelopes do: here once, before processes part.
"""

import json
import os
from pathlib import Path

import torch._dynamo  # noqa: F401

from kimi_linear.conformance import gold

SECONDS = Path("mutmut-stats.json")  # by test, from mutmut's first run; it starts every run in this folder


def pytest_runtest_setup(item):
    if "__mutmut_" not in os.environ.get("MUTANT_UNDER_TEST", ""):
        gold._truth.cache_clear()
        gold._envelopes.cache_clear()


def pytest_collection_modifyitems(items):
    if SECONDS.exists():
        seconds = json.loads(SECONDS.read_text())["duration_by_test"]
        items.sort(key=lambda item: seconds.get(item.nodeid, 0))
