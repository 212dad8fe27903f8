"""Time candidate block shapes of the chunk kernels on the GPU at hand, and write the best as a table.

    python benchmarks/tune.py tuned.json [--tokens 8192] [--heads 32] [--channels 128 ..]

A kernel at a time, the others as they are; candidates that do not compile or fit are left out. See
`kimi_linear.triton_kernels.tuning` for how a table is used.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
import triton.testing

from kimi_linear.reference import BoundedGate, FrontEnd, SoftplusGate
from kimi_linear.triton_kernels import chunk_launch, chunk_plan, tuning
from kimi_linear.triton_kernels.support import next_power_of_2

KERNELS = {"tiles": "kda_tiles_kernel", "chunks": "kda_chunks_kernel", "state": "kda_state_kernel"}
GATES = ("softplus", "bounded", "given")


def candidates(kernel: str, most: int) -> Iterator[chunk_plan.Shape]:
    """Shapes to try: slices, warps, stages, and register limits where programs share a multiprocessor."""
    blocks = [n for n in (16, 32, 64, 128) if n <= most]
    warps = (1, 2) if kernel == "tiles" else (4, 8)
    stages = (1, 2, 3) if kernel == "state" else (1,)
    registers = (None, 128, 168) if kernel == "tiles" else (None,)
    yield from (chunk_plan.Shape(*choice) for choice in product(blocks, warps, stages, registers))


def example(dtype: torch.dtype, gate: str, channels: int, heads: int, tokens: int) -> tuple[dict[str, Any], Any]:
    """Tensors of a call on the GPU, and its options."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=dtype)

    tensors: dict[str, Any] = dict.fromkeys(chunk_launch.INPUTS)
    tensors |= {name: normal(1, tokens, heads, channels) for name in ("q", "k", "v", "g")}
    tensors["beta"] = normal(1, tokens, heads)
    front_end = FrontEnd(gate=None)
    if gate == "given":
        tensors["g"] = -tensors["g"].abs()
    else:
        A_log, dt_bias = torch.zeros(heads, device="cuda"), torch.zeros(heads, channels, device="cuda")
        front_end = FrontEnd(gate={"softplus": SoftplusGate, "bounded": BoundedGate}[gate](A_log, dt_bias))
        tensors |= {"A_log": A_log, "dt_bias": dt_bias}
    return tensors, chunk_launch.options_of(front_end, channels**-0.5, True)


def time_kernel(kernel: str, shape: chunk_plan.Shape, tensors: dict[str, Any], options: Any) -> float:
    """Milliseconds of one kernel in this shape; inf where it does not run."""
    call = chunk_launch.prepare(tensors, options)
    call = call._replace(plan=call.plan._replace(**{kernel: shape}))
    memory = torch.zeros(call.layout.size, dtype=torch.uint8, device="cuda")
    o = torch.empty_like(tensors["v"])
    results = {"o": o, "final_state": chunk_launch.empty_state(tensors["q"], o, call.N)}
    try:
        launches = chunk_launch.chunk_launches(tensors | results, call.layout.cut(memory), call)
        launch = next(x for x in launches if x.kernel.__name__ == KERNELS[kernel])
        for before in launches:
            before.run()
        return triton.testing.do_bench(launch.run, return_mode="median")
    except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError, RuntimeError):
        return float("inf")


def tune(channels: int, heads: int, tokens: int) -> dict[str, dict[str, Any]]:
    """The best launch of each kernel, dtype and gate."""
    best: dict[str, dict[str, Any]] = {}
    padded = max(16, next_power_of_2(channels))
    for dtype, gate in product((torch.bfloat16, torch.float16, torch.float32), GATES):
        tensors, options = example(dtype, gate, channels, heads, tokens)
        code = chunk_launch.prepare(tensors, options).options.gate
        for kernel in KERNELS:
            timed = {shape: time_kernel(kernel, shape, tensors, options) for shape in candidates(kernel, padded)}
            shape = min(timed, key=timed.__getitem__)
            key = tuning.table_key(kernel, dtype=dtype, KP=padded, VP=padded, gate=code)
            best[key] = shape._asdict()
            print(f"{key:56} {timed[shape] * 1e3:8.1f} us  {shape}", flush=True)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, help="the JSON file to write")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--channels", type=int, nargs="+", default=[128])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("tuning needs a GPU, and torch finds none")
    tuning.use_table(None)
    launches: dict[str, Any] = {}
    for channels in arguments.channels:
        launches |= tune(channels, arguments.heads, arguments.tokens)
    table = {
        "device": tuning.device_name(torch.device("cuda")),
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "launches": launches,
    }
    arguments.table.write_text(json.dumps(table, indent=2) + "\n")
    tuning.use_table(arguments.table)  # reads it back: a table that would be refused is not left behind in silence
    return 0


if __name__ == "__main__":
    sys.exit(main())
