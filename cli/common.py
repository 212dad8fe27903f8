"""What the commands share: dtypes by name, errors that end a command without a traceback, tables' width."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

PIPE_WIDTH = 120  # columns of a table that goes to a file or a pipe

CheckpointFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the checkpoint.")]


class DType(StrEnum):
    """Precision of weights and activations; A_log, dt_bias and the router stay in fp32 or wider."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
    fp64 = "fp64"

    def torch(self) -> torch.dtype:
        """As torch calls it."""
        names = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
        return names[self]


class RouterWeightsOption(StrEnum):
    """Whether the router's correction bias is part of the mixing weights."""

    unbiased = "unbiased"
    biased = "biased"


@contextmanager
def plain_errors() -> Iterator[None]:
    """A mistake in a file or an argument is a message and exit code 1."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


def table_console() -> Console:
    """Standard output, as wide as a terminal or as a table needs."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
