"""Kimi Linear on a CPU: forward time, loading time and peak memory of our model beside transformers', from one run.

    python benchmarks/model_cpu.py [--quick] [--gigabytes 2] [--out FOLDER]     writes model_cpu.{json,md,png}

ours            `load_model`, all tiers in plain PyTorch; `stream_model`, which reads a layer when its turn comes
transformers    `from_pretrained` and the code it falls back to where no kernel is installed, its defaults otherwise

Both read the same checkpoints: random weights in the released layout, from `make_checkpoint`.

forward   One prompt through a small model with the released head sizes (K = V = 128; MLA 128 + 64, latents of 512),
          fp32, all cores, no cache kept from before. Wall clock: median (min .. max) of several rounds after a
          warm-up; a round calls every candidate once, so that a slow spell of the machine falls on all of them.
          Layer by layer includes reading the whole checkpoint, from the page cache.
error     Of the logits, against our model in fp64: for each token RMS(x - truth) / RMS(truth), and of these the
          largest.
loading   A larger checkpoint in bf16, read into bf16, in a fresh process each; the files are in the page cache. Wall
          clock from the call until every page of the weights was read, imports not counted. The peak is the highest
          resident memory above what the process held before, mapped pages of the files included; Linux only.
          "layer by layer" is a whole forward pass of 8 tokens instead; "load_model + forward" is the same in memory.

Not here: GPUs, kernels from other packages, generation.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import torch
import transformers
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import Progress
from torch import Tensor

from kimi_linear.reference.model.checkpoint import count_parameters, load_model
from kimi_linear.reference.model.config import KimiLinearConfig
from kimi_linear.reference.model.stream import stream_model
from kimi_linear.reference.model.writer import make_checkpoint, tiny_config
from measuring import (
    Spread,
    above,
    document,
    folder_for,
    provenance,
    reset_peak,
    spread,
    table,
    time_in_rounds,
    use_all_cores,
    worst_row_error,
)

SEED = 0
MIB, GB = 2**20, 10**9
PAGE = 4096  # bytes
PROMPT_OF_LOADING = 8  # tokens of the forward pass that is compared with a streamed one
OURS, STREAMED, THEIRS = "ours: load_model", "ours: layer by layer", "transformers: from_pretrained"
OURS_FORWARD = "ours: load_model + forward"
HEADS = {"kda_head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}


class Plan(NamedTuple):
    """Sizes and repeats of a run."""

    T: int
    hidden: int
    heads: int
    layers: int
    gigabytes: float  # of the checkpoint that is loaded
    experts: int  # a layer of it
    repeats: int  # odd, so that the median is a measurement


FULL = Plan(T=1024, hidden=512, heads=4, layers=4, gigabytes=2.0, experts=64, repeats=5)
QUICK = Plan(
    T=64, hidden=128, heads=1, layers=2, gigabytes=0.02, experts=8, repeats=1
)  # proves that it runs, no more


class Loading(NamedTuple):
    """One process's seconds, and its peak above what it held before; None where that cannot be told."""

    seconds: float
    peak: int | None


def forward_config(plan: Plan) -> KimiLinearConfig:
    """A small model with the released head sizes."""
    heads = {"kda_num_heads": plan.heads, "num_attention_heads": plan.heads}
    widths = {
        "hidden_size": plan.hidden,
        "intermediate_size": 4 * plan.hidden,
        "moe_intermediate_size": plan.hidden // 2,
    }
    return tiny_config(plan.layers, **HEADS, **heads, **widths, num_experts=8, num_experts_per_token=2)


def loading_config(plan: Plan) -> KimiLinearConfig:
    """As many layers with experts as the gigabytes ask for; sizes of the released kind, halved."""
    wide = plan._replace(hidden=1024, heads=8)

    def of(layers: int) -> KimiLinearConfig:
        return replace(forward_config(wide._replace(layers=layers)), num_experts=plan.experts)

    two, three = (2 * count_parameters(of(layers)).total for layers in (2, 3))
    return of(max(2, 2 + round((plan.gigabytes * GB - two) / (three - two))))


