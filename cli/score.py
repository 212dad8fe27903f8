"""`kimi-linear conformance score`: judge the judge."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..conformance.measure import measure, steps
from ..conformance.score import Score
from ..conformance.score_page import markdown
from ..conformance.score_record import ScoreRecord
from ..conformance.score_text import score_lines

INTERRUPTED = 2
CORES = os.cpu_count() or 1
Full = Annotated[bool, typer.Option("--full/--quick", help="All checks, or those that see most.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", dir_okay=False, help="Write JSON too.")]
PageFile = Annotated[
    Path | None,
    typer.Option("--markdown", metavar="FILE", dir_okay=False, help="Write tables too; with --full, of both modes."),
]
Workers = Annotated[int, typer.Option(min=1, help="Processes; as many as cores unless given.")]
Resume = Annotated[
    Path | None,
    typer.Option(metavar="FILE", dir_okay=False, help="Keep what is found there, and go on from it."),
]


def score_command(
    full: Full = False,
    json_file: JsonFile = None,
    page: PageFile = None,
    workers: Workers = CORES,
    resume: Resume = None,
) -> None:
    """Plant known bugs in correct kernels and count what the suite sees.

    Exit code 0 when no correct kernel fails and all bugs are seen (with --quick: 90 % of them), else 1; 2 when it
    is interrupted or cannot go on from the file.
    """
    torch.set_num_threads(1)
    try:
        with progress(steps()) as tell:
            found = measure(full=full, tell=tell, workers=workers, record=ScoreRecord(resume))
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except KeyboardInterrupt:
        again = "" if resume is None else f"; the same command with --resume {resume} goes on"
        typer.echo(f"interrupted{again}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if json_file is not None:
        json_file.write_text(json.dumps(found.as_json(), indent=2) + "\n")
    if page is not None:
        command = f"kimi-linear conformance score {'--full' if full else '--quick'} --markdown {page}"
        page.write_text("\n".join(markdown(modes(found), command=command)) + "\n")
    typer.echo("\n".join(score_lines(found)))
    raise typer.Exit(0 if found.ok else 1)


def modes(found: Score) -> list[Score]:
    """The score, after the one that its quick checks alone would have given."""
    return [found.quick(), found] if found.full else [found]


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to tell what is done: a bar where stderr is a terminal, else a line each."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<40.40}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def tell(line: str) -> None:
            bar.update(task, description=line, advance=1)
            if not console.is_terminal:
                typer.echo(f"{bar.tasks[0].completed:.0f} of {total}: {line}", err=True)

        yield tell
