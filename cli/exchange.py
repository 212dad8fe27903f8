"""`kimi-linear conformance export` and `judge`: the suite by way of files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..conformance.adapter import BadAdapterError
from ..conformance.as_json import as_json
from ..conformance.by_file import OUTPUTS
from ..conformance.exchange import MANIFEST, capabilities_in, export, judge
from ..conformance.report import place_lines
from ..conformance.suite import Report, all_checks, check_by_id
from ..conformance.verdict import summary_line
from ..conformance.waivers import read_waivers

IDENTITY = "identity.txt"
PASS, FAIL, ERROR = 0, 1, 2
Folder = Annotated[Path, typer.Argument(metavar="DIR", file_okay=False)]


def export_command(
    folder: Folder,
    capabilities: Annotated[Path, typer.Option(metavar="FILE", dir_okay=False, help="Capabilities as JSON.")],
    full: Annotated[bool, typer.Option("--full/--quick", help="All checks, or those that see most.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="A check by id; may be repeated.")] = None,
    gold: Annotated[bool, typer.Option("--gold", help="Exact results and allowed errors of cases too.")] = False,
) -> None:
    """Write the inputs of every check, for a kernel that Python cannot call.

    The JSON file has the fields of `Capabilities` that differ from its defaults; {} is a bf16 chunk kernel.
    """
    torch.set_num_threads(1)
    with errors():
        unknown = set(only or ()) - {check.id for check in all_checks()}
        if unknown:
            raise BadAdapterError(f"no check is called {', '.join(sorted(unknown))}")
        with Console(stderr=True).status("export") as status:
            done = export(folder, capabilities_in(capabilities), full or bool(only), only or (), status.update, gold)
    typer.echo(
        f"{done.calls} calls, {done.bytes / 1e6:.1f} MB, in {folder}; {folder / MANIFEST} says what each wants."
    )
    typer.echo(f"Write {OUTPUTS} beside each input and what ran in {folder / IDENTITY}, then: "
               f"kimi-linear conformance judge {folder}")  # fmt: skip
    for reason in dict.fromkeys(done.skipped.values()):
        typer.echo(f"not in it, {reason}: {', '.join(id for id, why in done.skipped.items() if why == reason)}")


def judge_command(
    folder: Folder,
    identity: Annotated[str | None, typer.Option(help=f"What ran; else what {IDENTITY} says.")] = None,
    waivers: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, help="Known failures, with reasons.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", dir_okay=False)] = None,
) -> None:
    """Judge what a kernel wrote into an exported folder. Exit codes as of `run`."""
    torch.set_num_threads(1)
    with errors():
        excused = {} if waivers is None else read_waivers(waivers)
        with Console(stderr=True).status("judge") as status:
            report = judge(folder, identity_of(folder, identity), excused, status.update)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(report), indent=2) + "\n")
    typer.echo("\n".join(told(report)))
    raise typer.Exit(PASS if report.ok else FAIL)


def identity_of(folder: Path, given: str | None) -> str:
    """What ran, as somebody has to say."""
    file = folder / IDENTITY
    said = given or (file.read_text().strip() if file.is_file() else "")
    if not said:
        raise BadAdapterError(f"say what ran: in {file}, or with --identity")
    return said


def told(report: Report) -> Iterator[str]:
    """Every verdict in a line, and of each failure what is known without running the kernel again."""
    yield report.identity
    for verdict in report.verdicts:
        if verdict.status != "skip":
            yield summary_line(verdict)
        if verdict.failed:
            yield f"  {check_by_id(verdict.id).comment}"
            yield from (f"  {line}" for line in place_lines(verdict))
    skipped = [verdict for verdict in report.verdicts if verdict.status == "skip"]
    for reason in dict.fromkeys(verdict.reason for verdict in skipped):
        yield f"skipped, {reason}: {', '.join(dict.fromkeys(v.id for v in skipped if v.reason == reason))}"
    yield ", ".join(f"{report.count(status)} {status}" for status in ("pass", "fail", "skip", "acceptable", "waived"))


@contextmanager
def errors() -> Iterator[None]:
    """What the caller got wrong goes to stderr in one line, with exit code 2; so does an interrupt."""
    try:
        yield
    except (BadAdapterError, ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(ERROR) from None
    except KeyboardInterrupt:
        raise typer.Exit(ERROR) from None
