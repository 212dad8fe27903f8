"""`kimi-linear conformance`: judge a KDA kernel, and judge the judge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..conformance.adapter import BadAdapterError
from ..conformance.catalogue import CASES
from ..conformance.isolation import opened
from ..conformance.limits import CASE_SECONDS
from ..conformance.museum import bug_named, url_of
from ..conformance.page import page
from ..conformance.record import Record
from ..conformance.report import as_json, explain_failures, text
from ..conformance.suite import Report, all_checks, check_by_id, run_suite
from ..conformance.waivers import read_waivers
from .algebra import algebra_command
from .conformance_matrix import matrix_command
from .exchange import export_command, judge_command
from .repro import repro_command
from .schema import schema_command
from .score import score_command
from .search import FOLDER, Examples, Minutes, searched
from .vectors import vectors_command

PASS, FAIL, ERROR = 0, 1, 2

conformance = typer.Typer(no_args_is_help=True, help="Judge a KDA kernel: what is wrong, where, and why.")

Where = Annotated[str, typer.Argument(metavar="ADAPTER", help="my_kernel.py, my_kernel.py:object or package.module")]
Full = Annotated[bool, typer.Option("--full/--quick", help="All cases and contracts, or those that see most.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write JSON too.")]


@conformance.command()
def run(
    adapter: Where,
    full: Full = False,
    json_file: JsonFile = None,
    only: Annotated[list[str] | None, typer.Option(help="A check by id; may be repeated.")] = None,
    waivers: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, help="Known failures, with reasons.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="After which a case hangs.")] = CASE_SECONDS,
    report_file: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", dir_okay=False, help="Write one HTML page with pictures."),
    ] = None,
    every: Annotated[bool, typer.Option("--every", help="Print each check's ratios, passing ones too.")] = False,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="In a process of its own: a crash or a hang in C fails one case.")
    ] = False,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", min=0.1, help="With --isolate: what it may take once loaded.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Keep verdicts there, and go on from them.")
    ] = None,
    search: Minutes = 0.0,
    examples: Examples = FOLDER,
) -> None:
    """Judge a kernel. Exit code 0 when it passes, 1 when it does not, 2 when it cannot be judged.

    Ctrl-C ends the run with what was found so far, and code 2.
    """
    torch.set_num_threads(1)
    with errors_as_exit_code():
        unknown = set(only or ()) - {check.id for check in all_checks()}
        if unknown:
            raise BadAdapterError(f"no check is called {', '.join(sorted(unknown))}")
        excused = {} if waivers is None else read_waivers(waivers)
        record = None if resume is None else Record(resume, adapter)
        with opened(adapter, isolate, seconds, memory) as kernel:
            with progress() as tell:
                report = run_suite(kernel, full or bool(only), only or (), excused, seconds, tell, record)
                explained = explain_failures(report, kernel, adapter, seconds, tell=tell)
                found = searched(kernel, 0.0 if report.missing else search, examples, full, seconds, tell)
            if json_file is not None:
                said = as_json(report, explained) | ({"search": [one.as_json() for one in found]} if found else {})
                json_file.write_text(json.dumps(said, indent=2) + "\n")
            if report_file is not None:
                report_file.write_text(page(report, explained, adapter))
            typer.echo("\n".join([text(report, kernel, adapter, every, explained), *map(str, found)]))
    raise typer.Exit(max(exit_code(report), FAIL * any(one.verdict.failed for one in found)))


def exit_code(report: Report) -> int:
    """What a report says to the shell; an interrupted run says neither pass nor fail."""
    if report.missing:
        typer.echo(f"interrupted: {report.missing} checks were not judged", err=True)
        return ERROR
    return PASS if report.ok else FAIL


@conformance.command("list")
def list_checks(full: Full = True) -> None:
    """Every check by id, tier and purpose."""
    for check in all_checks(full):
        typer.echo(f"{check.id:30} {check.tier:9} {check.comment}")


@conformance.command()
def explain(check: Annotated[str, typer.Argument(metavar="CHECK")]) -> None:
    """What a check asks, what fails it, and public bugs that it would have shown."""
    with errors_as_exit_code():
        found = check_by_id(check)
        typer.echo(f"{found.id} ({found.tier})\n{found.comment}")
        if found.effect:
            typer.echo(f"a kernel that fails: {found.effect}")
        for link in found.links:
            typer.echo(f"{link}: {bug_named(link).broke} ({url_of(link)})")
        for case in CASES:
            if case.id == check:
                knobs = ["B", "T", "lengths", "H", "group", "K", "V", "gate", "keys", "values", "beta", "state"]
                knobs += [] if case.front is None else ["front", "raw_gate", "rates", "bias", "logits"]
                typer.echo(", ".join(f"{name}={getattr(case, name)}" for name in knobs))


conformance.command("repro")(repro_command)
conformance.command("score")(score_command)
conformance.command("algebra")(algebra_command)
conformance.command("matrix")(matrix_command)
conformance.command("export")(export_command)
conformance.command("judge")(judge_command)
conformance.command("schema")(schema_command)
conformance.command("vectors")(vectors_command)


@contextmanager
def errors_as_exit_code() -> Iterator[None]:
    """What the caller got wrong goes to stderr in one line, with exit code 2."""
    try:
        yield
    except (BadAdapterError, KeyError, ValueError, OSError) as error:
        typer.echo(f"error: {error.args[0] if isinstance(error, KeyError) else error}", err=True)
        raise typer.Exit(ERROR) from None


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function to tell what comes next; shown where stderr is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.completed:>4} {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda line: bar.update(task, description=line, advance=1)
