"""How an error goes on after its first bad token: the law that fits it best.

    constant      c                 each token has the same fault: nothing accumulates
    square root   a + b sqrt(n)     independent errors add up
    linear        a + b n           errors of one sign add up
    exponential   a r^n             each error feeds the next
    fades         a r^n, r < 1      one fault, which the gates then forget

Every law is a shape with one factor, so laws are compared by the scatter of log(ratio) - log(shape); a law with a
parameter more has to earn it (Bayesian information criterion).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FLAT = 1.5  # growth from first to last below which an error does not accumulate
ENOUGH = 8  # tokens; fewer show no law
SCATTER = 1e-4  # variance of log(ratio) that counts as none
IRREGULAR = 1.0  # standard deviation of log(ratio) from which no law is told
OFFSETS = np.concatenate([[0.0], np.geomspace(0.25, 4096, 15)])

Array = npt.NDArray[np.float64]
SHAPES: dict[str, Callable[[Array], Array]] = {"square root": np.sqrt, "linear": lambda n: n}


@dataclass(frozen=True)
class Growth:
    """A law by name, the last fitted value over the first, the factor a token, and the fitted curve."""

    law: str
    gain: float = 1.0
    rate: float = 1.0
    fitted: tuple[float, ...] = ()

    def __str__(self) -> str:
        span = f"(x{self.gain:.2g} from the first to the last bad token)"
        return {
            "not finite": "reaches inf or NaN",
            "unknown": "has too few tokens to tell growth",
            "irregular": "is irregular: no law of growth fits",
            "constant": "is constant: not accumulation",
            "fades": f"fades, x{self.rate:.3g} a token {span}",
            "exponential": f"grows, exponential, x{self.rate:.3g} a token {span}",
            "linear": f"grows, linear {span}",
            "square root": f"grows, like a square root {span}",
        }[self.law]


def fit_growth(ratios: Sequence[float]) -> Growth:
    """The law of a curve of ratios, from the first bad token on; zeros are left out."""
    y = np.array([r for r in ratios if r != 0])
    if not np.isfinite(y).all():
        return Growth("not finite")
    if len(y) < ENOUGH:
        return Growth("unknown")
    n = np.flatnonzero(np.array(ratios)).astype(np.float64)
    law, shape, variance = min(_candidates(n, np.log(y)), key=lambda found: _criterion(found, len(y)))
    gain = float(shape[-1] / shape[0])
    if math.sqrt(variance) > IRREGULAR:
        return Growth("irregular")
    if law == "constant" or 1 / FLAT <= gain <= FLAT:
        law, gain, shape = "constant", 1.0, np.ones_like(y)
    fitted = shape * np.exp(np.mean(np.log(y) - np.log(shape)))
    rate = float(gain ** (1 / (n[-1] - n[0]))) if law in ("exponential", "fades") else 1.0
    return Growth(law, gain, rate, tuple(np.interp(np.arange(len(ratios)), n, fitted).tolist()))


Candidate = tuple[str, Array, float]


def _candidates(n: Array, log_y: Array) -> Iterator[Candidate]:
    """Each law with its best shape and the variance that it leaves."""
    yield "constant", np.ones_like(n), float(log_y.var())
    for law, shape in SHAPES.items():
        fits = [offset + shape(n + 1) for offset in OFFSETS]
        best = min(fits, key=lambda fit: float((log_y - np.log(fit)).var()))
        yield law, best, float((log_y - np.log(best)).var())
    slope = float(np.polyfit(n, log_y, 1)[0])
    law = "exponential" if slope > 0 else "fades"
    yield law, np.exp(slope * (n - n[0])), float((log_y - slope * n).var())


def _criterion(found: Candidate, count: int) -> float:
    law, _, variance = found
    parameters = 1 if law == "constant" else 2
    return count * math.log(variance + SCATTER) + parameters * math.log(count)
