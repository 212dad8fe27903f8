"""KDA on a CPU: time, memory and error of our tiers beside transformers' plain PyTorch, from one run.

    python benchmarks/cpu.py [--quick] [--out FOLDER]         writes cpu.json, cpu.md and cpu.png

ours            `chunk_kda` (chunk 64), `recurrent_kda`; backward by autograd and by hand (`chunk_kda_backward`)
transformers    `chunk_kimi_delta_attention`, `recurrent_kimi_delta_attention`: the functions that its Kimi
                Linear falls back to where no kernel is installed, without the wrapper that looks for one

fp32, B = 1, all cores. q and k are unit vectors, v is normal, beta in (0, 1), g from a softplus gate with the
parameters that KDA layers start from. No initial state; the final state is asked for and has a cotangent.

time      Wall clock of one call: median (min .. max) of several rounds after a warm-up call of each. A round
          calls every candidate once, so that a slow spell of the machine falls on all of them. Forward runs
          without autograd. Forward + backward is one forward and the gradients of q, k, v, g and beta; the
          adjoint by hand recomputes the forward stages, so that is what its one call does too.
growth    The same for `chunk_kda` alone over longer sequences, as time per token: flat means linear in T. glibc
          hands blocks above 32 MiB back to the kernel, so where tensors pass that size (T = 8192 in the full
          run) every call pays for fresh pages and the line steps up once. The allocator is left as users have it.
memory    Highest resident memory of one forward call above what the process held before it, results and
          malloc's holes included: a fresh process each, the kernel's peak counter reset first. Linux only.
error     Against the fp64 recurrence (`recurrent_kda`, `recurrent_kda_backward`) on the same inputs: for each
          row (last dimension) RMS(x - truth) / RMS(truth), and of these the largest. Rows that are exactly 0
          in truth have no such ratio and are left out: the gradient of the first gate, which decays nothing.

Not here: GPU kernels, and other people's CPU code than transformers'.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as theirs

from kimi_linear.reference import KDAGradients, SoftplusGate, l2norm
from kimi_linear.reference.chunked import chunk_kda, chunk_kda_backward
from kimi_linear.reference.naive import recurrent_kda, recurrent_kda_backward
from measuring import (
    Spread,
    above,
    document,
    folder_for,
    provenance,
    reset_peak,
    table,
    time_in_rounds,
    use_all_cores,
    worst_row_error,
)

SEED = 0
A_RANGE = (1.0, 16.0)  # exp(A_log) of a fresh KDA layer, uniform
DT_RANGE = (1e-3, 1e-1)  # softplus(dt_bias) of a fresh KDA layer, log-uniform
WARMUP_T = 64  # tokens; loads libraries and starts threads before memory is counted
MIB = 2**20
FORWARD, BOTH = "forward", "forward + backward"
NAMES = {FORWARD: ("o", "final state"), BOTH: ("dq", "dk", "dv", "dg", "dbeta")}


class Plan(NamedTuple):
    """Sizes and repeats of a run."""

    H: int
    K: int
    V: int
    lengths: tuple[int, ...]  # T of the comparison
    growth: tuple[int, ...]  # T of the time per token
    error_T: int  # the fp64 adjoint keeps every state: 0.5 GiB at 512
    memory_T: int
    repeats: int  # odd, so that the median is a measurement


FULL = Plan(8, 128, 128, (512, 1024, 2048), tuple(1024 * 2**i for i in range(6)), 512, 2048, repeats=9)
QUICK = Plan(2, 32, 32, (64, 128, 256), (64, 128, 256, 512), 64, 256, repeats=3)  # proves that it runs, no more


class Case(NamedTuple):
    """Inputs of one call, and cotangents of its outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    do: Tensor
    dht: Tensor


class Candidate(NamedTuple):
    """Something to time. `run` returns the tensors that NAMES lists for its direction."""

    direction: str
    run: Callable[[Case], Sequence[Tensor]]


def make_case(plan: Plan, T: int) -> Case:
    """The same random numbers for every candidate and every process."""
    random = torch.Generator().manual_seed(SEED)
    normal = partial(torch.randn, generator=random)
    q, k, raw_gate = (normal(1, T, plan.H, plan.K) for _ in range(3))
    v, do = (normal(1, T, plan.H, plan.V) for _ in range(2))
    beta = torch.sigmoid(normal(1, T, plan.H))
    g = fresh_gate(plan, random)(raw_gate)
    return Case(l2norm(q), l2norm(k), v, g, beta, do, normal(1, plan.H, plan.K, plan.V))


