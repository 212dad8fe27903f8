"""The search of `kimi-linear conformance run --search MINUTES`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..conformance.adapter import Adapter, BadAdapterError
from ..conformance.search import Found, search

Minutes = Annotated[
    float, typer.Option("--search", metavar="MINUTES", min=0, help="Then search for inputs that it gets wrong.")
]
Examples = Annotated[
    Path,
    typer.Option(metavar="FOLDER", file_okay=False, help="Where a search keeps what it found, for the next one."),
]
FOLDER = Path(".kda-search")


def searched(
    kernel: Adapter, minutes: float, folder: Path, full: bool, seconds: float, tell: Callable[[str], None]
) -> list[Found]:
    """The worst case of each contract, or nothing where no minutes are given."""
    if not minutes:
        return []
    try:
        return search(kernel, minutes, tell, folder, full, seconds=seconds)
    except ImportError as error:
        raise BadAdapterError(
            f"--search needs hypothesis: pip install kimi-linear-reference[search] ({error})"
        ) from None
