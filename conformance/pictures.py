"""Pictures of an error, as SVG to put into a page: over heads and tokens, and growing after its first bad token.

Text and axes take the colour of the page's text (currentColor), so one picture serves light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from torch import Tensor

from .explain import RatioMap
from .place import PER_TOKEN
from .spread import grid_of

INK = "#123456"  # stands for the page's own text colour until the picture is in it
RIGHT, WRONG, FITTED, ODD = "#2f7ed8", "#d7301f", "#e08214", "#7a0177"
COLOURS = LinearSegmentedColormap.from_list(
    "ratio", ["#0b3c6f", RIGHT, "#d9e6f2", "#fdd49e", WRONG, "#5f0000"], bad=ODD
)
BELOW, ABOVE = 1e-2, 1e2  # of the limit: the span of colours, wider where errors are larger
MOST_COLUMNS = 1200  # of a picture; more tokens than that share columns, the worst is shown
MOST_LABELS = 12
STYLE = {"svg.fonttype": "none", "font.size": 11, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
TICKS = {"xtick.color": INK, "ytick.color": INK}


def ratio_picture(found: RatioMap, name: str) -> str:
    """Error over envelope of every row: heads down, tokens (of a state: key channels) across. `name` is unique."""
    rows, labels = _as_rows(found)
    per_token = found.result in PER_TOKEN
    with _styled(name):
        figure = Figure(figsize=(6.2, min(max(2.4, 1.2 + 0.24 * len(rows)), 5.0)), layout="constrained")
        axes = figure.subplots()
        norm = _norm(rows, found.limit)
        image = axes.imshow(_log(rows, norm), COLOURS, norm, aspect="auto", interpolation="nearest")
        axes.set_ylabel("batch, head" if per_token else "segment, head")
        axes.set_xlabel(_across(found))
        step = -(-len(labels) // MOST_LABELS)
        axes.set_yticks(range(0, len(labels), step), labels[::step])
        if per_token:
            _mark_chunks(axes, found)
        _colour_bar(figure, image, axes, found.limit)
        return _svg(figure, f"{found.result}: error over envelope of every row")


def growth_picture(found: RatioMap, name: str) -> str:
    """The worst head's ratio from the first bad token on, its limit, and the law that fits; empty without a curve."""
    curve = np.array(found.curve)
    shown = np.isfinite(curve) & (curve > 0)
    if shown.sum() < 2:
        return ""
    with _styled(name):
        figure = Figure(figsize=(6.2, 2.9), layout="constrained")
        axes = figure.subplots()
        n = np.arange(len(curve))
        axes.semilogy(n[shown], curve[shown], "o-", color=RIGHT, markersize=3, linewidth=1, label="worst head")
        if found.growth.fitted:
            axes.semilogy(n, found.growth.fitted, "--", color=FITTED, linewidth=2, label=f"fit: {found.growth.law}")
        axes.axhline(found.limit, color=WRONG, linewidth=1, label=f"limit {found.limit:g}")
        axes.set_xlabel("tokens after the first bad one")
        axes.set_ylabel("error / envelope")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="best")
        return _svg(figure, f"{found.result}: growth after the first bad token")


def _as_rows(found: RatioMap) -> tuple[Tensor, list[str]]:
    """[outer * heads, columns] and a label for each row."""
    ratio = found.ratio.transpose(1, 2) if found.result in PER_TOKEN else found.ratio
    outer, heads, columns = ratio.shape
    share = -(-columns // MOST_COLUMNS)
    rows = ratio.reshape(outer * heads, columns)
    if share > 1:
        rows = torch.nn.functional.max_pool1d(rows[None], share, ceil_mode=True)[0]
    labels = [f"{b}, {h}" for b in range(outer) for h in range(heads)]
    return rows, labels


def _norm(rows: Tensor, limit: float) -> TwoSlopeNorm:
    worst = rows[rows.isfinite()].max().item() if rows.isfinite().any() else 0.0
    low, middle, high = (float(np.log10(x)) for x in (BELOW * limit, limit, max(ABOVE * limit, worst)))
    return TwoSlopeNorm(middle, low, high)


def _log(rows: Tensor, norm: TwoSlopeNorm) -> Any:
    """log10 of the ratios; what is not finite has a colour of its own."""
    assert norm.vmin is not None
    logs = rows.clamp(min=10.0**norm.vmin).log10().numpy()
    return np.ma.masked_invalid(logs)


def _across(found: RatioMap) -> str:
    if found.result not in PER_TOKEN:
        return "key channel"
    C = found.problem.contract.chunk_size
    return "token" if C is None else f"token (a line starts a chunk of {C})"


def _mark_chunks(axes: Axes, found: RatioMap) -> None:
    grid = grid_of(found.problem)
    C, T = grid.chunk_size, grid.token.shape[1]
    if T > MOST_COLUMNS:
        return
    starts = (grid.token[0] == 0) if C is None else (grid.token[0] % C == 0)
    for t in starts.nonzero().flatten().tolist():
        if t:
            axes.axvline(t - 0.5, color="#888888", linewidth=1.5 if grid.token[0, t] == 0 else 0.6)
    if found.onset is not None:
        b, t = found.onset
        heads = found.ratio.shape[2]
        axes.plot([t], [b * heads - 0.5], marker="v", color=INK, markersize=9, clip_on=False, zorder=3)
    axes.set_ylim(found.ratio.shape[0] * found.ratio.shape[2] - 0.5, -0.5)


def _colour_bar(figure: Figure, image: Any, axes: Axes, limit: float) -> None:
    bar = figure.colorbar(image, ax=axes, pad=0.02)
    low, high = image.norm.vmin, image.norm.vmax
    powers = [n for n in range(int(np.ceil(low)), int(high) + 1) if abs(n - np.log10(limit)) > 0.45]
    powers = powers[:: max(1, -(-len(powers) // 4))]
    ticks = [*powers, float(np.log10(limit))]
    bar.set_ticks(ticks, labels=[*(f"{10.0**n:g}" for n in powers), f"limit {limit:g}"])
    bar.ax.axhline(float(np.log10(limit)), color=INK, linewidth=2)
    bar.set_label("error / envelope")
    bar.outline.set_visible(False)


@contextmanager
def _styled(name: str) -> Iterator[None]:
    settings: Any = {**STYLE, **TICKS, "svg.hashsalt": name}  # salted: marks of two pictures need two names
    with matplotlib.rc_context(settings):
        yield


def _svg(figure: Figure, label: str) -> str:
    """The picture as an <svg> element without a size of its own, in the page's font and text colour."""
    file = io.BytesIO()
    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set_alpha(0.0)
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    FigureCanvasSVG(figure).print_svg(file, metadata=nothing)
    text = file.getvalue().decode()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    head, _, rest = text.partition(">")
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{label}">{rest}'
