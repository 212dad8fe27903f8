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

from .conformance import conformance
from .verify import Row, steps, verify_rows

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(conformance, name="conformance")

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the table as JSON too.", dir_okay=False, writable=True),
]


@app.callback()
def kimi_linear() -> None:
    """Kimi Delta Attention: a reference implementation and its oracles."""


@app.command()
def verify(json_file: JsonOption = None) -> None:
    """Run every tier that this machine can run on real inputs, and compare each with the fp64 recurrence.

    Exit code 0 when every row holds, 1 when one does not.
    """
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"{json_file.parent} must be an existing folder", param_hint="--json")
    rows = _rows_with_progress(Console(stderr=True))
    Console(width=None if sys.stdout.isatty() else 110).print(_table(rows))
    if json_file is not None:
        json_file.write_text(json.dumps(_report(rows), indent=2) + "\n")
    bad = sum(not row.ok for row in rows)
    typer.echo(f"{len(rows) - bad} of {len(rows)} rows hold.")
    raise typer.Exit(1 if bad else 0)


def _rows_with_progress(console: Console) -> list[Row]:
    columns = (TextColumn("{task.description:<45}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps())

        def report(description: str) -> None:
            progress.update(task, description=description, advance=1)

        return list(verify_rows(report))


def _table(rows: list[Row]) -> Table:
    table = Table(
        title="KDA tiers against the fp64 recurrence", caption="errors and limits relative to the result's rms"
    )
    for name in ("case", "tier"):
        table.add_column(name)
    for name in ("error", "limit"):
        table.add_column(name, justify="right")
    table.add_column("ok")
    for row in rows:
        mark = "[green]yes[/]" if row.ok else "[bold red]NO[/]"
        table.add_row(row.case, row.tier, f"{row.error:.1e}", f"{row.limit:.1e}", mark)
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


if __name__ == "__main__":
    app()
