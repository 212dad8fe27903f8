"""`kimi-linear make-checkpoint` and `kimi-linear inspect`: write a small checkpoint; look into any."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from ..reference.model.checkpoint import Checkpoint, count_parameters, open_checkpoint, read_config
from ..reference.model.config import KimiLinearConfig
from ..reference.model.names import checkpoint_shapes
from ..reference.model.presets import KIMI_LINEAR_48B
from ..reference.model.writer import make_checkpoint, tiny_config
from .common import CheckpointFolder, DType, plain_errors, table_console

PRESETS = {"kimi-linear-48b": KIMI_LINEAR_48B}
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Tensor(NamedTuple):
    """A line's worth of a tensor: its name with every number a star, its shape and dtype."""

    pattern: str
    shape: tuple[int, ...]
    dtype: str


def make_checkpoint_command(
    folder: CheckpointFolder,
    layers: Annotated[int, typer.Option(min=1, help="Layers; every fourth and the last are MLA.")] = 4,
    seed: Annotated[int, typer.Option(help="Same seed, same bytes, on any machine.")] = 0,
    shards: Annotated[int, typer.Option(min=1, help="Files to spread the weights over.")] = 3,
    dtype: Annotated[DType, typer.Option(help="bf16, as the released checkpoint, or fp32.")] = DType.bf16,
) -> None:
    """Write a tiny valid checkpoint with random weights, in the released checkpoint's layout."""
    with plain_errors():
        config = tiny_config(layers)
        make_checkpoint(folder, config, seed, shards=shards, dtype=dtype.torch())
    total = count_parameters(config).total
    typer.echo(f"{folder}: {layers} layers, {total:,} parameters, {shards} shards, seed {seed}.")


def inspect_command(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Folder of the checkpoint, or a config.json.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help=f"Instead of DIR: {', '.join(PRESETS)}.")] = None,
) -> None:
    """Say whether a checkpoint is complete: names, shapes and dtypes, without reading its weights.

    A config.json, or --preset, is counted without any weights. Exit code 1 when something does not fit.
    """
    if (folder is None) == (preset is None):
        raise typer.BadParameter("give DIR or --preset, one of them")
    if preset is not None and preset not in PRESETS:
        raise typer.BadParameter(f"must be one of {', '.join(PRESETS)}; got {preset}", param_hint="--preset")
    with plain_errors():
        if preset is not None:
            _report_config(PRESETS[preset])
        elif folder is not None and folder.name.endswith(".json"):
            _report_config(read_config(folder))
        elif folder is not None:
            _report_checkpoint(open_checkpoint(folder))


def _report_config(config: KimiLinearConfig) -> None:
    shapes = checkpoint_shapes(config)
    tensors = [Tensor(_pattern(name), shape, str(dtype)) for name, (shape, dtype) in shapes.items()]
    _print(tensors, config, f"{len(shapes):,} tensors wanted by the config; no weights were looked for.")


def _report_checkpoint(checkpoint: Checkpoint) -> None:
    stored = checkpoint.stored
    in_order = dict.fromkeys(part.stored for part in checkpoint.parts.values())
    tensors = [Tensor(_pattern(name), stored[name].shape, stored[name].dtype) for name in in_order]
    files = len({x.file for x in stored.values()})
    wanted = len(checkpoint.parts)
    fit = f"{len(stored):,} tensors in {files:,} files: all {wanted:,} of the model are there, no others."
    _print(tensors, checkpoint.config, fit)


def _print(tensors: Iterable[Tensor], config: KimiLinearConfig, summary: str) -> None:
    table_console().print(_table(tensors))
    count = count_parameters(config)
    typer.echo(summary)
    typer.echo(f"{count.total:,} parameters, {count.activated:,} activated by a token.")


def _table(tensors: Iterable[Tensor]) -> Table:
    table = Table(title="Tensors")
    table.add_column("name", overflow="fold")
    for heading in ("tensors", "shape", "dtype", "parameters"):
        table.add_column(heading, justify="left" if heading == "dtype" else "right")
    counts: dict[Tensor, int] = {}
    for tensor in tensors:
        counts[tensor] = counts.get(tensor, 0) + 1
    for (pattern, shape, dtype), count in counts.items():
        sizes = " x ".join(map(str, shape))
        table.add_row(pattern, f"{count:,}", sizes, dtype.removeprefix("torch."), f"{count * math.prod(shape):,}")
    return table


def _pattern(name: str) -> str:
    return NUMBER.sub("*", name)
