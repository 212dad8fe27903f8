"""What is measured of a score, on disk, so that a run that was interrupted goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from .record import PACKAGE, Log, version_of

SHOWN = ("score_page.py", "score_text.py")  # how a score is told is no part of it

Found = dict[str, Any]


def score_version() -> str:
    """The release, and a digest of the suite, the emulated kernels and the mutants."""
    sources = [*PACKAGE.glob("conformance/**/*.py"), *PACKAGE.glob("reference/**/*.py")]
    return version_of(file for file in sources if file.name not in SHOWN)


class ScoreRecord(Log):
    """What was found of each kernel, correct or not, by its name; in a file, or in memory where there is none."""

    words: ClassVar = {"code": "the suite or the mutants", "mode": "the mode"}

    def __init__(self, path: Path | None = None) -> None:
        super().__init__(path or Path())
        self.on_disk = path is not None
        self.known: dict[str, Found] = {}

    def begin(self, full: bool) -> None:
        """Read what is known. Raises ValueError where the file is about something else."""
        if self.on_disk:
            header = {"code": score_version(), "mode": "full" if full else "quick"}
            self.known = {line["name"]: line["found"] for _, line in self.lines(header)}

    def keep(self, name: str, found: Found) -> None:
        """Know what was found of a kernel from now on."""
        self.known[name] = found
        if self.on_disk:
            self.add({"name": name, "found": found})