def fresh_gate(plan: Plan, random: torch.Generator) -> SoftplusGate:
    """A gate with the parameters that training starts from."""
    A = torch.empty(plan.H).uniform_(*A_RANGE, generator=random)
    log_dt = torch.empty(plan.H, plan.K).uniform_(*map(math.log, DT_RANGE), generator=random)
    dt = log_dt.exp()
    return SoftplusGate(A.log(), dt + torch.log(-torch.expm1(-dt)))  # the bias is softplus^-1(dt)


def our_chunks(x: Case) -> Sequence[Tensor]:
    return chunk_kda(x.q, x.k, x.v, x.g, x.beta, output_final_state=True)


def our_recurrence(x: Case) -> Sequence[Tensor]:
    return recurrent_kda(x.q, x.k, x.v, x.g, x.beta, output_final_state=True)


@torch.no_grad()
def our_adjoint(adjoint: Callable[..., KDAGradients], x: Case) -> Sequence[Tensor]:
    return adjoint(*x)[:5]  # the sixth belongs to the initial state, which autograd is not asked for


def transformers_op(name: str, x: Case) -> Sequence[Tensor]:
    """Call what stands inside the wrapper: the wrapper may swap in a kernel from another package."""
    op = getattr(theirs, name)
    op = getattr(op, "__wrapped__", op)
    options = {"initial_state": None, "output_final_state": True, "use_qk_l2norm_in_kernel": False}
    return op(x.q, x.k, x.v, g=x.g, beta=x.beta, **options)


their_chunks = partial(transformers_op, "chunk_kimi_delta_attention")
their_recurrence = partial(transformers_op, "recurrent_kimi_delta_attention")


@torch.no_grad()
def forward(op: Callable[[Case], Sequence[Tensor]], x: Case) -> Sequence[Tensor]:
    return op(x)


def by_autograd(op: Callable[[Case], Sequence[Tensor]], x: Case) -> Sequence[Tensor]:
    leaves = [y.detach().requires_grad_() for y in x[:5]]
    return torch.autograd.grad(op(Case(*leaves, x.do, x.dht)), leaves, (x.do, x.dht))


CANDIDATES = {
    "ours: chunk_kda": Candidate(FORWARD, partial(forward, our_chunks)),
    "transformers: chunk": Candidate(FORWARD, partial(forward, their_chunks)),
    "ours: recurrent_kda": Candidate(FORWARD, partial(forward, our_recurrence)),
    "transformers: recurrent": Candidate(FORWARD, partial(forward, their_recurrence)),
    "ours: chunk_kda, autograd": Candidate(BOTH, partial(by_autograd, our_chunks)),
    "ours: chunk_kda_backward": Candidate(BOTH, partial(our_adjoint, chunk_kda_backward)),
    "transformers: chunk, autograd": Candidate(BOTH, partial(by_autograd, their_chunks)),
}
GROWING = "ours: chunk_kda"
RATIOS = (  # numerator, denominator: above 1, ours is faster or smaller
    ("transformers: chunk", "ours: chunk_kda"),
    ("transformers: recurrent", "ours: recurrent_kda"),
    ("transformers: chunk, autograd", "ours: chunk_kda, autograd"),
    ("transformers: chunk, autograd", "ours: chunk_kda_backward"),
)


def time_after_warm_up(
    calls: Mapping[Any, Callable[[], object]], repeats: int, tick: Callable[[str], None]
) -> dict[Any, Spread]:
    """The first call of each warms up and does not count."""
    for call in calls.values():
        call()
    tick("warm-up")
    return time_in_rounds(calls, repeats, partial(tick, "time"))


def compare(plan: Plan, T: int, tick: Callable[[str], None]) -> dict[str, Spread]:
    """All candidates on one case, in turn."""
    case = make_case(plan, T)
    calls = {name: partial(c.run, case) for name, c in CANDIDATES.items()}
    return time_after_warm_up(calls, plan.repeats, tick)


def measure_growth(plan: Plan, tick: Callable[[str], None]) -> dict[int, Spread]:
    """Our chunked forward over all lengths, in turn."""
    run = CANDIDATES[GROWING].run
    calls = {T: partial(run, make_case(plan, T)) for T in plan.growth}
    return time_after_warm_up(calls, plan.repeats, tick)


