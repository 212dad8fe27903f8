"""The suite as pytest items: one a check and contract.

    pytest --pyargs kimi_linear.conformance --kda-kernel my_kernel.py

A check that fails shows its part of the report; one that the kernel does not declare is skipped, with the reason;
a waived failure is an expected one, and a waiver that is not needed fails. An adapter that cannot be judged is an
error of collection. The command line's options are in `kimi_linear.cli.pytest_options`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .adapter import Adapter, BadAdapterError
from .bench import Bench
from .isolation import opened
from .report import EXPLAINED, explain_failure, summary_line
from .suite import Check, all_checks, benches, checked_identity, waived
from .verdict import Verdict
from .waivers import read_waivers

ASKED = pytest.StashKey[bool]()  # whether the suite was among what pytest was asked to collect
FAILED = pytest.StashKey[int]()


class KernelFails(Exception):  # noqa: N818  # a verdict about someone else's code, no error of ours
    """A failed check, as the report tells it."""


class Suite(pytest.File):
    """Stands for the suite: this file, wherever it is installed."""

    def collect(self) -> Iterator[CheckItem]:
        self.config.stash[ASKED] = True
        where, full = self.config.getoption("--kda-kernel"), self.config.getoption("--kda-full")
        waivers = self.config.getoption("--kda-waivers")
        torch.set_num_threads(1)
        try:
            found = benches(self._adapter(where), full)
            checked_identity(found[0].adapter, found[0])
            excused = {} if waivers is None else read_waivers(Path(waivers))
        except (BadAdapterError, ValueError, OSError) as error:
            raise self.CollectError(str(error)) from None
        for bench in found:
            for check in all_checks(full):
                name = f"{check.id}[{bench.contract}]"
                yield CheckItem.from_parent(self, name=name, check=check, bench=bench, waivers=excused)

    def _adapter(self, where: str) -> Adapter:
        """The kernel, for as long as the session lasts."""
        stack = contextlib.ExitStack()
        self.config.add_cleanup(stack.close)
        return stack.enter_context(opened(where, self.config.getoption("--kda-isolate")))


class CheckItem(pytest.Item):
    """One check of the kernel under one contract."""

    def __init__(self, *, check: Check, bench: Bench, waivers: dict[str, str], **rest: Any) -> None:
        super().__init__(**rest)
        self.check, self.bench, self.waivers = check, bench, waivers

    def runtest(self) -> None:
        verdict = waived(self.check(self.bench), self.waivers)
        self.user_properties += [(f"ratio of {name}", ratio) for name, ratio in verdict.ratios.items()]
        if verdict.status == "skip":
            pytest.skip(verdict.reason)
        if verdict.status == "waived":
            pytest.xfail(verdict.reason)
        if verdict.status in ("fail", "waived"):  # with --runxfail, xfail comes back
            raise KernelFails(self.told(verdict))

    def told(self, verdict: Verdict) -> str:
        """The report's text; that of the first failures in full, since looking for causes takes time."""
        before = self.config.stash.get(FAILED, 0)
        self.config.stash[FAILED] = before + 1
        if before >= EXPLAINED:
            return summary_line(verdict)
        where = self.config.getoption("--kda-kernel")
        return "\n".join(explain_failure(verdict, self.bench.adapter, where))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, KernelFails) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Suite | None:
    """The suite is collected where this file is."""
    return Suite.from_parent(parent, path=file_path) if file_path.samefile(__file__) else None


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    """A kernel that is named and not judged would look like a pass."""
    if not config.stash.get(ASKED, False):
        raise pytest.UsageError("--kda-kernel has nothing to do: add `--pyargs kimi_linear.conformance`")
