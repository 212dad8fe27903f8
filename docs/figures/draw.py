"""Draws the pictures of the documents: `python docs/figures/draw.py [FOLDER]`.

stages.svg      the chunk form: what is parallel, what is serial, what is kept between
halving.svg     which level of the halving makes which part of A
time.svg        the performance model beside the measured times
folders.svg     the folders and who imports whom
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "benchmarks"))
import time_model

Point = tuple[float, float]
INK, SERIAL, PARALLEL, OUTSIDE, PALE = "#1d2433", "#c2571a", "#2f5d9b", "#5b6577", "#f3f5f9"
SETTINGS = {"svg.hashsalt": "kimi", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}


def box(ax: Axes, x: float, y: float, w: float, h: float, title: str, text: str, color: str) -> None:
    """A box with a title and lines below it; (x, y) is its lower left corner."""
    shape = FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0.02,rounding_size=0.08", fc=PALE, ec=color, lw=1.4)
    ax.add_patch(shape)
    ax.text(x + w / 2, y + h - 0.12, title, ha="center", va="top", color=color, weight="bold", fontsize=10)
    ax.text(x + w / 2, y + h - 0.42, text, ha="center", va="top", color=INK, fontsize=8.5, linespacing=1.35)


def arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK, bend: float = 0.0
) -> None:
    style = {"arrowstyle": "-|>", "color": color, "lw": 1.2, "connectionstyle": f"arc3,rad={bend}"}
    ax.annotate("", xy=end, xytext=start, arrowprops=style)


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Axes without axes, one unit an inch."""
    figure, ax = plt.subplots(figsize=(width, height))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, ax


def stages() -> Figure:
    """The six stages from left to right."""
    figure, ax = canvas(9.4, 3.5)
    box(ax, 0.1, 1.2, 1.35, 1.5, "front end", "l2norm\ngate\nsigmoid\n[T, H, K]", OUTSIDE)
    box(ax, 1.75, 1.2, 1.35, 1.5, "stage 1", "decays inside\na chunk\n[C, K] a level", PARALLEL)
    box(ax, 3.4, 2.0, 1.45, 1.2, "stage 2", "A, Aqk\n[C, C] each", PARALLEL)
    box(ax, 3.4, 0.5, 1.45, 1.2, "stage 3", "T = (I + A)⁻¹\n[C, C]", PARALLEL)
    box(ax, 5.15, 1.2, 1.3, 1.5, "stage 4", "w = T(βk eᴳ)\nu = T(βv)\n[C, K], [C, V]", PARALLEL)
    box(ax, 6.75, 1.2, 1.35, 1.5, "stage 5", "v_new = u - w S\nS ← e^G S\n+ kᵀ v_new\nS [K, V]", SERIAL)
    box(ax, 8.35, 1.2, 0.95, 1.5, "stage 6", "o =\n(q eᴳ) S\n+ Aqk v_new", PARALLEL)
    for start, end in [((1.47, 1.95), (1.73, 1.95)), ((3.12, 2.2), (3.38, 2.5)), ((4.1, 1.98), (4.1, 1.72))]:
        arrow(ax, start, end)
    for start, end in [((4.87, 1.2), (5.13, 1.6)), ((6.47, 1.95), (6.73, 1.95)), ((8.12, 1.95), (8.33, 1.95))]:
        arrow(ax, start, end)
    arrow(ax, (4.87, 2.85), (8.8, 2.72), PARALLEL, bend=-0.12)
    ax.text(6.7, 3.28, "Aqk", color=PARALLEL, fontsize=8.5, ha="center")
    arrow(ax, (7.75, 1.18), (7.1, 1.18), SERIAL, bend=-0.8)
    ax.text(7.42, 0.52, "chunk after chunk", color=SERIAL, fontsize=8.5, ha="center")
    ax.text(0.1, 0.16, "blue: parallel over chunks and heads", color=PARALLEL, fontsize=8.5)
    ax.text(3.4, 0.16, "orange: serial over the chunks of a segment", color=SERIAL, fontsize=8.5)
    return figure


def halving() -> Figure:
    """Levels of a tile of 16 rows."""
    figure, ax = plt.subplots(figsize=(4.6, 3.9))
    colors = ["#16355e", "#2f5d9b", "#6b93c9", "#b3cbe8"]
    for i in range(16):
        for j in range(i):
            level = (i ^ j).bit_length() - 1
            ax.add_patch(plt.Rectangle((j, i), 1, 1, fc=colors[level], ec="white", lw=0.6))
        ax.add_patch(plt.Rectangle((i, i), 1, 1, fc="#e6e9f0", ec="white", lw=0.6))
    for level, color in enumerate(colors):
        ax.add_patch(plt.Rectangle((10.2, 1 + 1.5 * level), 0.9, 0.9, fc=color))
        ax.text(11.4, 1.5 + 1.5 * level, f"h = {2**level}", va="center", fontsize=9)
    ax.set(
        xlim=(0, 16), ylim=(16, 0), aspect="equal", xlabel="j, the token that wrote", ylabel="i, the token that reads"
    )
    ax.set_xticks([0, 4, 8, 12, 16])
    ax.set_yticks([0, 4, 8, 12, 16])
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    figure.subplots_adjust(0.12, 0.13, 0.99, 0.98)
    return figure


