"""KDA forward on a GPU: correctness first, then times, beside the peers that are installed, from one run.

    python benchmarks/gpu.py [--fla / --no-fla] [--out FOLDER]     writes gpu.json, gpu.md and gpu.png

ours        `kimi_linear.triton_kernels.chunk_kda`, softplus and bounded gate
fla         flash-linear-attention's `chunk_kda`, both gate modes (autotunes: minutes for each head count)
FlashKDA    `flash_kda.fwd`, bounded gate only
attn_gym    attention-gym's `chunk_kda`, bounded gate only, with its own kernels for the gate and the norms before

bf16, K = V = 128; l2norm, gate and the sigmoid of beta inside the call; final state written. Before anything is
timed, every candidate runs into memory full of NaN and is compared with the fp64 recurrence.

time        median of CUDA-event times of many calls after a warm-up (`triton.testing.do_bench`), with the
            20 % and 80 % quantiles
fading      where a softplus gate leaves the range in which our tiles take one product (`chunk_products`)
floor       q, k, v, g, beta read once and o written once, at the bandwidth of a copy in the same run
error       ||x - truth|| / ||truth|| of o and of the final state; truth is the fp64 recurrence, or the fp64
            chunk form of the reference where T is too long for a loop
host        time a call takes to return, many calls enqueued without waiting
first call  in a fresh process with an empty kernel cache, import included

Not here: decoding (`benchmarks/decode.py`), gradients.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor

from kimi_linear.reference import BoundedGate, FrontEnd, SoftplusGate
from kimi_linear.reference.chunked import chunk_kda as reference_chunk_kda
from kimi_linear.reference.naive import recurrent_kda
from kimi_linear.triton_kernels import chunk_kda

DIM = 128  # K = V, as in every released checkpoint
LOWER_BOUND = -5.0
COPY_BYTES = 2**31  # read and written: far beyond the L2
HOST_CALLS = 200  # enqueued without waiting
LOOP_LIMIT = 1024  # tokens that the fp64 recurrence may take; beyond, the fp64 chunk form is the truth
POISON_BYTES = 2**31  # of NaN left in the allocator's free memory before a checked call

Call = Callable[[], tuple[Tensor, Tensor]]
console = Console(width=150)


@dataclass(frozen=True)
class Shape:
    """Sizes of one call; `segments` > 1 packs that many equal sequences into one row."""

    B: int
    T: int
    H: int
    segments: int = 1

    @property
    def name(self) -> str:
        packed = f" packed x{self.segments}" if self.segments > 1 else ""
        return f"B={self.B} T={self.T} H={self.H}{packed}"


TIMED = (
    Shape(1, 8192, 32),
    Shape(1, 8192, 96),
    Shape(8, 4096, 32),
    Shape(1, 65536, 16),
    Shape(1, 1024, 32),
    Shape(1, 8192, 32, segments=8),
)
FLA_TIMED = (Shape(1, 8192, 32), Shape(8, 4096, 32), Shape(1, 8192, 96))
LENGTHS = (4096, 16384, 65536, 262144)  # at H = 32: time per token must stay flat
ERROR_LENGTHS = (1024, 16384, 262144)  # at H = 2: errors must not grow with T
ACCURACY = Shape(1, 512, 32)  # heads as timed: fla tunes anew for every head count
FADING = ("random", "1 % of channels fade", "-60 a token")  # the softplus gate: rows that fade are done again
KEYS = ("random", "slow gate", "-60 a token", "every key 8 times", "cosine 0.9", "cosine 0.97", "cosine 0.99")


@dataclass(frozen=True)
class Inputs:
    """Raw projections in bf16 and both gates' parameters."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor
    dt_bias: Tensor
    cu_seqlens: Tensor | None

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta

    def front_end(self, gate: str, dtype: torch.dtype = torch.float32) -> FrontEnd:
        A_log, dt_bias = self.A_log.to(dtype), self.dt_bias.to(dtype)
        if gate == "softplus":
            return FrontEnd(gate=SoftplusGate(A_log, dt_bias))
        return FrontEnd(gate=BoundedGate(A_log, dt_bias, LOWER_BOUND))


