"""`kimi-linear conformance matrix`: the recorded runs of every shipped adapter as one document."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..conformance.matrix import page, read_records, with_page

RECORDS = Path("benchmarks/results/conformance")
DOCUMENT = Path("docs/conformance-matrix.md")


def matrix_command(
    records: Annotated[Path, typer.Option(metavar="FOLDER", help="Recorded runs.")] = RECORDS,
    document: Annotated[Path, typer.Option(metavar="FILE", help="Where the matrix goes.")] = DOCUMENT,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail where the document differs.")] = False,
) -> None:
    """Write the matrix of kernels by families of checks from recorded runs.

    Exit code 1 with --check and another document, 2 where a record or the document's markers are missing.
    """
    try:
        if not records.is_dir():
            raise ValueError(f"--records must be a folder of recorded runs; got {records}")
        text = document.read_text()
        wanted = with_page(text, page(read_records(records)))
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if check and text != wanted:
        typer.echo(f"{document} is not what {records} gives: run kimi-linear conformance matrix", err=True)
        raise typer.Exit(1)
    if not check:
        document.write_text(wanted)
        typer.echo(f"wrote {document}")
