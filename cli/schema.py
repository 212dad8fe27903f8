"""`kimi-linear conformance schema`: the forms of the suite's JSON files."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..conformance.schema import SCHEMAS, schema_of

ERROR = 2


def schema_command(
    name: Annotated[str | None, typer.Argument(help="Which; without it, the names are listed.")] = None,
) -> None:
    """Print the JSON Schema of a file that the suite writes or reads."""
    if name is None:
        for known, what in SCHEMAS.items():
            typer.echo(f"{known:14} {what}")
        return
    try:
        typer.echo(json.dumps(schema_of(name), indent=1))
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(ERROR) from None
