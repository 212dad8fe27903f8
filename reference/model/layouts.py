"""Where each tensor of the original layout lies in a checkpoint, under whichever names it was saved.

| original name, below model.layers.i         | also found as                                                        |
|---------------------------------------------|----------------------------------------------------------------------|
| mlp.{gate,up,down}_proj.weight (dense)      | block_sparse_moe.…: transformers' default save renames it by mistake |
| block_sparse_moe.…                          | mlp.…                                                                |
| block_sparse_moe.experts.e.{w1,w3}.weight   | mlp.experts.gate_up_proj [E, 2 I, D]: w1 in rows 0..I, w3 in I..2 I  |
| block_sparse_moe.experts.e.w2.weight        | mlp.experts.down_proj [E, D, I]                                      |
| self_attn.{A_log, dt_bias, f_a_proj.…, ..}  | self_attn.forget_gate.…                                              |
| self_attn.{q,k,v}_conv1d.weight [D, 1, W]   | self_attn.conv1d.weight [3 D, 1, W], in this order                   |

The right column is what transformers 5.24 writes: the first row by `save_pretrained`, all of them with
`save_original_format=False`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .files import StoredTensor
from .names import EXPERT_NAME

Shape = tuple[int, ...]

CONVOLUTION = re.compile(r"(.*\.self_attn)\.([qkv])_conv1d\.weight")
FORGET_GATE = re.compile(r"(.*\.self_attn)\.((?:A_log|dt_bias|f_[ab]_proj\.).*)")
DENSE = re.compile(r"(.*\.layers\.\d+)\.mlp\.(.*)")


class Part(NamedTuple):
    """A tensor as a piece of a stored one: which, of what whole shape, and the cut that leaves it."""

    stored: str
    whole: Shape
    cut: tuple[int | slice, ...] = ()


class Layout(NamedTuple):
    """Parts by original name, and what does not fit: names missing and unexpected, shapes wanted and got."""

    parts: dict[str, Part]
    missing: list[str]
    unexpected: list[str]
    misshaped: dict[str, tuple[Shape, Shape]]  # by stored name


def match(wanted: Mapping[str, Shape], stored: Mapping[str, StoredTensor]) -> Layout:
    """Find every wanted tensor among the stored ones. `wanted` has the original names."""
    experts = _expert_counts(wanted)
    parts: dict[str, Part] = {}
    missing = []
    for name, shape in wanted.items():
        found = [part for part in _places(name, shape, experts) if part.stored in stored]
        if found:
            parts[name] = found[0]
        else:
            missing.append(name)
    unexpected = sorted(set(stored) - {part.stored for part in parts.values()})
    wholes = {part.stored: (part.whole, stored[part.stored].shape) for part in parts.values()}
    misshaped = {name: (want, got) for name, (want, got) in wholes.items() if want != got}
    return Layout(parts, missing, unexpected, misshaped)


def _places(name: str, shape: Shape, experts: Mapping[str, int]) -> Iterator[Part]:
    """Every place where a tensor may lie, the original one first."""
    yield Part(name, shape)
    if found := EXPERT_NAME.fullmatch(name):
        yield _expert(found[1], int(found[2]), found[3], shape, experts[found[1]])
    elif found := CONVOLUTION.fullmatch(name):
        yield _third("qkv".index(found[2]), f"{found[1]}.conv1d.weight", shape)
    elif found := FORGET_GATE.fullmatch(name):
        yield Part(f"{found[1]}.forget_gate.{found[2]}", shape)
    elif found := DENSE.fullmatch(name):
        yield Part(f"{found[1]}.block_sparse_moe.{found[2]}", shape)
    yield Part(name.replace(".block_sparse_moe.", ".mlp."), shape)


def _expert(prefix: str, expert: int, matrix: str, shape: Shape, experts: int) -> Part:
    """An expert's matrix in the stacks of all experts: gate rows first, then up rows, in one of them."""
    rows, columns = shape
    stacks = prefix.replace(".block_sparse_moe.", ".mlp.")
    if matrix == "w2":
        return Part(f"{stacks}.down_proj", (experts, rows, columns), (expert,))
    half = slice(0, rows) if matrix == "w1" else slice(rows, 2 * rows)
    return Part(f"{stacks}.gate_up_proj", (experts, 2 * rows, columns), (expert, half))


def _third(position: int, stored: str, shape: Shape) -> Part:
    """One of three equal blocks of rows."""
    rows, *rest = shape
    return Part(stored, (3 * rows, *rest), (slice(position * rows, (position + 1) * rows),))


def _expert_counts(names: Sequence[str] | Mapping[str, Shape]) -> dict[str, int]:
    """Experts of each sparse layer, by the layer's name."""
    counts: dict[str, int] = {}
    for name in names:
        if found := EXPERT_NAME.fullmatch(name):
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    return counts
