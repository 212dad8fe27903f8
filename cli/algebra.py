"""`kimi-linear conformance algebra`: the reference's own derivation, without rounding."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from ..conformance.algebra import Row, table
from ..conformance.modular import PRIME
from .common import table_console

Size = Annotated[int, typer.Option(min=1, max=256)]


def algebra_command(
    K: Size = 5, V: Size = 3, heads: Size = 2, seed: Annotated[int, typer.Option(help="Of the residues.")] = 1
) -> None:
    """Compare the chunk form with the recurrence over the integers modulo a prime, number by number.

    Nothing is rounded, so a wrong index, sign or factor shows in almost every number. Exit code 1 if one differs.
    """
    rows = list(table(seed, K, V, heads))
    table_console().print(_as_table(rows))
    bad = sum(row.different > 0 for row in rows)
    typer.echo(f"{sum(row.numbers for row in rows)} numbers compared, {bad} of {len(rows)} rows differ.")
    raise typer.Exit(1 if bad else 0)


def _as_table(rows: list[Row]) -> Table:
    shown = Table(title=f"The chunk form against the recurrence, modulo {PRIME}")
    for name in ("lengths", "chunk size", "numbers", "different"):
        shown.add_column(name, justify="right")
    for row in rows:
        lengths = ", ".join(map(str, row.lengths))
        shown.add_row(lengths, str(row.chunk_size), str(row.numbers), str(row.different))
    return shown
