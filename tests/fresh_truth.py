"""A pytest plugin for mutation testing: every test computes its own truth and envelopes, and quick tests come first.

Both are kept between calls. A test that finds them kept would run no code that a change could be noticed in.
"""

import json
from pathlib import Path

from kimi_linear.conformance import gold

SECONDS = Path("mutmut-stats.json")  # by test, from mutmut's first run; it starts every run in this folder


def pytest_runtest_setup(item):
    gold._truth.cache_clear()
    gold._envelopes.cache_clear()


def pytest_collection_modifyitems(items):
    if SECONDS.exists():
        seconds = json.loads(SECONDS.read_text())["duration_by_test"]
        items.sort(key=lambda item: seconds.get(item.nodeid, 0))
