"""A case is data: knobs, the reason it exists, and the public bugs that it would have shown.

`tensors_of` turns the knobs into fp64 tensors that are the same on every machine. Lengths may be written in chunks
("2C+1"), so that every kernel is asked about its own edges: `fitting` makes a case one of a kernel's sizes. Nothing
here knows a kernel or a tolerance.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .draws import (
    BETAS,
    BETAS_BY_NUMBER,
    BIASES,
    GATES,
    GATES_BY_NUMBER,
    KEYS,
    KEYS_BY_NUMBER,
    LOGITS,
    RATES,
    RAW_GATES,
    VALUES,
    VALUES_BY_NUMBER,
    Draw,
    drawn,
)

DEFAULT_CHUNK = 64  # of a contract that has no chunks
SUBJECTS = {
    "l2norm": "a normalisation of q and k",
    "softplus": "a softplus gate",
    "bounded": "a bounded gate",
    "beta": "a sigmoid of beta",
    "whole": "normalisation, gate and sigmoid together",
}

Length = int | str


@dataclass(frozen=True)
class Case:
    """One input by its knobs. Names of draws are keys of the tables in `draws`.

    lengths      packed segments (then B = 1), or None for a batch of T tokens
    past_end     rows after the last segment
    front        what of a kernel's front end the case is about, one of SUBJECTS; then the inputs are raw: raw_gate,
                 rates (A_log), bias (dt_bias) and logits are drawn for the steps that the kernel does itself
    flags        "exact" (integers, judged bit by bit), "long_sums" (exact in fp32 sums alone), "gradients",
                 "quick", "acceptable" (reported, never failed), "beyond_fp16" (leaves the range of half
                 precision)
    effect       what a user sees of a kernel that fails here
    links        public reports of such a bug, as "project #number"
    """

    id: str
    family: str
    comment: str
    effect: str = "wrong output"
    links: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    B: int = 1
    T: Length = "C+5"
    H: int = 1
    group: int = 2
    K: int = 24
    V: int = 20
    lengths: tuple[Length, ...] | None = None
    past_end: int = 0
    gate: str = "mild"
    keys: str = "random"
    queries: str = "random"
    values: str = "random"
    beta: str = "uniform"
    state: str = "random"
    scale: float | None = None
    cotangents: str = "both"
    seed: int = 1
    front: str | None = None
    raw_gate: str = "typical"
    rates: str = "typical"
    bias: str = "per_channel"
    logits: str = "typical"

    def has(self, flag: str) -> bool:
        return flag in self.flags


@dataclass(frozen=True)
class Raw:
    """What a front end makes g and beta of, in fp64."""

    gate: Tensor
    A_log: Tensor
    dt_bias: Tensor
    logits: Tensor


@dataclass(frozen=True)
class Tensors:
    """A case's inputs in fp64; `raw` where it is about a front end."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    h0: Tensor | None
    offsets: list[int] | None
    scale: float
    do: Tensor | None = None
    dht: Tensor | None = None
    raw: Raw | None = None


def length_of(length: Length, chunk_size: int) -> int:
    """A length in tokens: a number, or "3C-1", "C/4+1".

    >>> length_of("2C+1", 64), length_of("C/4-1", 64), length_of(61, 64)
    (129, 15, 61)
    """
    if isinstance(length, int):
        return length
    match = re.fullmatch(r"(\d*)C(?:/(\d+))?([+-]\d+)?", length)
    if match is None:
        raise ValueError(f"a length must be a number or like 2C+1 or C/4; got {length!r}")
    times, over, plus = match.groups()
    return int(times or 1) * chunk_size // int(over or 1) + int(plus or 0)


def tensors_of(case: Case) -> Tensors:
    """The inputs of a fitted case."""
    B, T, HV = case.B, length_of(case.T, DEFAULT_CHUNK), case.H * case.group

    def draw(name: str) -> Draw:
        return Draw(case.seed, name)

    per_key = (B, T, case.H, case.K)
    N = B if case.lengths is None else len(case.lengths)
    x = Tensors(
        q=_tensor(drawn(case.queries, KEYS, KEYS_BY_NUMBER)(draw("q"), per_key)),
        k=_tensor(drawn(case.keys, KEYS, KEYS_BY_NUMBER)(draw("k"), per_key)),
        v=_tensor(drawn(case.values, VALUES, VALUES_BY_NUMBER)(draw("v"), (B, T, HV, case.V))),
        g=_tensor(drawn(case.gate, GATES, GATES_BY_NUMBER)(draw("g"), (B, T, HV, case.K))),
        beta=_tensor(drawn(case.beta, BETAS, BETAS_BY_NUMBER)(draw("beta"), (B, T, HV))),
        h0=state_of(case.state, draw("h0"), (N, HV, case.K, case.V)),
        offsets=_offsets(case),
        scale=case.K**-0.5 if case.scale is None else case.scale,
    )
    if case.front is not None:
        x = replace(x, raw=_raw(case, x, draw))
    return with_cotangents(x, case) if case.has("gradients") else x


def _raw(case: Case, x: Tensors, draw: Callable[[str], Draw]) -> Raw:
    HV = x.v.shape[2]
    return Raw(
        gate=_tensor(RAW_GATES[case.raw_gate](draw("raw"), tuple(x.g.shape))),
        A_log=_tensor(RATES[case.rates](draw("A_log"), HV)),
        dt_bias=_tensor(BIASES[case.bias](draw("dt_bias"), (HV, case.K))),
        logits=_tensor(LOGITS[case.logits](draw("logits"), tuple(x.beta.shape))),
    )


def state_of(kind: str, draw: Draw, shape: tuple[int, ...]) -> Tensor | None:
    """An initial state, not symmetric in K and V."""
    if kind == "none":
        return None
    if kind in ("small_integers", "six_bits"):
        return _tensor(VALUES[kind](draw, shape))
    scale = {"random": 1.0, "zero": 0.0, "large": 3e4}[kind]
    return _tensor(scale * draw.normal(*shape))


def with_cotangents(x: Tensors, case: Case) -> Tensors:
    """do and dht: both, one alone, or do at a single token."""
    do = _tensor(Draw(case.seed, "do").normal(*x.v.shape))
    N = case.B if case.lengths is None else len(case.lengths)
    states = x.h0 if x.h0 is not None else torch.zeros(N, x.v.shape[2], case.K, case.V)
    dht = _tensor(Draw(case.seed, "dht").normal(*states.shape))
    if case.cotangents == "state":
        do = torch.zeros_like(do)
    elif case.cotangents == "output":
        dht = torch.zeros_like(dht)
    elif case.cotangents in ("first", "last"):
        t = 0 if case.cotangents == "first" else do.shape[1] - 1
        do = do * (torch.arange(do.shape[1]) == t)[None, :, None, None]
        dht = torch.zeros_like(dht)
    return replace(x, do=do, dht=dht)


def _offsets(case: Case) -> list[int] | None:
    if case.lengths is None:
        return None
    return [0, *accumulate(length_of(n, DEFAULT_CHUNK) for n in case.lengths)]


def _tensor(x: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float64))