def measure_errors(plan: Plan, tick: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Largest relative row error of every tensor that a candidate returns, against fp64."""
    case = make_case(plan, plan.error_T)
    exact = Case(*(x.double() for x in case))
    truth = {FORWARD: forward(our_recurrence, exact), BOTH: our_adjoint(recurrent_kda_backward, exact)}
    errors = {}
    for name, candidate in CANDIDATES.items():
        direction = candidate.direction
        triples = zip(NAMES[direction], candidate.run(case), truth[direction], strict=True)
        errors[name] = {tensor: worst_row_error(x, want) for tensor, x, want in triples}
        tick("error")
    return errors


def measure_memory(plan: Plan, tick: Callable[[str], None]) -> dict[str, int | None]:
    """Peak of each forward candidate, in bytes; a process of its own each. None where it cannot be told."""
    peaks: dict[str, int | None] = {}
    for name, candidate in CANDIDATES.items():
        if candidate.direction != FORWARD:
            continue
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as fresh:
            peaks[name] = fresh.submit(peak_above_inputs, name, plan).result()
        tick("memory")
    return peaks


def peak_above_inputs(name: str, plan: Plan) -> int | None:
    """In the fresh process: highest resident bytes during one call, less those just before it."""
    if not sys.platform.startswith("linux"):
        return None
    use_all_cores()
    run = CANDIDATES[name].run
    run(make_case(plan, WARMUP_T))
    case = make_case(plan, plan.memory_T)
    ctypes.CDLL(None).malloc_trim(0)  # pages that malloc kept would serve the call unseen
    before = reset_peak()
    result = run(case)
    peak = above(before)
    del result
    return peak


def measure(plan: Plan) -> dict[str, Any]:
    """All measurements. The bar redraws between calls only: a thread of its own would take a core's time."""
    made_on = provenance("transformers", "numpy")
    gc.freeze()  # what the imports left stays; walking it between calls would take longer than most of them
    forwards = sum(c.direction == FORWARD for c in CANDIDATES.values())
    steps = (1 + plan.repeats) * (len(plan.lengths) + 1) + len(CANDIDATES) + forwards
    with Progress(auto_refresh=False) as bar:
        task = bar.add_task("", total=steps)

        def tick(what: str) -> None:
            bar.update(task, advance=1, description=what, refresh=True)

        return {
            "provenance": made_on,
            "plan": plan._asdict(),
            "errors": measure_errors(plan, tick),
            "seconds": {T: compare(plan, T, tick) for T in plan.lengths},
            "growth_seconds": measure_growth(plan, tick),
            "peak_bytes": measure_memory(plan, tick),
        }


def time_table(found: dict[str, Any], plan: Plan) -> str:
    lengths = [f"T = {T}, ms" for T in plan.lengths]
    header = ["direction", "candidate", *lengths, f"largest row errors, T = {plan.error_T}"]
    rows = []
    for name, candidate in CANDIDATES.items():
        times = [milliseconds(found["seconds"][T][name]) for T in plan.lengths]
        rows.append([candidate.direction, name, *times, listed(found["errors"][name])])
    return table("Time of one call, median (min .. max), and error against fp64", header, rows)


def ratio_table(found: dict[str, Any], plan: Plan) -> str:
    rows = []
    for numerator, denominator in RATIOS:
        medians = ((found["seconds"][T][x].median for x in (numerator, denominator)) for T in plan.lengths)
        rows.append([numerator, denominator, *(f"{a / b:.3g}" for a, b in medians)])
    header = ["numerator", "denominator", *(f"T = {T}" for T in plan.lengths)]
    return table("Ratio of median times, transformers / ours", header, rows)


def growth_table(found: dict[str, Any], plan: Plan) -> str:
    spreads = found["growth_seconds"]
    rows = [[str(T), milliseconds(spreads[T]), f"{1e6 * spreads[T].median / T:.1f}"] for T in plan.growth]
    return table(f"Growth with T, {GROWING}, forward", ["T", "ms, median (min .. max)", "µs per token"], rows)


def memory_table(found: dict[str, Any], plan: Plan) -> str:
    peaks = found["peak_bytes"]
    rows = [[name, "not told here" if peak is None else f"{peak / MIB:.1f}"] for name, peak in peaks.items()]
    for numerator, denominator in RATIOS:
        a, b = peaks.get(numerator), peaks.get(denominator)
        if a and b:
            rows.append([f"{numerator} / {denominator}", f"{a / b:.3g}"])
    return table(f"Peak memory above the inputs, forward, T = {plan.memory_T}", ["candidate", "MiB"], rows)


def milliseconds(spread: Spread) -> str:
    return f"{1e3 * spread.median:.1f} ({1e3 * spread.min:.1f} .. {1e3 * spread.max:.1f})"


def listed(errors: dict[str, float]) -> str:
    return ", ".join(f"{name} {error:.1e}" for name, error in errors.items())


def report(found: dict[str, Any], plan: Plan) -> str:
    shape = f"fp32, B = 1, H = {plan.H}, K = {plan.K}, V = {plan.V}, {plan.repeats} rounds in turn after a warm-up."
    how = f"{shape} How each number is taken: the docstring of `benchmarks/cpu.py`."
    tables = (make(found, plan) for make in (time_table, ratio_table, growth_table, memory_table))
    return document("KDA on a CPU", found, plan == QUICK, how, tables)


def draw(found: dict[str, Any], plan: Plan) -> Figure:
    """Left: all candidates against T. Right: what one token costs ours as T grows."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, candidate in CANDIDATES.items():
        colour = "tab:blue" if name.startswith("ours") else "tab:orange"
        style = "-" if candidate.direction == FORWARD else "--"
        marker = "s" if "recurrent" in name else "^" if "_backward" in name else "o"
        spreads = {T: found["seconds"][T][name] for T in plan.lengths}
        plot_spreads(left, spreads, {T: 1e3 for T in spreads}, f"{style}{marker}", colour, name)
    left.set(
        xscale="log", yscale="log", ylabel="time of one call (ms)", title="solid: forward; dashed: with backward"
    )
    left.legend(fontsize="small")
    per_token = {T: 1e6 / T for T in plan.growth}
    plot_spreads(right, found["growth_seconds"], per_token, "-o", "tab:blue", GROWING)
    right.set(xscale="log", ylabel="time per token (µs)", ylim=(0, None), title=f"{GROWING}, forward")
    for axes, lengths in ((left, plan.lengths), (right, plan.growth)):
        axes.set_xlabel("sequence length T (tokens)")
        axes.set_xticks(lengths, map(str, lengths))
        axes.minorticks_off()
    return figure


def plot_spreads(
    axes: Any, spreads: dict[int, Spread], unit: dict[int, float], style: str, colour: str, label: str
) -> None:
    """Medians with bars from min to max; `unit` turns the seconds at T into what the axis shows."""
    y = [unit[T] * s.median for T, s in spreads.items()]
    below = [unit[T] * (s.median - s.min) for T, s in spreads.items()]
    above = [unit[T] * (s.max - s.median) for T, s in spreads.items()]
    axes.errorbar(list(spreads), y, yerr=[below, above], fmt=style, color=colour, label=label, capsize=3)


def as_json(found: dict[str, Any]) -> str:
    """Spreads by field name, ratios beside them."""
    times = {T: {name: s._asdict() for name, s in row.items()} for T, row in found["seconds"].items()}
    growth = {T: s._asdict() for T, s in found["growth_seconds"].items()}
    ratios = [
        {"numerator": a, "denominator": b, "T": T, "ratio": row[a].median / row[b].median}
        for T, row in found["seconds"].items()
        for a, b in RATIOS
    ]
    return json.dumps({**found, "seconds": times, "growth_seconds": growth, "ratios": ratios}, indent=2) + "\n"


def main(
    quick: Annotated[bool, typer.Option(help="Tiny sizes, few rounds: only shows that it runs.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to; default benchmarks/results, with --quick a temporary one."),
    ] = None,
) -> None:
    """Measure KDA on this CPU, ours and transformers', and write cpu.json, cpu.md and cpu.png."""
    plan = QUICK if quick else FULL
    out = folder_for(out, quick)
    use_all_cores()
    found = measure(plan)
    text = report(found, plan)
    (out / "cpu.json").write_text(as_json(found))
    (out / "cpu.md").write_text(text, encoding="utf-8")
    draw(found, plan).savefig(out / "cpu.png", dpi=150)
    Console().print(Markdown(text), f"Written to {out}", sep="\n")


if __name__ == "__main__":
    typer.run(main)
