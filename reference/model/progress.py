"""Progress bars on standard error, where that is a terminal: around a loop, or for steps that report themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")


def tracked(items: Sequence[Item], description: str) -> Iterator[Item]:
    """Yield the items; where standard error is a terminal, show how many are done and how long it still takes."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console  # a second of imports that a batch job need not pay
    from rich.progress import track

    yield from track(items, description=description, console=Console(stderr=True), transient=True)


class Steps:
    """A bar for `total` steps; it appears with the first and goes with the last."""

    def __init__(self, total: int, description: str) -> None:
        self.total, self.description = total, description
        self.bar: Any = None

    def done(self, step: int) -> None:
        """Step number `step`, from 0, is done."""
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import Progress

        if self.bar is None:
            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(self.description, total=self.total)
            self.bar.start()
        self.bar.update(self.task, completed=step + 1)
        if step + 1 == self.total:
            self.bar.stop()
            self.bar = None
