"""`kimi-linear conformance vectors`: write the golden vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..conformance.vectors import VECTORS, write_vectors


def vectors_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", file_okay=False, help="Files there are replaced.")],
) -> None:
    """Write inputs, exact results and allowed errors of small cases, for a kernel that Python cannot call.

    A clone has them in vectors/ already.
    """
    files = write_vectors(folder)
    size = sum(file.stat().st_size for file in files)
    typer.echo(f"{len(VECTORS)} cases, {size / 1e3:.0f} kB, in {folder}")
