"""Verdicts on disk, so that a run that was interrupted goes on where it stopped.

A file of JSON lines that only grows: what is judged and by what, then a verdict a line. Verdicts of another kernel,
or of another version of the suite, are refused rather than mixed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from .adapter import Contract
from .bench import Bench
from .plain import from_plain
from .verdict import Verdict

if TYPE_CHECKING:
    from .suite import Check

PACKAGE = Path(__file__).parents[1]
DIGITS = 12  # of a digest, enough to tell versions apart


def suite_version() -> str:
    """The release, and a digest of the code that decides verdicts."""
    return version_of([*PACKAGE.glob("conformance/*.py"), *PACKAGE.glob("reference/**/*.py")])


def version_of(sources: Iterable[Path]) -> str:
    """The release, a digest of some of its files, and torch's version."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(sources))).hexdigest()
    return f"{version('kimi-linear-reference')}+{digest[:DIGITS]}, torch {torch.__version__}"


def file_digest(where: str) -> str:
    """A digest of the adapter's file, or nothing for a module."""
    file = Path(where.partition(":")[0])
    return hashlib.sha256(file.read_bytes()).hexdigest()[:DIGITS] if file.is_file() else ""


class Log:
    """A file of JSON lines that only grows; its first line says what the others are about."""

    words: ClassVar[dict[str, str]]  # key of the first line to what an error calls it

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self, header: dict[str, str]) -> list[tuple[int, Any]]:
        """Every line after the first with its number. Raises ValueError where the file is about something else."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]
        if not whole:
            self.path.write_text(json.dumps(header) + "\n")
            return []
        self._check_header(self._parsed(whole[0], 1), header)
        found = [(number, self._parsed(line, number)) for number, line in enumerate(whole[1:], 2)]
        if len(whole) < len(lines):  # a line that was being written when the run was killed
            self.path.write_bytes(b"".join(whole))
        return found

    def add(self, data: dict[str, Any]) -> None:
        """Write a line."""
        with self.path.open("a") as file:
            file.write(json.dumps(data) + "\n")

    def _check_header(self, found: Any, wanted: dict[str, str]) -> None:
        for key, what in self.words.items():
            if not isinstance(found, dict) or key not in found:
                raise ValueError(f"{self.path} is no record of a run: its first line has no {key!r}")
            if found[key] != wanted[key]:
                raise ValueError(
                    f"{self.path} cannot be resumed: {what} was {found[key]!r} and is {wanted[key]!r}. "
                    f"Give another file, or remove this one"
                )

    def _parsed(self, line: bytes, number: int) -> Any:
        try:
            return json.loads(line)
        except ValueError:
            raise ValueError(f"{self.path}:{number}: no JSON") from None


class Record(Log):
    """The verdicts of one kernel in one file. `begin` it with what the kernel says it is."""

    words: ClassVar = {"suite": "the suite", "kernel": "the kernel", "file": "the adapter's file"}

    def __init__(self, path: Path, where: str) -> None:
        super().__init__(path)
        self.where = where
        self.known: dict[tuple[str, Contract], Verdict] = {}

    def begin(self, identity: str) -> None:
        """Read what is known. Raises ValueError where the file is about something else."""
        header = {"suite": suite_version(), "kernel": identity, "file": file_digest(self.where)}
        for number, line in self.lines(header):
            asked, verdict = self._verdict(line, number)
            self.known[verdict.id, asked] = verdict

    def judge(self, check: Check, bench: Bench) -> Verdict:
        """The verdict that is known, or a new one, which is kept."""
        known = self.known.get((check.id, bench.contract))
        if known is not None:
            return known
        verdict = check(bench)
        self.keep(verdict, bench.contract)
        return verdict

    def keep(self, verdict: Verdict, asked: Contract) -> None:
        """Write a verdict down under the contract that was asked for; its own is that of the call it is about."""
        self.add({**asdict(verdict), "asked": asdict(asked)})
        self.known[verdict.id, asked] = verdict

    def _verdict(self, data: Any, number: int) -> tuple[Contract, Verdict]:
        try:
            asked = data.pop("asked", None) if isinstance(data, dict) else None
            verdict = from_plain(Verdict, data)
            return from_plain(Contract, asked, "asked"), verdict
        except ValueError as error:
            raise ValueError(f"{self.path}:{number}: {error}") from None
