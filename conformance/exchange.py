"""The suite by way of files, for kernels that no Python process can call.

    export   every call that the checks make: a folder a call, with in.safetensors, one manifest.json and SHA256SUMS
    judge    the same checks again, with out.safetensors of each folder in place of a kernel

With gold, the calls of cases come with gold.safetensors: what is exact, in fp64, and as envelope_NAME the allowed
errors of rows, in fp32. That is for a program that compares by itself; `judge` computes its own.

The manifest says, for each call, the scale, the precision, what is wanted and in which dtype and shape, and which
checks it serves; for the whole, the conventions (log base of g, form of beta, layout of states). A check that needs
this process (strides, fresh memory, a pool that advances in place) or the kernel's results as inputs is skipped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .adapter import BadAdapterError, Capabilities, checked_capabilities
from .bench import Bench
from .by_file import ByFile, Exported, Recorder, Replay
from .gold_files import write_gold
from .plain import from_plain
from .record import suite_version
from .suite import Check, Report, all_checks, benches, waived

FORMAT = "kimi-linear-conformance-calls/1"
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"  # of every file of an export, as `sha256sum -c` reads them
Tell = Callable[[str], None]


def export(
    folder: Path,
    caps: Capabilities,
    full: bool = True,
    only: Sequence[str] = (),
    tell: Tell = lambda line: None,
    gold: bool = False,
) -> Exported:
    """Write the calls of the checks that kernels with such capabilities have to take; with `gold`, what is exact."""
    if folder.exists() and any(folder.iterdir()):
        raise BadAdapterError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(folder, caps)
    checks = [check for check in all_checks(full) if not only or check.id in only]
    for check, bench in planned(recorder, checks, full):
        tell(check.id)
        verdict = recorder.judged(check, bench)
        if verdict.status == "skip":
            recorder.done.skipped[check.id] = verdict.reason
        elif gold:
            write_gold(recorder, check, bench)
    manifest = {
        "format": FORMAT, "suite": suite_version(), "full": full, "only": list(only),
        "capabilities": asdict(recorder.caps), "calls": list(recorder.calls.values()),
        "checks": [{"id": c.id, "tier": c.tier, "comment": c.comment, "links": c.links} for c in checks],
        "skipped": recorder.done.skipped,
    }  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    (folder / SUMS).write_text("".join(f"{_digest(file)}  {file.relative_to(folder)}\n" for file in files))
    return recorder.done


def check_sums(folder: Path) -> None:
    """Raises BadAdapterError with the file that is not what was exported."""
    try:
        lines = (folder / SUMS).read_text().splitlines()
    except OSError as error:
        raise BadAdapterError(f"{folder / SUMS} cannot be read: {error}") from None
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in (MANIFEST, *listed):
        file = folder / name
        if not file.is_file() or _digest(file) != listed.get(name):
            raise BadAdapterError(f"{file} is not what was exported")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def judge(
    folder: Path, identity: str, waivers: dict[str, str] | None = None, tell: Tell = lambda line: None
) -> Report:
    """The report of what lies in the output files. Raises BadAdapterError where the folder is not an export."""
    manifest = manifest_in(folder)
    check_sums(folder)
    full, only = manifest["full"], manifest["only"]
    replay, report = Replay(folder, manifest, identity), Report(identity)
    checks = [check for check in all_checks(full) if not only or check.id in only]
    for check, bench in planned(replay, checks, full):
        tell(check.id)
        report.verdicts.append(waived(replay.judged(check, bench), waivers or {}))
        if replay.foreign:
            raise BadAdapterError(f"{folder} has not the calls of {check.id}: export it again")
    return report


def manifest_in(folder: Path) -> dict[str, Any]:
    """The manifest of an export by this version of the suite."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BadAdapterError(f"{file} cannot be read: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BadAdapterError(f"{file} is no manifest of the format {FORMAT}")
    if manifest["suite"] != suite_version():
        raise BadAdapterError(f"{folder} was exported by {manifest['suite']}; this is {suite_version()}")
    return manifest


def planned(adapter: ByFile, checks: Sequence[Check], full: bool) -> Iterator[tuple[Check, Bench]]:
    """Every check under every contract, or the first."""
    for bench in benches(adapter, full):
        yield from ((check, bench) for check in checks)


def capabilities_in(file: Path) -> Capabilities:
    """Capabilities written as JSON: the fields of `Capabilities` that differ from the defaults."""
    try:
        caps = from_plain(Capabilities, json.loads(file.read_text()), "capabilities")
    except ValueError as error:
        raise BadAdapterError(f"{file}: {error}") from None
    return checked_capabilities(ByFile(caps, str(file)))
