"""One candidate of `tune.py`: block shapes that are checked and timed, in a process that they may take down.

The built-in shapes are the truth here; tests and the conformance suite hold those to the fp64 recurrence.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.testing
from torch import Tensor

from expendable import first_line
from kimi_linear.reference import BoundedGate, FrontEnd, SoftplusGate
from kimi_linear.triton_kernels import chunk_launch, tuning
from kimi_linear.triton_kernels.chunk_plan import Shape
from kimi_linear.triton_kernels.support import Launch

KERNELS = {"tiles": "kda_tiles_kernel", "chunks": "kda_chunks_kernel", "state": "kda_state_kernel"}
GATES = ("softplus", "bounded", "given")
DTYPES = ("bfloat16", "float16", "float32")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # the latter for tests, in the interpreter
SLOWEST = -7.0  # bias of the slowest channel's gate: it remembers hundreds of tokens, so that chunks depend on others
REFUSALS = (triton.errors.TritonError, RuntimeError)  # of a compiler or a driver
POISON = 0xFF  # a byte; numbers made of it are NaN in every dtype

# How far valid shapes may be apart. They add up the same products in another order. That is a matter of fp32, until
# an operand falls on the other side of a rounding: one eps of the kernel's dtype. There are eight on the way to o (k
# and q with their decays, A, T, w, u, S, v_new), so this is all of them at once. In the interpreter it was 0.7 eps at
# most; a product with wrong rows is off by the size of a row.
ROUNDINGS = 8
EPS = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-21}  # of fp32 operands: three tf32 products


class Case(NamedTuple):
    """A call to tune for."""

    dtype: str
    gate: str
    channels: int
    heads: int
    tokens: int


class BuiltIn(NamedTuple):
    """A kernel's launch without a table, and what a table says instead."""

    key: str
    shape: Shape
    most: int  # channels of the widest slice


def start() -> None:
    """Before any candidate. What compilers print would tear the progress bar."""
    sink = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(sink, stream)
    torch.zeros(1, device=DEVICE)


@functools.lru_cache(maxsize=1)
def example(case: Case) -> tuple[dict[str, Any], chunk_launch.Options]:
    """Inputs of a call, the same in every process, and its options. Channels forget at once to hardly ever."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    heads, channels = case.heads, case.channels

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, device=DEVICE).to(getattr(torch, case.dtype))

    tensors: dict[str, Any] = dict.fromkeys(chunk_launch.INPUTS)
    tensors |= {name: normal(1, case.tokens, heads, channels) for name in ("q", "k", "v", "g")}
    tensors["beta"] = normal(1, case.tokens, heads)
    bias = torch.linspace(SLOWEST, 0, channels, device=DEVICE)
    front_end = FrontEnd(gate=None)
    if case.gate == "given":
        tensors["g"] = -tensors["g"].abs() * bias.exp().to(tensors["g"].dtype)
    else:
        A_log, dt_bias = torch.zeros(heads, device=DEVICE), bias.expand(heads, channels).contiguous()
        front_end = FrontEnd(gate={"softplus": SoftplusGate, "bounded": BoundedGate}[case.gate](A_log, dt_bias))
        tensors |= {"A_log": A_log, "dt_bias": dt_bias}
    return tensors, chunk_launch.options_of(front_end, channels**-0.5, True)


def built_in(case: Case) -> dict[str, BuiltIn]:
    """The launches of a case without a table, by kernel."""
    tuning.use_table(None)
    tensors, options = example(case)
    call = chunk_launch.prepare(tensors, options)
    KP, VP, gate = call.plan.KP, call.plan.VP, call.options.gate
    return {
        kernel: BuiltIn(
            tuning.table_key(kernel, dtype=tensors["q"].dtype, KP=KP, VP=VP, gate=gate),
            getattr(call.plan, kernel),
            VP if kernel == "state" else KP,
        )
        for kernel in KERNELS
    }


@contextmanager
def in_use(case: Case, shapes: dict[str, Shape]) -> Iterator[None]:
    """These shapes through a table, as a user gets them: other constants of the launches follow from them."""
    launches = {built_in(case)[kernel].key: shape._asdict() for kernel, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.json")
        path.write_text(json.dumps({"device": tuning.device_name(DEVICE), "launches": launches}))
        tuning.use_table(path)
        try:
            yield
        finally:
            tuning.use_table(None)


def run_call(case: Case) -> tuple[list[Launch], dict[str, Tensor]]:
    """One call with the shapes in use, into memory full of NaN: its launches and its results."""
    tensors, options = example(case)
    call = chunk_launch.prepare(tensors, options)
    memory = torch.full((call.layout.size,), POISON, dtype=torch.uint8, device=DEVICE)
    o = torch.full_like(tensors["v"], torch.nan)
    results = {"o": o, "final_state": chunk_launch.empty_state(tensors["q"], o, call.N).fill_(torch.nan)}
    launches = chunk_launch.chunk_launches(tensors | results, call.layout.cut(memory), call)
    for launch in launches:
        launch.run()
    return launches, results


@functools.lru_cache(maxsize=1)
def expected(case: Case) -> dict[str, Tensor]:
    """The results with the built-in shapes."""
    with in_use(case, {}):
        return run_call(case)[1]


def disagreement(got: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> str:
    """The result that is further off than `bound`, in words, or nothing.

    By its worst row, rms over rms: of the row, or of the whole where the row is smaller.
    """
    for name, right in want.items():
        right = right.float()
        whole = right.square().mean().sqrt()
        error = (got[name].float() - right).square().mean(-1).sqrt()
        worst = (error / right.square().mean(-1).sqrt().clamp(min=whole)).max().item()
        if not worst <= bound:  # NaN is not
            return (
                f"{name} differs from that of the built-in shapes by {worst:.1e} of a row's size, above {bound:.1e}"
            )
    return ""


def milliseconds(launches: list[Launch]) -> float:
    """Median time of these launches, one after another; on a GPU in a graph, without the host's part."""
    bench = triton.testing.do_bench_cudagraph if DEVICE.type == "cuda" else triton.testing.do_bench
    return bench(lambda: [launch.run() for launch in launches], return_mode="median")


def synchronize() -> None:
    """Wait for the GPU; raises what went wrong there."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def try_shapes(case: Case, shapes: dict[str, Shape]) -> float | str:
    """Milliseconds of these kernels (of none: of all, as built in), or why they do not count.

    Raises where the GPU's context is lost: then the process is of no use any more.
    """
    want = expected(case)
    try:
        with in_use(case, shapes):
            launches, got = run_call(case)
        names = [KERNELS[kernel] for kernel in shapes or KERNELS]
        problem = disagreement(got, want, ROUNDINGS * EPS[case.dtype])
        if not problem:
            return milliseconds([x for x in launches if x.kernel.__name__ in names])
        for kept in (example, expected):  # which it may have written to
            kept.cache_clear()
        return problem
    except REFUSALS as error:
        synchronize()  # raises once more if this was an error of CUDA
        return f"{type(error).__name__}: {first_line(error)}"
