"""Where an error is: the first bad row, where else it is bad, and how it goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .adapter import PARAMETER_GRADIENTS
from .growth import fit_growth
from .problem import Problem
from .spread import Grid, channels_in_words, grid_of, heads_in_words, in_words, indices, tokens_in_words

PER_TOKEN = (
    "o",
    "dq",
    "dk",
    "dv",
    "dg",
    "dbeta",
)  # rows [B, T, heads]; of states [N, heads, K], of parameters [heads]
FROM_THE_END = ("dk", "dv", "dg", "dbeta")  # a backward walks from the last token to the first
SUBCHUNK = 16  # rows of a chunk that most kernels treat as one block


@dataclass(frozen=True)
class Place:
    """The first bad row of a result, where else it is bad, and how the error goes on.

    index         batch item, token and head; segment, head and key channel of a state; head of a parameter
    segment, token_of_segment, chunk, row, subchunk     of that token; None where there is none
    ratio         of the worst row; ratio_before: the worst row before the first bad one
    heads, segments     that have bad rows; a segment of a batch is a batch item
    spread        where the bad rows are, in words
    law, rate     how the error grows after the first bad row (`growth.Growth`); growth: in words
    """

    result: str
    index: tuple[int, ...]
    ratio: float
    bad_rows: int
    rows: int
    heads: tuple[int, ...] = ()
    segments: tuple[int, ...] = ()
    spread: tuple[str, ...] = ()
    segment: int | None = None
    token_of_segment: int | None = None
    chunk: int | None = None
    row: int | None = None
    subchunk: int | None = None
    ratio_before: float = 0.0
    law: str = "unknown"
    rate: float = 1.0
    growth: str = ""

    def __str__(self) -> str:
        if self.result in PARAMETER_GRADIENTS:
            return f"first bad row of {self.result}: head {self.index[0]}"
        if self.result not in PER_TOKEN:
            n, head, channel = self.index
            return f"first bad row of {self.result}: segment {n}, head {head}, key channel {channel}"
        b, t, head = self.index
        backwards = ", from the end" if self.result in FROM_THE_END else ""
        return f"first bad row of {self.result}{backwards}: batch {b}, token {t}{self._in_chunk()}, head {head}"

    def _in_chunk(self) -> str:
        if self.segment is None:
            return " (past the last segment)"
        parts = []
        if self.token_of_segment != self.index[1]:
            parts.append(f"token {self.token_of_segment} of segment {self.segment}")
        if self.chunk is not None:
            parts.append(f"chunk {self.chunk}, row {self.row}")
        if self.subchunk:
            parts.append(f"sub-chunk {self.subchunk}")
        return f" ({', '.join(parts)})" if parts else ""


def locate(ratio: Tensor, name: str, limit: float, problem: Problem, by_channel: Tensor | None = None) -> Place:
    """The first row over the limit: first in time where rows are tokens, else first in order.

    by_channel: each element's error over its row's envelope, [*rows, D], to tell channels apart.
    """
    ratio = torch.where(ratio.isnan(), torch.zeros_like(ratio), ratio)
    bad = ratio > limit
    places = {**dict.fromkeys(PER_TOKEN, _place_of_token), **dict.fromkeys(PARAMETER_GRADIENTS, _place_of_parameter)}
    place = places.get(name, _place_in_state)(ratio, bad, name, limit, problem)
    words = () if by_channel is None else channels_in_words(by_channel[bad], limit, name)
    return Place(**{**vars(place), "spread": (*place.spread, *words)})


def _place_of_parameter(ratio: Tensor, bad: Tensor, name: str, limit: float, problem: Problem) -> Place:
    heads = indices(bad)
    words = (heads_in_words(heads, bad.numel(), problem.case.group),)
    return Place(name, (heads[0],), ratio.max().item(), len(heads), bad.numel(), tuple(heads), spread=words)


def _place_in_state(ratio: Tensor, bad: Tensor, name: str, limit: float, problem: Problem) -> Place:
    N, HV, K = bad.shape
    segments, heads, channels = (indices(bad.any(dim)) for dim in _other_dims(bad))
    packed = problem.judge.offsets is not None
    words = [
        *([in_words(segments, N, "segment" if packed else "batch item")] if N > 1 else []),
        heads_in_words(heads, HV, problem.case.group),
        in_words(channels, K, "key channel"),
    ]
    index = tuple(bad.nonzero()[0].tolist())
    return Place(
        name, index, ratio.max().item(), int(bad.sum()), bad.numel(),
        tuple(heads), tuple(segments), tuple(words), segment=index[0],
    )  # fmt: skip


def _place_of_token(ratio: Tensor, bad: Tensor, name: str, limit: float, problem: Problem) -> Place:
    grid, backwards = grid_of(problem), name in FROM_THE_END
    t, b, head = first_in_time(bad, backwards)
    here, heads = bad.any(2), indices(bad.any(0).any(0))
    curve = onset_curve(ratio, grid, (b, t), backwards)
    growth = fit_growth(curve if limit else [])  # bits are right or wrong: there is nothing to grow
    earlier = ratio[:, t + 1 :] if backwards else ratio[:, :t]
    group = problem.case.group if ratio.shape[2] == problem.judge.v.shape[2] else 1
    segments = sorted(set(grid.segment[here].tolist()) - {-1})
    count = len(problem.judge.v) if problem.judge.offsets is None else len(problem.judge.offsets) - 1
    kind = "batch item" if problem.judge.offsets is None else "segment"
    words = [tokens_in_words(here, grid, (b, t)), heads_in_words(heads, ratio.shape[2], group)]
    words += [in_words(segments, count, kind)] if segments and count > 1 else []
    return Place(
        name, (b, t, head), ratio.max().item(), int(bad.sum()), bad.numel(), tuple(heads), tuple(segments),
        tuple(words), **_address(grid, b, t), ratio_before=earlier.max().item() if earlier.numel() else 0.0,
        law=growth.law, rate=growth.rate, growth=str(growth) if limit else "",
    )  # fmt: skip


def first_in_time(bad: Tensor, backwards: bool) -> tuple[int, int, int]:
    """Token, batch item and head of the first bad row; of the last token that has one, backwards."""
    by_time = bad.transpose(0, 1).nonzero()
    rows = by_time[by_time[:, 0] == by_time[:, 0].max()] if backwards else by_time
    t, b, head = rows[0].tolist()
    return t, b, head


def onset_curve(ratio: Tensor, grid: Grid, at: tuple[int, int], backwards: bool) -> list[float]:
    """The worst head's ratio, token by token, from the first bad token to the end of its segment."""
    b, t = at
    own = grid.segment[b] == grid.segment[b, t]
    worst = ratio[b].amax(-1)
    kept = (worst[: t + 1][own[: t + 1]].flip(0)) if backwards else worst[t:][own[t:]]
    return kept.tolist()


def _address(grid: Grid, b: int, t: int) -> dict[str, int | None]:
    segment, token = int(grid.segment[b, t]), int(grid.token[b, t])
    C = grid.chunk_size
    if segment < 0 or C is None:
        return {"segment": segment if segment >= 0 else None, "token_of_segment": token}
    row = token % C
    subchunk = row // SUBCHUNK if C > SUBCHUNK else None
    return {"segment": segment, "token_of_segment": token, "chunk": token // C, "row": row, "subchunk": subchunk}


def _other_dims(bad: Tensor) -> list[tuple[int, ...]]:
    return [tuple(other for other in range(bad.dim()) if other != dim) for dim in range(bad.dim())]
