"""Which tokens, heads, segments and channels an error spreads to, in words.

A pattern is a set of tokens that kernels treat alike: a chunk, a row of each chunk, a ragged tail. The simplest one
that agrees with the bad tokens is told; a kernel's author knows which loop or tile it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .problem import Problem

MATCH = 0.9  # of a pattern with the bad tokens (F1) from which it is told
PERIODS = (2, 4, 8, 16, 32)  # tokens


@dataclass(frozen=True)
class Grid:
    """What each token of [B, T] is: its segment (-1 past the last), its place in it, and that segment's length."""

    segment: Tensor
    token: Tensor
    length: Tensor
    chunk_size: int | None


def grid_of(problem: Problem) -> Grid:
    """The grid of a problem's tokens."""
    x, C = problem.judge, problem.contract.chunk_size
    B, T = x.v.shape[:2]
    t = torch.arange(T).expand(B, T)
    if x.offsets is None:
        return Grid(torch.arange(B)[:, None].expand(B, T), t, torch.full((B, T), T), C)
    offsets = torch.tensor(x.offsets)
    segment = torch.searchsorted(offsets[1:].contiguous(), t.contiguous(), right=True)
    inside = segment < len(offsets) - 1
    known = torch.where(inside, segment, 0)
    starts = torch.where(inside, offsets[known], offsets[-1])
    lengths = torch.where(inside, offsets[known + 1] - offsets[known], T - offsets[-1])
    return Grid(torch.where(inside, segment, -1), t - starts, lengths, C)


def tokens_in_words(bad: Tensor, grid: Grid, first: tuple[int, int]) -> str:
    """The simplest pattern that agrees with bad tokens [B, T], among segments that have some."""
    if (grid.segment[bad] < 0).all():
        return "rows past the last segment alone"
    touched = torch.isin(grid.segment, grid.segment[bad].unique()) & (grid.segment >= 0)
    best, words = MATCH, f"{int(bad.sum())} of {int(touched.sum())} tokens, in no simple pattern"
    for name, pattern in _patterns(bad, grid, first):
        pattern = pattern & touched
        match = 2 * (bad & pattern).sum().item() / max((bad.sum() + pattern.sum()).item(), 1)
        if match > best:
            best, words = match, name
    return words


def _patterns(bad: Tensor, grid: Grid, first: tuple[int, int]) -> Iterator[tuple[str, Tensor]]:
    token, last = grid.token, grid.length - 1
    start = int(token[first])
    yield "every token", token >= 0
    yield f"token {start} alone", token == start
    yield "the first token alone", token == 0
    yield "the last token alone", token == last
    if grid.chunk_size is not None and (grid.length[bad] > grid.chunk_size).any():
        yield from _chunk_patterns(bad, grid, first, grid.chunk_size)
    yield f"every token from {start} on", token >= start
    yield f"every token up to {start}", token <= start
    for period in PERIODS:
        yield f"every {_ordinal(period)} token", token % period == start % period


def _chunk_patterns(bad: Tensor, grid: Grid, first: tuple[int, int], C: int) -> Iterator[tuple[str, Tensor]]:
    chunk, row, last = grid.token // C, grid.token % C, (grid.length - 1) // C
    n, rows = int(chunk[first]), row[bad]
    low, high = int(rows.min()), int(rows.max())
    yield "the last chunk alone", chunk == last
    yield "a ragged last chunk alone", (chunk == last) & (grid.length % C != 0)
    yield f"chunk {n} alone", chunk == n
    yield "every chunk but the first", chunk > 0
    yield f"every chunk from {n} on", chunk >= n
    yield f"row {low} of each chunk", row == low
    yield f"each chunk from row {low} on", row >= low
    yield f"each chunk up to row {high}", row <= high
    yield f"rows {low} to {high} of each chunk", (row >= low) & (row <= high)
    yield f"each chunk but the first from row {low} on", (row >= low) & (chunk > 0)
    yield f"row {low} of each chunk but the first", (row == low) & (chunk > 0)
    for step in PERIODS:
        yield f"every {_ordinal(step)} row of a chunk, from row {low}", (row - low) % step == 0


def heads_in_words(heads: Sequence[int], total: int, group: int) -> str:
    """Which heads are bad; value heads by the key head that they share, where that says it."""
    within = {head % group for head in heads}
    owners = sorted({head // group for head in heads})
    if group > 1 and len(heads) < total and total > group:
        if len(within) == 1 and len(heads) == total // group:
            return f"value head {within.pop()} of each group"
        if len(heads) == len(owners) * group:
            return f"all value heads of key head {_listed(owners)}"
    return in_words(heads, total, "head")


def in_words(found: Sequence[int], total: int, kind: str) -> str:
    """Which of so many things: all, one alone, a range, every second, or a list."""
    if len(found) == total:
        return f"all {kind}s" if total > 1 else f"the only {kind}"
    if len(found) == 1:
        return f"{kind} {found[0]} alone"
    if list(found) == list(range(found[0], found[-1] + 1)):
        return f"{kind}s {found[0]} to {found[-1]}"
    if list(found) == list(range(found[0], total, found[1] - found[0])):
        return f"every {_ordinal(found[1] - found[0])} {kind} from {found[0]} on"
    return f"{kind}s {_listed(found)}"


def channels_in_words(errors: Tensor, limit: float, name: str) -> tuple[str, ...]:
    """Which channels carry the error of the bad rows, where it is a part of them in one piece."""
    D = errors.shape[-1]
    size = errors.square().mean(0).sqrt()
    found = indices(~(size <= max(limit, 1.0) / 2))
    words = in_words(found, D, "channel") if found else ""
    told = D > 1 and len(found) < D and ("alone" in words or " to " in words or words.startswith("every"))
    kind = "key " if name in ("dq", "dk", "dg", "ddt_bias") else "value "
    return (words.replace("channel", kind + "channel"),) if told else ()


def _ordinal(n: int) -> str:
    return {2: "second", 3: "third"}.get(n, f"{n}th")


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    shown = ", ".join(map(str, numbers[:most]))
    return f"{shown} and {len(numbers) - most} more" if len(numbers) > most else shown


def indices(mask: Tensor) -> list[int]:
    """Where a mask is true."""
    return mask.nonzero().flatten().tolist()
