"""Numbers that are the same on every machine: a counter-based generator, and only exact arithmetic after it.

Philox gives 64 random bits for a key and a counter. A normal number is a sum of twelve uniform ones, so that no
library's log or cosine takes part; lengths go through sqrt, which IEEE 754 defines to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Shape = tuple[int, ...]

DEAD = -1e4  # a gate whose decay is exactly 0 in every format, without being infinite
SPIKE_PERIOD = 7  # tokens


class Draw:
    """A stream of random numbers for one tensor of one case."""

    def __init__(self, seed: int, name: str) -> None:
        key = int.from_bytes(name.encode()[:8].ljust(8, b"."), "little")
        self.bits = np.random.Philox(key=np.array([seed, key], dtype=np.uint64))

    def uniform(self, *shape: int) -> Array:
        """In [0, 1), multiples of 2 ** -32."""
        raw = self.bits.random_raw(int(np.prod(shape)))
        return (np.asarray(raw, dtype=np.uint64) >> np.uint64(32)).astype(np.float64).reshape(shape) / 2.0**32

    def normal(self, *shape: int) -> Array:
        """Twelve uniform numbers less six: mean 0, variance 1, within 6 of 0."""
        parts = self.uniform(12, *shape)
        total = np.zeros(shape)
        for part in parts:
            total = total + part
        return total - 6.0

    def integers(self, low: int, high: int, *shape: int) -> Array:
        """Whole numbers from low to high, both included."""
        return np.floor(self.uniform(*shape) * (high - low + 1)) + low


def unit(x: Array) -> Array:
    """Each row over its length; zero rows stay."""
    length = np.sqrt(np.sum(x * x, axis=-1, keepdims=True))
    return x / np.where(length > 0, length, 1.0)


def soft(x: Array) -> Array:
    """(x + sqrt(x^2 + 4)) / 2: a softplus without exp and log."""
    return (x + np.sqrt(x * x + 4.0)) / 2.0


def _every(period: int, shape: Shape, offset: int = 0) -> Array:
    """1 at tokens offset, offset + period, .. (tokens are axis 1), else 0, for all heads and channels."""
    hit = (np.arange(shape[1]) % period == offset).astype(np.float64)
    return np.broadcast_to(hit[None, :, None, None], shape)


def _ramp(shape: Shape) -> Array:
    """0 to 1 along the channels."""
    return np.broadcast_to(np.arange(shape[-1]) / max(shape[-1] - 1, 1), shape)


def _per_head(shape: Shape) -> Array:
    return np.broadcast_to((0.1 * 4.0 ** np.arange(shape[2]))[None, None, :, None], shape)


GATES: dict[str, Callable[[Draw, Shape], Array]] = {
    "zero": lambda d, s: np.zeros(s),
    "slow": lambda d, s: np.full(s, -1e-3) * (0.5 + d.uniform(*s)),
    "typical": lambda d, s: -soft(d.normal(*s)),
    "mild": lambda d, s: -0.1 * soft(d.normal(*s)),
    "strong": lambda d, s: -10 * soft(d.normal(*s)),
    "bound": lambda d, s: np.full(s, -5.0),
    "minus30": lambda d, s: np.full(s, -30.0),
    "dead": lambda d, s: np.full(s, DEAD),
    "minus_infinity": lambda d, s: np.where(d.uniform(*s) < 0.1, -np.inf, -0.1 * soft(d.normal(*s))),
    "channel_ramp": lambda d, s: -(2.0**-8) - 3 * _ramp(s),
    "half_dead": lambda d, s: np.where(np.arange(s[-1]) % 2 == 0, DEAD, -0.05 * soft(d.normal(*s))),
    "half_strong": lambda d, s: np.where(np.arange(s[-1]) % 2 == 0, -20.0, -1e-3 * (1 + d.uniform(*s))),
    "edge_resets": lambda d, s: np.where(_every(32, s) == 1, DEAD, -0.05 * soft(d.normal(*s))),
    "edge_resets_late": lambda d, s: np.where(_every(32, s, 1) == 1, DEAD, -0.05 * soft(d.normal(*s))),
    "edge_resets_early": lambda d, s: np.where(_every(32, s, 31) == 1, DEAD, -0.05 * soft(d.normal(*s))),
    "spikes": lambda d, s: np.where(_every(SPIKE_PERIOD, s) == 1, -12.0, -0.01 * soft(d.normal(*s))),
    "token_ramp": lambda d, s: (
        -(np.broadcast_to((np.arange(s[1]) / max(s[1], 1))[None, :, None, None], s) ** 2) - 1e-3
    ),
    "per_head": lambda d, s: -_per_head(s) * soft(d.normal(*s)),
    "constant_per_token": lambda d, s: np.broadcast_to(-soft(d.normal(*s[:3], 1)), s).copy(),
    "keep_or_forget": lambda d, s: np.where(d.uniform(*s) < 0.05, DEAD, 0.0),
}

BETAS: dict[str, Callable[[Draw, Shape], Array]] = {
    "zero": lambda d, s: np.zeros(s),
    "one": lambda d, s: np.ones(s),
    "two": lambda d, s: np.full(s, 2.0),
    "uniform": lambda d, s: d.uniform(*s),
    "up_to_two": lambda d, s: 2 * d.uniform(*s),
    "high": lambda d, s: np.full(s, 0.95),
    "bits": lambda d, s: d.integers(0, 1, *s),
    "halves": lambda d, s: np.full(s, 0.5),
    "mixed": lambda d, s: np.array([0.0, 0.5, 1.0, 2.0])[d.integers(0, 3, *s).astype(np.int64)],
    "alternating": lambda d, s: np.broadcast_to((np.arange(s[1]) % 2)[None, :, None] * 0.9, s).copy(),
    "per_head": lambda d, s: np.broadcast_to((np.arange(s[2]) + 1.0) / s[2], s).copy(),
}


def _common(d: Draw, s: Shape, cosine: float) -> Array:
    """Unit keys with that cosine to one common direction a head."""
    common = unit(d.normal(s[0], 1, s[2], s[3]))
    return unit(cosine * common + np.sqrt(1 - cosine * cosine) * unit(d.normal(*s)))


def _one_hot(d: Draw, s: Shape, repeat: float) -> Array:
    """Signed unit vectors; a token repeats the one before with that probability."""
    slot = d.integers(0, s[3] - 1, *s[:3]).astype(np.int64)
    again = d.uniform(*s[:3]) < repeat
    slot = np.where(again, np.roll(slot, 1, axis=1), slot)
    return np.eye(s[3])[slot] * (2 * d.integers(0, 1, *s[:3], 1) - 1)


def _cycle(d: Draw, s: Shape) -> Array:
    """Signed unit vectors in turn: each is written once every K tokens."""
    slot = np.broadcast_to((np.arange(s[1]) % s[3])[None, :, None], s[:3])
    return np.eye(s[3])[slot] * (2 * d.integers(0, 1, *s[:3], 1) - 1)


def _lengths(d: Draw, s: Shape) -> Array:
    """Lengths from 0 to 100: on both sides of an eps of 1e-6 below a root."""
    return np.array([0.0, 1e-6, 1e-4, 1e-3, 1e-2, 1.0, 100.0])[d.integers(0, 6, *s[:3], 1).astype(np.int64)]


KEYS: dict[str, Callable[[Draw, Shape], Array]] = {
    "random": lambda d, s: unit(d.normal(*s)),
    "positive": lambda d, s: unit(d.uniform(*s)),
    "duplicate": lambda d, s: np.broadcast_to(unit(d.normal(s[0], 1, s[2], s[3])), s).copy(),
    "flipped": lambda d, s: unit(d.normal(s[0], 1, s[2], s[3])) * (2 * d.integers(0, 1, *s[:3], 1) - 1),
    "runs": lambda d, s: unit(d.normal(*s))[:, np.arange(s[1]) // 8],
    "one_hot": lambda d, s: _one_hot(d, s, 0.0),
    "signed_one_hot": lambda d, s: _one_hot(d, s, 0.4),
    "cycle": _cycle,
    "tiny": lambda d, s: 1e-3 * unit(d.normal(*s)),
    "faint": lambda d, s: 1e-6 * unit(d.normal(*s)),
    "unequal": lambda d, s: _lengths(d, s) * unit(d.normal(*s)),
    "raw": lambda d, s: 2 * d.normal(*s),
    "zero": lambda d, s: np.zeros(s),
    "long": lambda d, s: 1.35 * unit(d.normal(*s)),
    "small_integers": lambda d, s: d.integers(-2, 2, *s),
    "five_bits": lambda d, s: d.integers(0, 31, *s),
}

VALUES: dict[str, Callable[[Draw, Shape], Array]] = {
    "random": lambda d, s: d.normal(*s),
    "zero": lambda d, s: np.zeros(s),
    "large": lambda d, s: 1e4 * d.normal(*s),
    "small": lambda d, s: 1e-4 * d.normal(*s),
    "needle": lambda d, s: d.normal(*s) * (1 + 1e5 * (np.arange(s[1]) == s[1] // 3)[None, :, None, None]),
    "per_head": lambda d, s: d.normal(*s) * (10.0 ** -np.arange(s[2]))[None, None, :, None],
    "offset": lambda d, s: d.normal(*s) + 8.0,
    "small_integers": lambda d, s: d.integers(-3, 3, *s),
    "six_bits": lambda d, s: d.integers(0, 63, *s),
}

# Raw projections, for front ends. Logarithms of rates are drawn as they are, [HV]; biases [HV, K].

RAW_GATES: dict[str, Callable[[Draw, Shape], Array]] = {
    "zero": lambda d, s: np.zeros(s),
    "typical": lambda d, s: 2 * d.normal(*s),
    "wide": lambda d, s: 16 * d.uniform(*s) - 8,
    "high": lambda d, s: 60 + 70 * d.uniform(*s),
    "faint": lambda d, s: -14 - 6 * d.uniform(*s),
    "saturated": lambda d, s: np.array([-1e4, -30.0, 0.0, 30.0])[d.integers(0, 3, *s).astype(np.int64)],
    "underflow": lambda d, s: (
        np.where(np.arange(s[2]) % 2 == 0, -200.0, -81.0)[None, None, :, None] + 2 * d.uniform(*s)
    ),
    "against_90": lambda d, s: -91 + 2 * d.uniform(*s),
}

RATES: dict[str, Callable[[Draw, int], Array]] = {
    "typical": lambda d, heads: 2.75 * d.uniform(heads),
    "gentle": lambda d, heads: -8.0 + d.uniform(heads),
    "mild": lambda d, heads: -3.0 + d.uniform(heads),
    "large": lambda d, heads: 10.0 + 2 * d.uniform(heads),
    "high": lambda d, heads: np.full(heads, 80.0),
    "ninety": lambda d, heads: np.full(heads, 90.0),
    "overflow": lambda d, heads: np.where(np.arange(heads) % 2 == 0, 90.0, 80.0),
}

BIASES: dict[str, Callable[[Draw, Shape], Array]] = {
    "zero": lambda d, s: np.zeros(s),
    "per_channel": lambda d, s: d.normal(*s),
    "low": lambda d, s: -4.0 + d.normal(*s),
}

LOGITS: dict[str, Callable[[Draw, Shape], Array]] = {
    "typical": lambda d, s: 2 * d.normal(*s),
    "zero": lambda d, s: np.zeros(s),
    "extreme": lambda d, s: np.array([-20.0, -4.0, 0.0, 4.0, 20.0])[d.integers(0, 4, *s).astype(np.int64)],
}


# Draws with a number in their name: "cosine_0.95"

ByNumber = dict[str, Callable[[Draw, Shape, float], Array]]

KEYS_BY_NUMBER: ByNumber = {
    "cosine": _common,
    "flipped": lambda d, s, cosine: _common(d, s, cosine) * (2 * d.integers(0, 1, *s[:3], 1) - 1),
    "length": lambda d, s, length: length * unit(d.normal(*s)),
    "runs": lambda d, s, length: unit(d.normal(*s))[:, np.arange(s[1]) // int(length)],
}
GATES_BY_NUMBER: ByNumber = {"mean": lambda d, s, mean: mean * soft(d.normal(*s))}
BETAS_BY_NUMBER: ByNumber = {"constant": lambda d, s, beta: np.full(s, beta)}
VALUES_BY_NUMBER: ByNumber = {"times": lambda d, s, size: size * d.normal(*s)}


def drawn(
    name: str, table: dict[str, Callable[[Draw, Shape], Array]], by_number: ByNumber
) -> Callable[[Draw, Shape], Array]:
    """The draw of that name. Raises ValueError with the names that there are."""
    if name in table:
        return table[name]
    stem, _, number = name.rpartition("_")
    try:
        draw, value = by_number[stem], float(number)
    except (KeyError, ValueError):
        known = [*table, *(f"{stem}_NUMBER" for stem in by_number)]
        raise ValueError(f"a draw must be one of {', '.join(known)}; got {name!r}") from None
    return lambda d, s: draw(d, s, value)
