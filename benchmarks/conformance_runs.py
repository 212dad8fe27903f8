"""Judge the shipped adapters on this machine and record what comes out, for docs/conformance-matrix.md.

    python benchmarks/conformance_runs.py cpu [NAME ..]      naive, chunked, transformers, ONNX, interpreted kernels
    python benchmarks/conformance_runs.py cuda [NAME ..]     the GPU's columns
    kimi-linear conformance matrix                           write the document from the records

The checks of all columns are spread over --workers processes (`kimi_linear.conformance.shards`), with this Python or,
for fla's columns, with --fla-python: on a CPU fla must not be installed beside transformers. After --minutes the run
stops, and the records say what was not run. With --keep, a run goes on where one of the same day was interrupted.
Where a kernel cannot be judged, such as FlashKDA where it is not installed, the reason is recorded.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from kimi_linear.conformance.limits import CASE_SECONDS
from kimi_linear.conformance.matrix import ADAPTERS, COLUMNS, Column, dump, recorded, without_folders
from kimi_linear.conformance.shards import Job, Judged, judge_jobs
from kimi_linear.conformance.waivers import read_waivers

FOLDER = Path(__file__).parent / "results" / "conformance"
WAIVERS = Path(__file__).parent.parent / "conformance" / "adapters"
GPU_SECONDS = 2 * CASE_SECONDS  # of a case: on a GPU its first call compiles, while others do
FLA_CONFIGS = 1  # of each kernel, for the autotuner: it would take minutes for each new shape
TODAY = datetime.now(UTC).date().isoformat()


def machine(device: str) -> str:
    """What the kernel ran on, in words."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__}"


def job_of(column: Column, fla_python: str, keep: Path) -> Job:
    """How a column is judged."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONWARNINGS": "ignore"} | ({"TRITON_INTERPRET": "1"} if column.interpreted else {})
    on_gpu, fla = column.device == "cuda", column.name.startswith("fla")
    return Job(
        column.name,
        f"{ADAPTERS}.{column.adapter}",
        column.mode == "--full",
        keep / f"{column.name}.{TODAY}.jsonl",
        fla_python if fla else sys.executable,
        environment,
        GPU_SECONDS if on_gpu else CASE_SECONDS,
        FLA_CONFIGS if on_gpu and column.name.startswith("fla_") else None,
    )


def record_of(column: Column, judged: Judged) -> dict[str, Any]:
    """A record with the verdicts, or with the problem."""
    about = {"date": TODAY, "machine": machine(column.device)}
    if judged.job.configs is not None:
        about["note"] = f"the autotuner was left {judged.job.configs} configuration of each kernel, its first"
    if not judged.identity:
        problem = without_folders(judged.problem.splitlines()[-1])
        return {"column": column.name, "command": column.command, **about, "problem": problem}
    waivers = next((path for name in column.waivers if (path := WAIVERS / name).exists()), None)
    return recorded(column, judged.report({} if waivers is None else read_waivers(waivers)), about)


def summary(record: dict[str, Any]) -> str:
    """A record in one line."""
    if "verdicts" not in record:
        return f"{record['column']}: {record['problem']}"
    statuses = [verdict["status"] for verdict in record["verdicts"]]
    return f"{record['column']}: " + ", ".join(f"{statuses.count(one)} {one}" for one in dict.fromkeys(statuses))


def main(
    device: Annotated[str, typer.Argument(help="cpu or cuda")],
    names: Annotated[list[str] | None, typer.Argument(help="Columns; all of the device by default.")] = None,
    fla_python: Annotated[str, typer.Option(help="A Python with fla installed.")] = sys.executable,
    workers: Annotated[int, typer.Option(min=1, help="Processes at the same time.")] = 1,
    minutes: Annotated[float | None, typer.Option(min=0, help="For all columns; what is left is not run.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Where unfinished runs wait.")] = None,
    out: Annotated[Path, typer.Option(help="Where records go, one file a column.")] = FOLDER,
) -> None:
    """Judge the shipped adapters and record what comes out."""
    columns = {column.name: column for column in COLUMNS if column.device == device}
    unknown = [name for name in names or () if name not in columns]
    if not columns or unknown:
        raise typer.BadParameter(f"must be cpu or cuda, with names among {list(columns)}; got {device} {unknown}")
    keep = keep or Path(tempfile.mkdtemp())
    keep.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # of the judges: they take their parent's number
    jobs = [job_of(columns[name], fla_python, keep) for name in names or columns]
    for judged in judge_jobs(jobs, workers, None if minutes is None else 60 * minutes):
        record = record_of(columns[judged.job.name], judged)
        (out / f"{judged.job.name}.json").write_text(dump(record))
        typer.echo(summary(record))


if __name__ == "__main__":
    typer.run(main)