def time() -> Figure:
    """Predicted over measured time, every recorded row."""
    figure, ax = plt.subplots(figsize=(6.2, 3.4))
    rows = time_model.forward_rows()
    for gate, color, marker in (("softplus", PARALLEL, "o"), ("bounded", SERIAL, "s")):
        points = [(measured, model / measured) for _, kind, model, measured in rows if kind == gate]
        ax.scatter(*zip(*points, strict=True), s=26, color=color, marker=marker, label=f"chunk_kda, {gate}")
    decode = [(measured / 1e3, model / measured) for _, model, measured in time_model.decode_rows()]
    ax.scatter(*zip(*decode, strict=True), s=30, color=OUTSIDE, marker="^", label="decode_step")
    ax.axhspan(0.7, 1.3, color=PALE, zorder=0)
    ax.axhline(1, color=INK, lw=0.8)
    ax.set(xscale="log", ylim=(0.6, 1.4), xlabel="measured, ms", ylabel="model / measured")
    ax.legend(frameon=False, fontsize=8.5, loc="upper right")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    figure.subplots_adjust(0.12, 0.16, 0.98, 0.97)
    return figure


def speed() -> Figure:
    """Forward on a GPU and on a CPU, from the records of benchmarks/."""
    record = json.loads((time_model.RESULTS / "gpu.json").read_text())["times"]
    gpu = {(x["candidate"], x["gate"]): x["ms"] for x in record if x["shape"] == "B=1 T=8192 H=32"}
    cpu = json.loads((time_model.RESULTS / "cpu.json").read_text())["seconds"]["2048"]
    theirs = min(gpu["fla", gate] for gate in ("softplus", "bounded"))
    left = {f"{gate} gate": (gpu["ours", gate], theirs) for gate in ("softplus", "bounded")}
    names = ("ours: chunk_kda", "transformers: chunk"), ("ours: chunk_kda_backward", "transformers: chunk, autograd")
    right = {
        title: tuple(1e3 * cpu[name]["median"] for name in pair)
        for title, pair in zip(("forward", "gradients"), names, strict=True)
    }
    figure, axes = plt.subplots(1, 2, figsize=(9.2, 2.3))
    bars(axes[0], left, "fla 0.6.0, faster gate", "H200, bf16, T = 8192, 32 heads: ms a call")
    axes[1].set_xscale("log")
    bars(axes[1], right, "transformers 5.24", "two CPU cores, fp32, T = 2048: ms a call, log scale")
    axes[1].set_xlim(50, 900_000)
    figure.subplots_adjust(0.12, 0.05, 0.985, 0.87, wspace=0.26)
    return figure


def bars(ax: Axes, pairs: dict[str, tuple[float, float]], peer: str, title: str) -> None:
    """Two bars a row, ours above a peer's, with their lengths written at their ends."""
    for row, (mine, theirs) in enumerate(pairs.values()):
        for y, value, color, who in ((row - 0.2, mine, PARALLEL, "ours"), (row + 0.2, theirs, "#b9c2d0", peer)):
            ax.barh(y, value, 0.36, color=color)
            text = f"{value:.3f}" if value < 10 else f"{value:,.0f}"
            ax.annotate(f"{text}  {who}", (value, y), (5, 0), textcoords="offset points", va="center", fontsize=8.5)
    ax.set_yticks(range(len(pairs)), list(pairs))
    ax.set_title(title, fontsize=9.5, loc="left")
    ax.invert_yaxis()
    ax.xaxis.set_visible(False)
    ax.margins(x=0.35)
    for side in ("top", "right", "bottom"):
        ax.spines[side].set_visible(False)


def folders() -> Figure:
    """Who imports whom: an arrow leads from a folder to what it may import."""
    figure, ax = canvas(8.2, 3.9)
    box(ax, 3.0, 0.25, 2.2, 0.85, "reference", "contract, gates, front end", PARALLEL)
    box(ax, 0.2, 1.55, 1.7, 0.85, "naive", "the definition", PARALLEL)
    box(ax, 2.2, 1.55, 1.7, 0.85, "chunked", "six stages", PARALLEL)
    box(ax, 4.2, 1.55, 1.7, 0.85, "model", "Kimi Linear", PARALLEL)
    box(ax, 6.2, 1.55, 1.8, 0.85, "triton_kernels", "the fast tier", SERIAL)
    box(ax, 1.2, 2.85, 1.9, 0.85, "conformance", "the judge", OUTSIDE)
    box(ax, 4.9, 2.85, 2.0, 0.85, "cli", "the kimi-linear command", OUTSIDE)
    arrow(ax, (1.05, 1.53), (2.98, 0.85))
    arrow(ax, (3.05, 1.53), (3.6, 1.14))
    arrow(ax, (5.05, 1.53), (4.6, 1.14))
    arrow(ax, (7.1, 1.53), (5.22, 0.75), SERIAL)
    arrow(ax, (4.18, 1.97), (3.94, 1.97))
    for start, end in [((1.8, 2.83), (1.3, 2.44)), ((2.5, 2.83), (2.9, 2.44)), ((5.5, 2.83), (5.2, 2.44))]:
        arrow(ax, start, end, OUTSIDE)
    arrow(ax, (6.4, 2.83), (6.8, 2.44), OUTSIDE)
    arrow(ax, (4.88, 3.28), (3.14, 3.28), OUTSIDE)
    return figure


FIGURES = {"stages": stages, "halving": halving, "time": time, "speed": speed, "folders": folders}


def draw(folder: Path) -> None:
    """All pictures, the same bytes every time."""
    with matplotlib.rc_context(SETTINGS):
        for name, make in FIGURES.items():
            figure = make()
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