def their_model(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model, without its bars and without its warning about a key of the released config."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    return model(ids).logits


def prompt(T: int) -> Tensor:
    return torch.randint(0, 256, (1, T), generator=torch.Generator().manual_seed(SEED))


def measure_forward(
    plan: Plan, folder: Path, tick: Callable[[str], None]
) -> tuple[dict[str, Spread], dict[str, float]]:
    """Times of all candidates in turn, and their largest errors."""
    ids = prompt(plan.T)
    models = {OURS: load_model(folder), STREAMED: stream_model(folder), THEIRS: their_model(folder, torch.float32)}
    calls = {name: partial(logits, model, ids) for name, model in models.items()}
    truth = logits(load_model(folder, dtype=torch.float64), ids)
    errors = {name: worst_row_error(call(), truth) for name, call in calls.items()}
    tick("errors")
    return time_in_rounds(calls, plan.repeats, partial(tick, "forward")), errors


def load_ours(folder: Path) -> object:
    return touched(load_model(folder, dtype=torch.bfloat16))


def load_theirs(folder: Path) -> object:
    return touched(their_model(folder, torch.bfloat16))


def touched(model: torch.nn.Module) -> torch.nn.Module:
    """Read from every page of the weights: what is only mapped is not loaded yet."""
    for x in model.state_dict().values():
        x.flatten()[:: PAGE // x.element_size()].sum()
    return model


def forward_streamed(folder: Path) -> object:
    return logits(stream_model(folder, dtype=torch.bfloat16), prompt(PROMPT_OF_LOADING))


def forward_loaded(folder: Path) -> object:
    return logits(load_model(folder, dtype=torch.bfloat16), prompt(PROMPT_OF_LOADING))


LOADINGS: Mapping[str, Callable[[Path], object]] = {
    OURS: load_ours,
    THEIRS: load_theirs,
    OURS_FORWARD: forward_loaded,
    STREAMED: forward_streamed,
}


def measure_loading(plan: Plan, folder: Path, warm_up: Path, tick: Callable[[str], None]) -> dict[str, list[Loading]]:
    """Every way of loading in turn, a fresh process each."""
    found: dict[str, list[Loading]] = {name: [] for name in LOADINGS}
    for _ in range(plan.repeats):
        for name in LOADINGS:
            with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as fresh:
                found[name].append(fresh.submit(in_fresh_process, name, folder, warm_up).result())
            tick("loading")
    return found


def in_fresh_process(name: str, folder: Path, warm_up: Path) -> Loading:
    """Load a small checkpoint for the imports, then the one that counts."""
    use_all_cores()
    call = LOADINGS[name]
    call(warm_up)
    gc.collect()
    before = reset_peak()
    start = time.perf_counter()
    result = call(folder)
    elapsed = time.perf_counter() - start
    peak = above(before)
    del result
    return Loading(elapsed, peak)


def measure(plan: Plan, scratch: Path) -> dict[str, Any]:
    """All measurements; checkpoints are written below `scratch`."""
    made_on = provenance("transformers")
    with Progress(auto_refresh=False) as bar:
        task = bar.add_task("writing checkpoints", total=1 + plan.repeats * (1 + len(LOADINGS)))

        def tick(what: str) -> None:
            bar.update(task, advance=1, description=what, refresh=True)

        small = make_checkpoint(scratch / "small", forward_config(plan), SEED)
        large = make_checkpoint(scratch / "large", loading_config(plan), SEED, shards=5)
        times, errors = measure_forward(plan, small, tick)
        return {
            "provenance": made_on,
            "plan": plan._asdict(),
            "forward_parameters": count_parameters(forward_config(plan)).total,
            "forward_seconds": times,
            "errors": errors,
            "checkpoint_bytes": sum(file.stat().st_size for file in large.glob("*.safetensors")),
            "loading": measure_loading(plan, large, small, tick),
        }


def forward_table(found: dict[str, Any], plan: Plan) -> str:
    times = found["forward_seconds"]
    header = ["candidate", "ms, median (min .. max)", "transformers / this", "largest error of a token"]
    rows = [
        [name, milliseconds(s), f"{times[THEIRS].median / s.median:.3g}", f"{found['errors'][name]:.1e}"]
        for name, s in times.items()
    ]
    title = f"Forward, T = {plan.T}, fp32, {found['forward_parameters']:,} parameters, {plan.layers} layers"
    return table(title, header, rows)


def loading_table(found: dict[str, Any]) -> str:
    loading, size = found["loading"], found["checkpoint_bytes"]
    header = ["candidate", "s, median (min .. max)", "peak, MiB", "peak / checkpoint"]
    rows = []
    for name, runs in loading.items():
        s, peak = spread(run.seconds for run in runs), peak_of(runs)
        memory = ["not told here", ""] if peak is None else [f"{peak / MIB:.0f}", f"{peak / size:.3g}"]
        rows.append([name, f"{s.median:.2f} ({s.min:.2f} .. {s.max:.2f})", *memory])
    return table(f"Loading {size / GB:.2f} GB of bf16, a fresh process each", header, rows)


def ratio_table(found: dict[str, Any]) -> str:
    rows = [[a, b, f"{ratio:.3g}", what] for a, b, what, ratio in ratios(found)]
    return table("Ratios", ["numerator", "denominator", "ratio", "of"], rows)


def ratios(found: dict[str, Any]) -> list[tuple[str, str, str, float]]:
    """Above 1, the denominator is faster or smaller."""
    times, loading = found["forward_seconds"], found["loading"]
    listed = [(THEIRS, OURS, "forward time", times[THEIRS].median / times[OURS].median)]
    for a, b in ((THEIRS, OURS), (OURS_FORWARD, STREAMED)):
        spans = [median(run.seconds for run in loading[name]) for name in (a, b)]
        listed.append((a, b, "time", spans[0] / spans[1]))
        first, second = peak_of(loading[a]), peak_of(loading[b])
        if first and second:
            listed.append((a, b, "peak memory", first / second))
    return listed


def peak_of(runs: list[Loading]) -> int | None:
    peaks = [run.peak for run in runs if run.peak is not None]
    return max(peaks) if peaks else None


def milliseconds(s: Spread) -> str:
    return f"{1e3 * s.median:.0f} ({1e3 * s.min:.0f} .. {1e3 * s.max:.0f})"


def report(found: dict[str, Any], plan: Plan, quick: bool) -> str:
    how = f"{plan.repeats} rounds in turn. How each number is taken: the docstring of `benchmarks/model_cpu.py`."
    tables = [forward_table(found, plan), loading_table(found), ratio_table(found)]
    return document("Kimi Linear on a CPU", found, quick, how, tables)


def draw(found: dict[str, Any]) -> Figure:
    """Left: forward time. Middle: loading time. Right: peak memory, the checkpoint's size as a line."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    forward, loading, memory = figure.subplots(1, 3)
    bars(forward, found["forward_seconds"], "forward (s)")
    bars(loading, {name: spread(run.seconds for run in runs) for name, runs in found["loading"].items()}, "time (s)")
    peaks = {name: peak_of(runs) for name, runs in found["loading"].items()}
    known = {name: Spread(*[peak / GB] * 3) for name, peak in peaks.items() if peak is not None}
    bars(memory, known, "peak above the process (GB)")
    memory.axvline(found["checkpoint_bytes"] / GB, color="tab:gray", linestyle="--")
    return figure


def bars(axes: Any, spreads: Mapping[str, Spread], label: str) -> None:
    """A horizontal bar for each median, with a line from min to max."""
    names = list(spreads)
    medians = [s.median for s in spreads.values()]
    reach = [[s.median - s.min for s in spreads.values()], [s.max - s.median for s in spreads.values()]]
    colours = ["tab:blue" if name.startswith("ours") else "tab:orange" for name in names]
    axes.barh(names, medians, xerr=reach, color=colours, capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def as_json(found: dict[str, Any]) -> str:
    """Spreads and loadings by field name, ratios beside them."""
    times = {name: s._asdict() for name, s in found["forward_seconds"].items()}
    loading = {name: [run._asdict() for run in runs] for name, runs in found["loading"].items()}
    listed = [dict(zip(("numerator", "denominator", "of", "ratio"), entry, strict=True)) for entry in ratios(found)]
    return json.dumps({**found, "forward_seconds": times, "loading": loading, "ratios": listed}, indent=2) + "\n"


def main(
    quick: Annotated[bool, typer.Option(help="Tiny sizes, one round: only shows that it runs.")] = False,
    gigabytes: Annotated[float | None, typer.Option(help="Of the checkpoint that is loaded; default 2.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to; default benchmarks/results, with --quick a temporary one."),
    ] = None,
) -> None:
    """Measure the model on this CPU, ours and transformers', and write model_cpu.json, .md and .png."""
    plan = QUICK if quick else FULL
    if gigabytes is not None:
        plan = plan._replace(gigabytes=gigabytes)
    out = folder_for(out, quick)
    use_all_cores()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(plan, Path(scratch))
    text = report(found, plan, quick)
    (out / "model_cpu.json").write_text(as_json(found))
    (out / "model_cpu.md").write_text(text, encoding="utf-8")
    draw(found).savefig(out / "model_cpu.png", dpi=150)
    Console().print(Markdown(text), f"Written to {out}", sep="\n")


if __name__ == "__main__":
    typer.run(main)