def draw(shape: Shape, keys: str = "random", gate: str = "bounded", seed: int = 0) -> Inputs:
    """Normal q, k, v and raw gates; `keys` names a harder draw: keys that repeat, gates that are slow or strong."""
    rng = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device="cuda")

    B, T, H = shape.B, shape.T, shape.H
    q, k, v, g = (normal(B, T, H, DIM) for _ in range(4))
    beta = normal(B, T, H)
    A_log, dt_bias = torch.zeros(H, device="cuda"), torch.zeros(H, DIM, device="cuda")
    if keys.startswith("cosine") or keys == "every key 8 times" or keys == "slow gate":
        g = g - (7.0 if gate == "bounded" else 6.0)  # decays of about 0.995 and 0.9975 a token
    if keys == "1 % of channels fade":  # by 116 octaves in 16 tokens; one of 64 channels does in 27 % of tiles
        A_log, dt_bias = torch.rand(H, generator=rng, device="cuda"), normal(H, DIM)
    if keys == "-60 a token":
        g = g.abs() + (8.0 if gate == "bounded" else 60.0)
    if keys.startswith("cosine") or keys == "every key 8 times":
        beta = torch.full_like(beta, 2.95)  # sigmoid: 0.95
    if keys == "every key 8 times":
        k = k[:, torch.arange(T, device="cuda") // 8]
    if keys.startswith("cosine"):
        cosine = float(keys.split()[1])
        common = torch.nn.functional.normalize(normal(B, 1, H, DIM), dim=-1)
        k = cosine * common + (1 - cosine**2) ** 0.5 * torch.nn.functional.normalize(k, dim=-1)
    cu_seqlens = None
    if shape.segments > 1:
        cu_seqlens = torch.arange(shape.segments + 1, device="cuda") * (T // shape.segments)
    half = (x.to(torch.bfloat16) for x in (q, k, v, g, beta))
    return Inputs(*half, A_log, dt_bias, cu_seqlens)


def ours(x: Inputs, gate: str) -> Call:
    """Our kernel on these inputs."""
    front_end = x.front_end(gate)
    return lambda: chunk_kda(*x.args, front_end=front_end, output_final_state=True, cu_seqlens=x.cu_seqlens)


def fla(x: Inputs, gate: str) -> Call:
    """fla's kernel: the bounded gate through its tensor-core path."""
    op = importlib.import_module("fla.ops.kda").chunk_kda
    options: dict[str, Any] = {"A_log": x.A_log, "dt_bias": x.dt_bias.flatten(), "cu_seqlens": x.cu_seqlens}
    if gate == "bounded":
        options |= {"safe_gate": True, "lower_bound": LOWER_BOUND}
    fused = {f"use_{name}_in_kernel": True for name in ("qk_l2norm", "gate", "beta_sigmoid")}
    return lambda: op(*x.args, output_final_state=True, **fused, **options)


def flash_kda(x: Inputs, gate: str) -> Call:
    """FlashKDA: state [V, K], transposed back here only where it is compared."""
    assert gate == "bounded"
    op = importlib.import_module("flash_kda").fwd
    N = x.q.shape[0] if x.cu_seqlens is None else len(x.cu_seqlens) - 1

    def call() -> tuple[Tensor, Tensor]:
        o = torch.empty_like(x.v)
        state = torch.empty(N, x.v.shape[2], DIM, DIM, device="cuda")
        op(*x.args, DIM**-0.5, o, x.A_log, x.dt_bias, LOWER_BOUND, None, state, x.cu_seqlens)
        return o, state.transpose(-1, -2)

    return call


def attention_gym(x: Inputs, gate: str) -> Call:
    """attention-gym: takes keys that are normalised and gates that are log decays; state [V, K]."""
    assert gate == "bounded"
    kda = importlib.import_module("attn_gym.linear.kda")
    cu_seqlens = None if x.cu_seqlens is None else x.cu_seqlens.int()

    def call() -> tuple[Tensor, Tensor]:
        g = kda.bound_gate(x.g, x.A_log, x.dt_bias, lower_bound=LOWER_BOUND)
        inputs = kda.l2norm(x.q), kda.l2norm(x.k), x.v, g, x.beta.sigmoid()
        o, state = kda.chunk_kda(*inputs, cu_seqlens=cu_seqlens, output_final_state=True)
        return o, state.transpose(-1, -2)

    return call


CANDIDATES = {
    ("ours", "softplus"): ours,
    ("ours", "bounded"): ours,
    ("fla", "bounded"): fla,
    ("fla", "softplus"): fla,
    ("FlashKDA", "bounded"): flash_kda,
    ("attn_gym", "bounded"): attention_gym,
}
MODULES = {"ours": "kimi_linear", "fla": "fla", "FlashKDA": "flash_kda", "attn_gym": "attn_gym"}
DISTRIBUTIONS = {
    "ours": "kimi-linear-reference",
    "fla": "flash-linear-attention",
    "FlashKDA": "tokenspeed-flashkda",
    "attn_gym": "attn-gym",
}


def installed(with_fla: bool) -> list[tuple[str, str]]:
    """Candidates that are installed and run: a peer's binary may be made for another torch, or another GPU."""
    found = [name for name, module in MODULES.items() if importlib.util.find_spec(module) is not None]
    for name in ("FlashKDA", "attn_gym"):
        if name in found and (reason := why_not(CANDIDATES[name, "bounded"])):
            console.print(f"{name} is installed and does not run here: {reason}")
            found.remove(name)
    return [c for c in CANDIDATES if c[0] in found and (with_fla or c[0] != "fla")]


def why_not(candidate: Callable[[Inputs, str], Call]) -> str:
    """The first line of what a peer raises on a small call; empty if it runs."""
    try:
        candidate(draw(Shape(1, 64, 1)), "bounded")()
    except Exception as error:  # whatever a foreign library raises: it is left out, and said so
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def truth(x: Inputs, gate: str) -> tuple[Tensor, Tensor]:
    """The fp64 reference on the values that the kernels were given."""
    op = recurrent_kda if x.q.shape[1] <= LOOP_LIMIT else reference_chunk_kda
    exact = (y.double() for y in x.args)
    front_end = x.front_end(gate, torch.float64)
    return op(*exact, front_end=front_end, output_final_state=True, cu_seqlens=x.cu_seqlens)


def errors(call: Call, exact: tuple[Tensor, Tensor]) -> list[float]:
    """Relative errors of o and of the final state, of a call whose outputs lie in memory full of NaN."""
    poison = [torch.full((POISON_BYTES // 8,), torch.nan, device="cuda") for _ in range(2)]
    del poison
    return [((x.double() - y).norm() / y.norm()).item() for x, y in zip(call(), exact, strict=True)]


def accuracy_rows(candidates: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Errors on every draw, for every candidate."""
    rows = []
    for keys in KEYS:
        for name, gate in candidates:
            x = draw(ACCURACY, keys, gate)
            error = errors(CANDIDATES[name, gate](x, gate), truth(x, gate))
            rows.append({"keys": keys, "candidate": name, "gate": gate, "o": error[0], "final_state": error[1]})
    return rows


def length_rows() -> list[dict[str, Any]]:
    """Our errors over T, on the last 512 tokens and the final state; and our time per token."""
    rows = []
    for T in ERROR_LENGTHS:
        for gate in ("softplus", "bounded"):
            x = draw(Shape(1, T, 2), "slow gate", gate)
            (o, state), (exact, exact_state) = ours(x, gate)(), truth(x, gate)
            last = [(o[:, -512:].double(), exact[:, -512:]), (state.double(), exact_state)]
            error = [((a - b).norm() / b.norm()).item() for a, b in last]
            rows.append({"T": T, "gate": gate, "o": error[0], "final_state": error[1]})
    return rows


def time_call(call: Call) -> dict[str, float]:
    """Median and quantiles, ms."""
    median, low, high = triton.testing.do_bench(call, warmup=50, rep=300, quantiles=[0.5, 0.2, 0.8])
    return {"ms": median, "low": low, "high": high}


def timing_row(name: str, gate: str, shape: Shape, bandwidth: float, keys: str = "random") -> dict[str, Any]:
    """Time of one candidate on one shape, and its share of the bytes floor."""
    x = draw(shape, keys, gate=gate)
    times = time_call(CANDIDATES[name, gate](x, gate))
    floor = (sum(y.numel() for y in x.args) + x.v.numel()) * 2 / bandwidth * 1e3
    row = {"candidate": name, "gate": gate, "shape": shape.name, "keys": keys, **times, "floor_ms": floor}
    what = f"{shape.name:28s} {name:9s} {gate:9s}" + ("" if keys == "random" else f" {keys}")
    console.print(f"{what} {times['ms']:8.3f} ms, floor {floor:.3f}", highlight=False)
    return row


def fading_rows(candidates: list[tuple[str, str]], bandwidth: float) -> list[dict[str, Any]]:
    """Time of those with a softplus gate where channels forget within a tile."""
    softplus = [c for c in candidates if c[1] == "softplus"]
    return [timing_row(*c, TIMED[0], bandwidth, keys) for keys in FADING for c in softplus]


def copy_bandwidth() -> float:
    """Bytes a second that a device-to-device copy reads and writes."""
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    ms = triton.testing.do_bench(lambda: target.copy_(source), quantiles=[0.5])
    return 2 * COPY_BYTES / (ms * 1e-3)


def host_microseconds() -> float:
    """What a call costs the host, on a shape that costs the GPU little."""
    call = ours(draw(Shape(1, 64, 2)), "softplus")
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / HOST_CALLS * 1e6


FIRST_CALL = """
import time; start = time.perf_counter()
import torch
from kimi_linear.reference import FrontEnd, SoftplusGate
from kimi_linear.triton_kernels import chunk_kda
x = [torch.randn(1, 8192, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
front_end = FrontEnd(gate=SoftplusGate(torch.zeros(32, device="cuda"), torch.zeros(32, 128, device="cuda")))
chunk_kda(*x, x[0][..., 0].clone(), front_end=front_end, output_final_state=True)
torch.cuda.synchronize(); print(time.perf_counter() - start)
"""


def first_call_seconds() -> float:
    """A first call in a fresh process that finds no compiled kernel."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache}
        done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True)
    return float(done.stdout) if done.returncode == 0 else float("nan")


def versions() -> dict[str, str]:
    """What ran."""
    found = {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = ["# KDA forward on a GPU", ""]
    lines += [f"- {name}: {value}" for name, value in report["versions"].items()]
    lines += [f"- copy: {report['copy_TBps']:.2f} TB/s", f"- host: {report['host_us']:.0f} us a call"]
    lines += [f"- first call in a fresh process: {report['first_call_s']:.1f} s", ""]
    lines += ["bf16, K = V = 128, front end fused, final state written; how it is measured: `benchmarks/gpu.py`.", ""]
    lines += [
        "## Time",
        "",
        "| shape | candidate | gate | ms (20 % .. 80 %) | share of the floor | ours is faster by |",
    ]
    lines += ["|---|---|---|---|---|---|"]
    best = {(r["shape"], r["gate"]): r["ms"] for r in report["times"] if r["candidate"] == "ours"}
    for r in report["times"]:
        ratio = "" if r["candidate"] == "ours" else f"{r['ms'] / best[r['shape'], r['gate']]:.2f} x"
        spread = f"{r['ms']:.3f} ({r['low']:.3f} .. {r['high']:.3f})"
        share = f"{r['floor_ms'] / r['ms']:.0%}"
        lines.append(f"| {r['shape']} | {r['candidate']} | {r['gate']} | {spread} | {share} | {ratio} |")
    lines += [
        "",
        f"## Time where a softplus gate fades, {TIMED[0].name}",
        "",
        "| keys and gate | candidate | ms |",
        "|---|---|---|",
    ]
    lines += [f"| {r['keys']} | {r['candidate']} | {r['ms']:.3f} |" for r in report["fading"]]
    lines += [
        "",
        "## Error against fp64 (o / final state), T = 512, H = 32",
        "",
        "| keys and gate | candidate | o | state |",
    ]
    lines += ["|---|---|---|---|"]
    for r in report["accuracy"]:
        lines.append(f"| {r['keys']} | {r['candidate']}, {r['gate']} | {r['o']:.1e} | {r['final_state']:.1e} |")
    lines += [
        "",
        "## Error over T, ours, slow gate, last 512 tokens, H = 2",
        "",
        "| T | gate | o | state |",
        "|---|---|---|---|",
    ]
    lines += [f"| {r['T']} | {r['gate']} | {r['o']:.1e} | {r['final_state']:.1e} |" for r in report["lengths"]]
    return "\n".join(lines) + "\n"


def picture(report: dict[str, Any]) -> Figure:
    """Left: ms of every candidate on every shape. Right: error by draw."""
    figure = Figure(figsize=(15, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    shapes = list(dict.fromkeys(r["shape"] for r in report["times"]))
    for name, gate in dict.fromkeys((r["candidate"], r["gate"]) for r in report["times"]):
        rows = [r for r in report["times"] if (r["candidate"], r["gate"]) == (name, gate)]
        left.plot([shapes.index(r["shape"]) for r in rows], [r["ms"] for r in rows], "o--", label=f"{name}, {gate}")
    left.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right")
    left.set(yscale="log", ylabel="ms a call (median)", title="KDA forward, bf16, K = V = 128: lower is faster")
    for name, gate in dict.fromkeys((r["candidate"], r["gate"]) for r in report["accuracy"]):
        rows = [r for r in report["accuracy"] if (r["candidate"], r["gate"]) == (name, gate)]
        right.plot([r["keys"] for r in rows], [r["o"] for r in rows], "o--", label=f"{name}, {gate}")
    right.tick_params(axis="x", rotation=30)
    right.set(
        yscale="log", ylabel="||o - truth|| / ||truth||", title="error against fp64: keys that resemble each other"
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def save(report: dict[str, Any], out: Path) -> None:
    """Write what there is: a run that is cut short leaves what it had."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "gpu.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "gpu.md").write_text(markdown(report))
    picture(report).savefig(out / "gpu.png", dpi=110)


def main(
    with_fla: Annotated[bool, typer.Option("--fla/--no-fla", help="fla autotunes for minutes.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
) -> None:
    """Check, time and write the report."""
    torch.manual_seed(0)
    candidates = installed(with_fla)
    mine = [c for c in candidates if c[0] != "fla"]
    bandwidth = copy_bandwidth()
    report: dict[str, Any] = {"versions": versions(), "copy_TBps": bandwidth / 1e12, "times": []}
    report["accuracy"] = accuracy_rows(mine)
    report["lengths"] = length_rows()
    report["host_us"], report["first_call_s"] = host_microseconds(), first_call_seconds()
    report["times"] += [timing_row(*c, shape, bandwidth) for shape in TIMED for c in mine]
    lengths = [Shape(1, T, 32) for T in LENGTHS]
    report["times"] += [timing_row(*c, shape, bandwidth) for shape in lengths for c in mine if c[0] == "ours"]
    report["fading"] = fading_rows(mine, bandwidth)
    save(report, out)
    theirs = [c for c in candidates if c[0] == "fla"]
    for i, shape in enumerate(FLA_TIMED if theirs else ()):
        report["times"] += [timing_row(*candidate, shape, bandwidth) for candidate in theirs]
        if i == 0:  # tuned by now
            report["accuracy"] += accuracy_rows(theirs)
            report["fading"] += fading_rows(theirs, bandwidth)
        save(report, out)
    console.print(markdown(report), highlight=False, markup=False)


if __name__ == "__main__":
    typer.run(main)
