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
from rich.table import Table

from .checkpoints import inspect_command, make_checkpoint_command
from .conformance import conformance
from .devices import check_device
from .rows import Row
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
    rows = _rows_with_progress(Console(stderr=True), device)
    Console(width=None if sys.stdout.isatty() else 110).print(_table(rows))
    if json_file is not None:
        json_file.write_text(json.dumps(_report(rows), indent=2) + "\n")
    bad = sum(not row.ok for row in rows)
    judged = [row for row in rows if not row.skipped]
    typer.echo(f"{len(judged) - bad} of {len(judged)} rows hold.")
    if any(row.case.startswith("suite") and not row.ok for row in rows):
        typer.echo("why: kimi-linear conformance run kimi_linear.conformance.adapters.chunked (or .naive)")
    raise typer.Exit(1 if bad else 0)


def _rows_with_progress(console: Console, device: str) -> list[Row]:
    columns = (TextColumn("{task.description:<45}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps(device))

        def report(description: str) -> None:
            progress.update(task, description=description, advance=1)

        return list(verify_rows(report, device))


def _table(rows: list[Row]) -> Table:
    table = Table(
        title="KDA and the model against the fp64 recurrence",
        caption="errors and limits relative to the result's rms; of the suite, in roundings",
    )
    for name in ("case", "tier"):
        table.add_column(name)
    for name in ("error", "limit"):
        table.add_column(name, justify="right")
    table.add_column("ok")
    for row in rows:
        mark = "[green]yes[/]" if row.ok else "[bold red]NO[/]"
        numbers = ("", "") if row.skipped else (f"{row.error:.1e}", f"{row.limit:.1e}")
        table.add_row(row.case, row.tier, *numbers, row.skipped or mark)
    return table


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
