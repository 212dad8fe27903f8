"""What the CPU benchmarks share: a clock, peak memory, an error, where numbers come from, a table."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

RESET_PEAK = "5"  # what /proc/self/clear_refs takes to set VmHWM back to the present size
KIB = 2**10


class Spread(NamedTuple):
    """Of several measurements."""

    median: float
    min: float
    max: float


def spread(samples: Iterable[float]) -> Spread:
    listed = list(samples)
    return Spread(median(listed), min(listed), max(listed))


def seconds(call: Callable[[], object]) -> float:
    """Wall clock of one call; the collector waits outside, as in timeit, and so does freeing the result."""
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    gc.enable()
    del result
    return elapsed


def time_in_rounds(
    calls: Mapping[Any, Callable[[], object]], repeats: int, tick: Callable[[], None]
) -> dict[Any, Spread]:
    """Time every call once a round, so that a slow spell of the machine falls on all of them."""
    rounds = []
    for _ in range(repeats):
        rounds.append({name: seconds(call) for name, call in calls.items()})
        tick()
    return {name: spread(times[name] for times in rounds) for name in calls}


def worst_row_error(x: Tensor, truth: Tensor) -> float:
    """max of RMS(x - truth) / RMS(truth) over the rows whose truth is not 0; NaN stays NaN."""
    size = truth.square().mean(-1).sqrt()
    error = (x.double() - truth).square().mean(-1).sqrt()
    return (error[size > 0] / size[size > 0]).max().item()


def reset_peak() -> int | None:
    """Set the kernel's peak counter to the present size, and return that; None where it cannot be told."""
    if not sys.platform.startswith("linux"):
        return None
    Path("/proc/self/clear_refs").write_text(RESET_PEAK)
    return highest_resident()


def highest_resident() -> int | None:
    """VmHWM in bytes. Not getrusage: its maximum is inherited from the parent and cannot be reset."""
    if not sys.platform.startswith("linux"):
        return None
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) * KIB


def above(before: int | None) -> int | None:
    """The peak since `reset_peak`, less what it returned."""
    now = highest_resident()
    return None if before is None or now is None else now - before


def use_all_cores() -> None:
    torch.set_num_threads(os.cpu_count() or 1)


def provenance(*packages: str) -> dict[str, str]:
    """What a reader needs to judge the numbers or take them again."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "CPU": cpu_model(),
        "threads": str(torch.get_num_threads()),
        "load average before": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
    }


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """A table in markdown under its title."""
    rule = ["---"] * len(header)
    lines = ["| " + " | ".join(row) + " |" for row in (header, rule, *rows)]
    return f"## {title}\n\n" + "\n".join(lines) + "\n"


def document(title: str, found: dict[str, Any], quick: bool, how: str, tables: Iterable[str]) -> str:
    """The run in markdown: where the numbers come from first, then the tables."""
    head = "".join(f"- {name}: {value}\n" for name, value in found["provenance"].items())
    warning = "A quick run: the sizes are too small to conclude anything from.\n\n" if quick else ""
    return f"# {title}\n\n{warning}{head}\n{how}\n\n" + "\n".join(tables)


def folder_for(out: Path | None, quick: bool) -> Path:
    """Where results go: `out`, or benchmarks/results, or for a quick run a temporary folder."""
    if out is None:
        out = Path(tempfile.mkdtemp(prefix="kda-")) if quick else Path(__file__).parent / "results"
    out.mkdir(parents=True, exist_ok=True)
    return out
