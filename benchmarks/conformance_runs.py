"""Judge the shipped adapters on this machine and record what comes out, for docs/conformance-matrix.md.

    python benchmarks/conformance_runs.py cpu [NAME ..]      naive, chunked, transformers, ONNX, interpreted kernels
    python benchmarks/conformance_runs.py cuda [NAME ..]     the GPU's columns
    kimi-linear conformance matrix                           write the document from the records

Each run is a process of its own, with this Python or, for fla's columns, with --fla-python: on a CPU fla must not be
installed beside transformers. A run goes on where one of the same day was interrupted. Where a kernel cannot be
judged, such as FlashKDA where it is not installed, the reason is recorded.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kimi_linear.conformance.matrix import ADAPTERS, COLUMNS, Column, dump, recorded

FOLDER = Path(__file__).parent / "results" / "conformance"
COMMAND = "from kimi_linear.cli.main import app; app()"
WAIVERS = Path(__file__).parent.parent / "conformance" / "adapters"


def machine(device: str) -> str:
    """What the kernel ran on, in words."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__}"


def run(column: Column, python: str, keep: Path) -> dict[str, Any]:
    """Judge one kernel; a record with the verdicts, or with the problem."""
    about = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(column.device)}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if column.interpreted:
        environment["TRITON_INTERPRET"] = "1"
    report = keep / f"{column.name}.report.json"
    command = [
        python,
        "-W",
        "ignore",
        "-c",
        COMMAND,
        "conformance",
        "run",
        f"{ADAPTERS}.{column.adapter}",
        column.mode,
    ]
    command += ["--json", str(report), "--resume", str(keep / f"{column.name}.{about['date']}.jsonl")]
    waivers = WAIVERS / f"{column.adapter.replace(':', '_')}.waivers"
    command += ["--waivers", str(waivers)] if waivers.exists() else []
    ended = subprocess.run(command, env=environment, text=True, capture_output=True)
    if not report.exists():
        problem = (ended.stderr.strip() or ended.stdout.strip()).splitlines()[-1]
        return {"column": column.name, "command": column.command, **about, "problem": problem}
    return recorded(column, json.loads(report.read_text()), about)


def main(
    device: Annotated[str, typer.Argument(help="cpu or cuda")],
    names: Annotated[list[str] | None, typer.Argument(help="Columns; all of the device by default.")] = None,
    fla_python: Annotated[str, typer.Option(help="A Python with fla installed.")] = sys.executable,
    workers: Annotated[int, typer.Option(help="Runs at the same time.")] = 1,
    keep: Annotated[Path | None, typer.Option(help="Where unfinished runs wait.")] = None,
    out: Annotated[Path, typer.Option(help="Where records go.")] = FOLDER,
) -> None:
    """Judge the shipped adapters and record what comes out."""
    columns = [column for column in COLUMNS if column.device == device and (not names or column.name in names)]
    if not columns:
        raise typer.BadParameter(f"must be among {[c.name for c in COLUMNS if c.device == device]}; got {names}")
    keep = keep or Path(tempfile.mkdtemp())
    keep.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)

    def one(column: Column) -> None:
        record = run(column, fla_python if column.name.startswith("fla") else sys.executable, keep)
        (out / f"{column.name}.json").write_text(dump(record))
        typer.echo(f"{column.name}: {record.get('problem') or len(record['verdicts'])}")

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(one, columns))


if __name__ == "__main__":
    typer.run(main)
