"""What the notebooks share: one look for pictures, and what an exercise's checker needs."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from IPython.display import Markdown, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure

plt.rcParams.update(
    {
        "figure.figsize": (7.5, 3.4),
        "figure.dpi": 100,
        "figure.constrained_layout.use": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "image.interpolation": "nearest",
        "legend.frameon": False,
    }
)


def show(figure: Figure, see: str) -> None:
    """Show a picture with a sentence that says what to see; an axis without a label is an error."""
    for axes in figure.axes:
        for axis in ("x", "y"):
            if not _has_label(axes, axis):
                raise ValueError(
                    f"the {axis} axis of {axes.get_title() or 'a picture'!r} needs a label with its unit"
                )
    display(figure)
    plt.close(figure)
    display(Markdown(f"**What to see:** {see}"))


def _has_label(axes: Axes, axis: str) -> bool:
    """Whether an axis, or another one that it shares its scale with, says what it counts."""
    if not axes.axison:
        return True
    if axes.get_label() == "<colorbar>":
        return bool(axes.get_xlabel() or axes.get_ylabel())
    shared = getattr(axes, f"get_shared_{axis}_axes")().get_siblings(axes)
    return any(getattr(other, f"get_{axis}label")() for other in shared)


def recorded(name: str) -> Any:
    """A file of `benchmarks/results`, for what this machine cannot measure: JSON as data, the rest as text."""
    here = Path.cwd().resolve()
    for folder in (here, *here.parents):
        file = folder / "benchmarks" / "results" / name
        if file.is_file():
            return json.loads(file.read_text()) if file.suffix == ".json" else file.read_text()
    raise FileNotFoundError(f"benchmarks/results/{name} must lie beside tutorials/; it is nowhere above {here}")


class NotYetError(AssertionError):
    """An answer is not right yet; the message says what was wanted."""


def expect(condition: Any, message: str) -> None:
    """Inside a checker: the answer has to fulfil the condition, or the learner reads the message."""
    if not bool(condition):
        raise NotYetError(message)


def expect_close(got: Any, want: torch.Tensor, name: str) -> None:
    """Inside a checker: `got` is a tensor of the shape of `want`, and equal to it up to rounding."""
    expect(isinstance(got, torch.Tensor), f"{name} must be a tensor, got {type(got).__name__}")
    expect(got.shape == want.shape, f"{name} must be {list(want.shape)}, got {list(got.shape)}")
    error = (got.double() - want.double()).abs().max().item()
    size = want.double().abs().max().item()
    expect(error <= 1e-5 * size + 1e-12, f"{name} is off by {error:.3g}; the right values reach {size:.3g}")


class Verdict:
    """True or false in an `assert`; at the end of a cell it shows nothing, since the checker has printed it."""

    def __init__(self, right: bool) -> None:
        self.right = right

    def __bool__(self) -> bool:
        return self.right

    def _ipython_display_(self) -> None:
        pass


def checker(check: Callable[[Any], None]) -> Callable[[Any], Verdict]:
    """Make a checker of an exercise: it says whether the answer is right, and never stops the notebook."""

    @functools.wraps(check)
    def report(answer: Any) -> Verdict:
        try:
            check(answer)
        except NotYetError as reason:
            problem = str(reason)
        except Exception as error:
            problem = f"it raised {type(error).__name__}: {error}"
            if NotImplementedError in (type(error), type(error.__cause__)):  # Triton's interpreter wraps it
                problem = "this one is yours to write"
        else:
            print(f"{check.__name__}: right")
            return Verdict(True)
        print(f"{check.__name__}: not yet; {problem}")
        return Verdict(False)

    return report
