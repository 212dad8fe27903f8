"""The options of `pytest --pyargs kimi_linear.conformance`, and nothing else.

pytest loads this module in every run of every environment that has the package, so it imports no torch and adds
no test. In a run that names a kernel, `kimi_linear.conformance.plugin` does the work.
"""

from __future__ import annotations

import pytest

PACKAGE = "kimi_linear.conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kda", f"KDA kernels (pytest --pyargs {PACKAGE} --kda-kernel my_kernel.py)")
    group.addoption("--kda-kernel", metavar="ADAPTER", help="my_kernel.py, my_kernel.py:object or package.module")
    group.addoption("--kda-full", action="store_true", help="All cases and contracts; else those that see most.")
    group.addoption("--kda-waivers", metavar="FILE", help="Known failures, with reasons.")
    group.addoption("--kda-isolate", action="store_true", help="Run the kernel in a process of its own.")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--kda-kernel"):
        from ..conformance import plugin

        config.pluginmanager.register(plugin, "kda-conformance")
    elif any(config.getoption(f"--kda-{name}") for name in ("full", "waivers", "isolate")):
        raise pytest.UsageError("--kda-full, --kda-waivers and --kda-isolate need --kda-kernel")
