"""The `kimi-linear` command."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .checkpoints import inspect_command, make_checkpoint_command
from .conformance import conformance
from .devices import check_device
from .rows import Row, line
from .texts import generate_command, logits_command
from .verify import steps, verify_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(conformance, name="conformance")

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the table as JSON too.", dir_okay=False, writable=True),
]
DeviceOption = Annotated[str, typer.Option(help="cpu, or cuda: the Triton kernels too.", metavar="cpu|cuda")]


@app.callback()
def kimi_linear() -> None:
    """Kimi Delta Attention: a reference implementation and its oracles."""


@app.command()
def verify(json_file: JsonOption = None, device: DeviceOption = "cpu") -> None:
    """Run every tier that this machine can run on real inputs, and compare each with the fp64 recurrence.

    Exit code 0 when every row holds, 1 when one does not.
    """
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"{json_file.parent} must be an existing folder", param_hint="--json")
    try:
        check_device(device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    rows = _printed_rows(Console(stderr=True), device)
    if json_file is not None:
        json_file.write_text(json.dumps(_report(rows), indent=2) + "\n")
    bad = sum(not row.ok for row in rows)
    judged = [row for row in rows if not row.skipped]
    typer.echo(f"{len(judged) - bad} of {len(judged)} rows hold.")
    if any(row.case.startswith("suite") and not row.ok for row in rows):
        typer.echo("why: kimi-linear conformance run kimi_linear.conformance.adapters.chunked (or .naive)")
    raise typer.Exit(1 if bad else 0)


def _printed_rows(console: Console, device: str) -> list[Row]:
    """Every row, printed as it comes, also into a file; progress below it where stderr is a terminal."""
    columns = (TextColumn("{task.description:<45}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown, same_screen = console.is_terminal, sys.stdout.isatty()
    rows = []
    typer.echo("KDA and the model against the fp64 recurrence; errors and limits relative to the result's rms,")
    typer.echo("of the suite in roundings")
    typer.echo(line("case", "tier", "error", "limit", "ok"))
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=same_screen, disable=not shown
    ) as progress:
        task = progress.add_task("", total=steps(device))

        def report(description: str) -> None:
            progress.update(task, description=description, advance=1)

        for row in verify_rows(report, device):
            typer.echo(_line(row))
            rows.append(row)
    return rows


def _line(row: Row) -> str:
    mark = typer.style("yes", fg="green") if row.ok else typer.style("NO", fg="red", bold=True)
    numbers = ("", "") if row.skipped else (f"{row.error:.1e}", f"{row.limit:.1e}")
    return line(row.case, row.tier, *numbers, row.skipped or mark)


def _report(rows: list[Row]) -> dict[str, object]:
    return {
        "versions": {
            "kimi-linear-reference": version("kimi-linear-reference"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "rows": [asdict(row) for row in rows],
        "ok": all(row.ok for row in rows),
    }


app.command("make-checkpoint")(make_checkpoint_command)
app.command("inspect")(inspect_command)
app.command("logits")(logits_command)
app.command("generate")(generate_command)


if __name__ == "__main__":
    app()
