"""Time candidate block shapes of the chunk kernels on the GPU at hand, and write the best as a table.

    python benchmarks/tune.py tuned.json [--tokens 8192] [--heads 32] [--channels 128 ..]
                                         [--dtypes bfloat16 ..] [--gates softplus ..]

A kernel at a time, the others as they are built in, and then the three winners together. A candidate counts if the
call gives what the built-in shapes give, but for rounding. Each runs in a process that may die: one that crashes it,
hangs, or leaves an error of CUDA behind is left out, as is one that does not compile or fit, and the others go on.
See `kimi_linear.triton_kernels.tuning` for how a table is used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from expendable import START_SECONDS, Expendable, LostError
from kimi_linear.triton_kernels import tuning
from kimi_linear.triton_kernels.chunk_plan import Shape
from tune_trial import DEVICE, DTYPES, GATES, BuiltIn, Case, built_in, start, try_shapes

SECONDS = 60.0  # of a candidate, compiling included; then it hangs


def candidates(kernel: str, most: int) -> Iterator[Shape]:
    """Shapes to try: slices, warps, stages, and register limits where programs share a multiprocessor."""
    blocks = [n for n in (16, 32, 64, 128) if n <= most]
    warps = (1, 2) if kernel == "tiles" else (4, 8)
    stages = (1, 2, 3) if kernel == "state" else (1,)
    registers = (None, 128, 168) if kernel == "tiles" else (None,)
    yield from (Shape(*choice) for choice in product(blocks, warps, stages, registers))


def attempt(process: Expendable, case: Case, shapes: dict[str, Shape], seconds: float = SECONDS) -> float | str:
    """As `try_shapes`; a lost process is one more reason not to count."""
    try:
        return process.run(try_shapes, case, shapes, seconds=seconds)
    except LostError as lost:
        return str(lost)


def tune(case: Case, process: Expendable, tick: Callable[[str, int], None]) -> dict[str, dict[str, Any]]:
    """The best launch of each kernel, as a table has it. tick(what is tried, of how many) goes before each."""
    launches: dict[str, BuiltIn] = process.run(built_in, case)
    before = attempt(process, case, {}, seconds=START_SECONDS)
    if isinstance(before, str):
        raise RuntimeError(f"there is nothing to compare with: {case} as built in: {before}")
    trials = {x: list(dict.fromkeys((now.shape, *candidates(x, now.most)))) for x, now in launches.items()}
    best: dict[str, Shape] = {}
    for kernel, shapes in trials.items():
        timed: dict[Shape, float] = {}
        for shape in shapes:
            tick(f"{case.dtype} {case.gate} {kernel} {tuple(shape)}", sum(map(len, trials.values())))
            found = attempt(process, case, {kernel: shape})
            if isinstance(found, str):
                print(f"{launches[kernel].key}: {shape} is left out: {found}", flush=True)
            else:
                timed[shape] = found
        if timed:
            best[kernel] = shape = min(timed, key=timed.__getitem__)
            print(f"{launches[kernel].key:56} {timed[shape] * 1e3:8.1f} us  {shape}", flush=True)
    together = attempt(process, case, best)
    if isinstance(together, str):
        print(f"{case}: the best of each kernel are left out, since together: {together}", flush=True)
        return {}
    print(f"{case.dtype} {case.gate}: all three {together * 1e3:.1f} us, built in {before * 1e3:.1f} us", flush=True)
    if together >= before:
        print(f"{case}: the built-in shapes stay, since together these are no faster", flush=True)
        return {}
    return {launches[kernel].key: shape._asdict() for kernel, shape in best.items()}


def tune_all(cases: list[Case], process: Expendable) -> dict[str, dict[str, Any]]:
    """The best launches of all cases, with a bar for each where standard error is a terminal."""
    console = Console(stderr=True)
    best: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    options: dict[str, Any] = {"transient": True, "redirect_stdout": sys.stdout.isatty()}
    with Progress(*columns, console=console, disable=not console.is_terminal, **options) as bar:
        for number, case in enumerate(cases, 1):
            task = bar.add_task("", total=None)

            def tick(what: str, total: int, task: Any = task, place: str = f"{number} of {len(cases)}") -> None:
                bar.update(task, description=f"{place}: {what}", total=total, advance=1)

            best |= tune(case, process, tick)
            bar.remove_task(task)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the JSON file to write")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--channels", type=int, nargs="+", default=[128])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--gates", nargs="+", choices=GATES, default=GATES)
    asked = parser.parse_args()
    if DEVICE.type != "cuda":
        parser.error("tuning needs a GPU, and torch finds none")
    cases = [Case(*one, asked.heads, asked.tokens) for one in product(asked.dtypes, asked.gates, asked.channels)]
    with closing(Expendable(start, SECONDS)) as process:
        table = {
            "device": process.run(tuning.device_name, DEVICE),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "launches": tune_all(cases, process),
        }
    asked.table.write_text(json.dumps(table, indent=2) + "\n")
    tuning.use_table(asked.table)  # reads it back: a table that would be refused is not left behind in silence
    return 0


if __name__ == "__main__":
    sys.exit(main())
