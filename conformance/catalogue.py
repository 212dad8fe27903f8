"""The case catalogue: what to ask a KDA kernel, and why. Families:

    exact      integers in every format: judged bit by bit
    shape      lengths around every edge of a chunk, odd and unequal channels, heads in groups
    packing    segments that are empty, of one token, cut at, before and after a chunk's edge
    gate       from none to total forgetting, by token, channel and head
    strength   write strengths 0, 1, 2 and between
    keys       from random to identical: where the triangular inverse is put to the test
    values     scales, needles, states
    gradients  the hard cases again, for a backward
    front      a kernel's own front end: normalisation, gate and beta activations, from raw projections
    front_gradients    a backward through that: of raw projections, A_log and dt_bias

A case stays as long as it is alone in seeing some bug (`kimi-linear conformance score` lists those that are
not). An id never changes its meaning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .cases import Case
from .front_cases import FRONT, FRONT_GRADIENTS
from .number_cases import GATE, GRADIENTS, INFINITE, KEY, STRENGTH, VALUE

FLA_EMPTY = "FlashKDA #24"
FLA_CHUNK_SIZE = "flash-linear-attention #876"
FLA_MASK_K = "flash-linear-attention #1134"
FLA_HEADS = "flash-linear-attention #1115"
FLA_LEAK = "flash-linear-attention #1184"
CULA_TAIL = "cuLA #43"
FLASHINFER_VARLEN = "flashinfer #3536"
NPU_PAST_END = "vllm-ascend #15553"

INTEGERS: dict[str, Any] = {
    "gate": "keep_or_forget",
    "keys": "signed_one_hot",
    "queries": "small_integers",
    "values": "small_integers",
    "beta": "bits",
    "state": "small_integers",
    "scale": 0.25,
    "flags": ("exact", "quick"),
    "effect": "a wrong index, mask or factor; no rounding is involved",
}

EXACT = [
    Case("exact.dense", "exact", "two batch items, value heads in groups", B=2, T="2C+5", H=2, K=16, V=5, **INTEGERS),
    Case("exact.square", "exact", "K = V hides a transposed state; values do not", T="C+3", K=16, V=16, **INTEGERS),
    Case("exact.wide", "exact", "more value than key channels, no multiple of 16", T=37, K=12, V=40, **INTEGERS),
    Case(
        "exact.packed",
        "exact",
        "segments empty, of one token, ragged and whole, and rows past the end",
        lengths=("C+3", 0, 1, "C", 0, "C-1", 7),
        past_end=3,
        K=16,
        V=5,
        links=(FLA_EMPTY, FLA_LEAK, NPU_PAST_END),
        **INTEGERS,
    ),
    Case("exact.one_channel", "exact", "K = 1: numbers for keys and gates", T="C+1", H=2, K=1, V=9, **INTEGERS),
    Case("exact.one_token", "exact", "T = 1", B=2, T=1, K=16, V=5, **INTEGERS),
    Case(
        "exact.halves",
        "exact",
        "beta = 1/2 halves what a key held; each key comes three times, so few bits are enough",
        T=36,
        K=16,
        V=5,
        **{**INTEGERS, "gate": "zero", "keys": "cycle", "beta": "halves"},
    ),
    Case(
        "exact.reflections",
        "exact",
        "beta in {0, 1/2, 1, 2}: 2 reflects a key's row",
        T=36,
        K=16,
        V=5,
        **{**INTEGERS, "keys": "cycle", "beta": "mixed"},
    ),
    Case(
        "exact.long_sums",
        "exact",
        "positive numbers of six bits, sums of fifteen: exact only where sums are in fp32",
        T="C+5",
        K=16,
        V=12,
        **{
            **INTEGERS,
            "queries": "five_bits",
            "values": "six_bits",
            "state": "six_bits",
            "flags": ("exact", "long_sums", "quick"),
            "effect": "sums kept in a short format: every output is off by a few of its roundings",
        },
    ),
]

LENGTHS = ("C/4-1", "C/4", "C/4+1", "C-1", "C", "C+1", "2C-1", "2C", "2C+1", 1, 2, 61)
SHAPE = [
    *[
        Case(f"shape.T={T}", "shape", "a length near an edge", T=T, links=(CULA_TAIL,), effect="a wrong tail")
        for T in LENGTHS
    ],
    Case("shape.T=0", "shape", "no tokens: the state passes", T=0, effect="a crash, or a state of garbage"),
    Case("shape.K=60", "shape", "channels that fill no tile", K=60, V=36, links=(FLA_MASK_K,), flags=("quick",)),
    Case("shape.K=7", "shape", "an odd number of channels", K=7, V=3),
    Case("shape.K=40,V=8", "shape", "a wide key and a narrow value", K=40, V=8, flags=("quick",)),
    Case("shape.batch", "shape", "a batch of five", B=5, T="C/4+3"),
    Case("shape.groups", "shape", "eight value heads a key head", group=8, K=12, V=9, links=(FLA_HEADS,)),
    Case("shape.no_groups", "shape", "as many value heads as key heads", H=3, group=1, B=2),
]


def packed(id: str, comment: str, *lengths: int | str, past_end: int = 0, links: tuple[str, ...] = ()) -> Case:
    """A packed case with the family's usual knobs."""
    effect = "one user's text leaks into another's, or a state is garbage"
    return Case(
        f"packing.{id}",
        "packing",
        comment,
        effect,
        links,
        lengths=lengths,
        past_end=past_end,
        K=16,
        V=12,
        gate="slow",
    )


PACKING = [
    packed("empty_first", "an empty segment first", 0, "C", 5),
    packed("empty_middle", "an empty segment in the middle", 9, 0, "C+1", links=(FLA_EMPTY,)),
    packed("empty_last", "an empty segment last", 9, "C", 0, links=(FLA_EMPTY,)),
    packed("all_empty", "nothing but empty segments, and capacity after them", 0, 0, past_end=4),
    packed("single_tokens", "segments of one token", *[1] * 9),
    packed("edges", "cuts on, before and after a chunk's edge", "C", "C-1", "C+1", links=(FLASHINFER_VARLEN,)),
    packed("past_end", "rows past the last segment", "C-3", 4, past_end=9, links=(NPU_PAST_END,)),
    packed("many", "forty short segments", *[1, 2, 3, 5] * 10),
]
PACKING[1] = replace(PACKING[1], flags=("quick",))

CHUNK_OPTIONS = replace(SHAPE[8], id="shape.three_chunks", T="3C+2", links=(FLA_CHUNK_SIZE,), flags=("quick",))

CASES: list[Case] = [
    *EXACT, *SHAPE, CHUNK_OPTIONS, *PACKING, *GATE, INFINITE, *STRENGTH, *KEY, *VALUE, *GRADIENTS, *FRONT,
    *FRONT_GRADIENTS,
]  # fmt: skip


def by_id(id: str) -> Case:
    """The case of that id."""
    for case in CASES:
        if case.id == id:
            return case
    raise KeyError(f"no case {id}; `kimi-linear conformance list` shows them all")


def subset(full: bool) -> list[Case]:
    """All cases, or those that see most bugs in least time."""
    return [case for case in CASES if full or case.has("quick")]
