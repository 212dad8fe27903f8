"""The case catalogue: what to ask a KDA kernel, and why. Families:

    exact      integers in every format: judged bit by bit
    shape      lengths around every edge of a chunk, odd and unequal channels, heads in groups
    packing    segments that are empty, of one token, cut at, before and after a chunk's edge
    gate       from none to total forgetting, by token, channel and head
    strength   write strengths 0, 1, 2 and between
    keys       from random to identical: where the triangular inverse is put to the test
    values     scales, needles, states
    gradients  the hard cases again, for a backward

A case stays as long as it is alone in seeing some bug (`kimi-linear conformance score` lists those that are
not). An id never changes its meaning.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .cases import Case

TT_INVERSE = "tt-metal #54813"
VLLM_LAYOUT = "vllm #41292"
FLA_EMPTY = "FlashKDA #24"
FLA_CHUNK_SIZE = "flash-linear-attention #876"
FLA_MASK_K = "flash-linear-attention #1134"
FLA_HEADS = "flash-linear-attention #1115"
FLA_LEAK = "flash-linear-attention #1184"
NPU_GATE = "flash-linear-attention-npu #448"
CULA_TAIL = "cuLA #43"
HF_GRADIENT = "transformers #48455"
EXECUTORCH_GATE = "executorch #21417"
MLX_BIAS = "mlx-lm #1792"
GYM_DIAGONAL = "attention-gym #461"
GYM_RANGE = "attention-gym #464"
ASCEND_UPPER = "tilelang-ascend #1460"
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


def gate(id: str, comment: str, links: tuple[str, ...] = (), quick: bool = False, **knobs: Any) -> Case:
    """A gate of `draws.GATES` with the family's usual knobs."""
    flags = ("quick",) if quick else ()
    effect = "inf or NaN, or channels that forget too much or too little"
    return Case(f"gate.{id}", "gate", comment, effect, links, flags, T="2C+1", gate=knobs.pop("gate", id), **knobs)


GATE = [
    gate("zero", "nothing is forgotten"),
    gate("slow", "decays of a long memory", quick=True),
    gate("typical", "what published tests draw"),
    gate("strong", "a mean of -10", (EXECUTORCH_GATE,), quick=True),
    gate("bound", "the lower bound of the bounded gate at every token", (NPU_GATE,), quick=True),
    gate("minus30", "past any lower bound", (EXECUTORCH_GATE, ASCEND_UPPER)),
    gate("dead", "every decay is 0"),
    gate("channel_ramp", "each channel its own gate", (MLX_BIAS,), quick=True),
    gate("half_dead", "dead channels between living ones"),
    gate("half_strong", "strong channels between slow ones", quick=True),
    gate("edge_resets", "all is forgotten at a chunk's first token"),
    gate("edge_resets_late", "all is forgotten at a chunk's second token"),
    gate("edge_resets_early", "all is forgotten at a chunk's last token"),
    gate("spikes", "one spike every seven tokens"),
    gate("token_ramp", "a gate that grows along the text"),
    gate("per_head", "heads that forget at different speed", (FLA_HEADS,), quick=True),
]
INFINITE = Case(
    "gate.minus_infinity",
    "gate",
    "-inf, which this repository defines and others need not",
    flags=("acceptable",),
    gate="minus_infinity",
    T="C+5",
)

STRENGTH = [
    Case("strength.zero", "strength", "nothing is written: the state only decays", beta="zero"),
    Case("strength.one", "strength", "each write replaces", beta="one", keys="runs"),
    Case("strength.two", "strength", "each write reflects", beta="two", flags=("quick",), gate="slow"),
    Case("strength.up_to_two", "strength", "negative eigenvalues", beta="up_to_two"),
    Case("strength.mixed", "strength", "0, 1/2, 1 and 2", beta="mixed"),
    Case("strength.alternating", "strength", "every other token writes", beta="alternating"),
    Case(
        "strength.per_head", "strength", "heads that write at different strength", beta="per_head", flags=("quick",)
    ),
]

HARD_KEYS: dict[str, Any] = {"gate": "slow", "beta": "high", "T": "2C+1", "links": (TT_INVERSE,)}
KEY = [
    Case("keys.random", "keys", "what published tests draw", gate="slow"),
    Case("keys.positive", "keys", "positive entries: cosines near 0.75", **HARD_KEYS),
    *[
        Case(
            f"keys.cosine_{cosine}",
            "keys",
            "keys that nearly repeat, as runs of like tokens do",
            "a wrong triangular inverse: a layer's output is noise",
            keys=f"cosine_{cosine}",
            flags=("quick",) if cosine in ("0.9", "0.99") else (),
            **HARD_KEYS,
        )
        for cosine in ("0.9", "0.97", "0.99", "0.999")
    ],
    Case("keys.duplicate", "keys", "one key for all tokens", keys="duplicate", **HARD_KEYS),
    Case(
        "keys.flipped",
        "keys",
        "one key and its negative, beta = 2",
        keys="flipped",
        flags=("quick",),
        **{**HARD_KEYS, "beta": "two"},
    ),
    Case("keys.runs", "keys", "every token eight times", keys="runs", flags=("quick",), **HARD_KEYS),
    Case("keys.one_hot", "keys", "an exact lookup table", keys="one_hot", gate="slow"),
    Case("keys.tiny", "keys", "keys of length 1e-3", keys="tiny"),
    Case("keys.zero", "keys", "padding keys", keys="zero"),
    Case("keys.long", "keys", "keys that are not normalised, beta |k|^2 below 2", keys="long"),
]

VALUE = [
    Case("values.read_out", "values", "v = 0: the state is only read", values="zero", gate="slow", beta="zero"),
    Case("values.no_state", "values", "no initial state", state="none"),
    Case("values.zero_state", "values", "an initial state of zeros", state="zero"),
    Case("values.large", "values", "values of 1e4", values="large", flags=("beyond_fp16",)),
    Case("values.small", "values", "values of 1e-4", values="small", state="none"),
    Case("values.needle", "values", "one token 1e5 larger", values="needle", flags=("beyond_fp16",), state="none"),
    Case("values.per_head", "values", "heads of scale 1 to 1e-7", values="per_head", group=8, state="none"),
    Case("values.offset", "values", "values that are not centred", values="offset", keys="positive"),
    Case(
        "values.large_state",
        "values",
        "a state near half precision's end",
        state="large",
        gate="slow",
        links=(GYM_RANGE,),
        flags=("beyond_fp16", "quick"),
    ),
    Case(
        "values.square_state",
        "values",
        "K = V with a state that is not symmetric",
        K=16,
        V=16,
        gate="slow",
        links=(VLLM_LAYOUT,),
        flags=("quick",),
    ),
    Case("values.scale", "values", "a scale other than K ** -0.5", scale=0.7, flags=("quick",)),
]

CHUNK_OPTIONS = replace(SHAPE[8], id="shape.three_chunks", T="3C+2", links=(FLA_CHUNK_SIZE,), flags=("quick",))


def gradients(id: str, comment: str, links: tuple[str, ...] = (), quick: bool = False, **knobs: Any) -> Case:
    """A case for the backward, shorter than those of the forward."""
    flags = ("gradients", "quick") if quick else ("gradients",)
    knobs = {"T": "C+7", "K": 12, "V": 9, **knobs}
    return Case(f"gradients.{id}", "gradients", comment, "training diverges, or drifts", links, flags, **knobs)


GRADIENTS = [
    gradients("mild", "mild gates, output and state", quick=True),
    gradients("typical", "what published tests draw", gate="typical"),
    gradients("bound", "a constant gate of -5", (HF_GRADIENT, GYM_DIAGONAL), quick=True, gate="bound"),
    gradients("half_strong", "strong channels between slow ones", (HF_GRADIENT,), gate="half_strong"),
    gradients("edge_resets", "all is forgotten at a chunk's edge", gate="edge_resets"),
    gradients("duplicate_keys", "keys of cosine 0.97", gate="slow", beta="high", keys="cosine_0.97"),
    gradients("runs", "every token eight times", gate="slow", keys="runs"),
    gradients("state_only", "only the final state has a gradient", cotangents="state", quick=True),
    gradients("output_only", "only the output has a gradient", cotangents="output"),
    gradients("first_token", "a gradient at the first token", cotangents="first"),
    gradients("last_token", "a gradient at the last token", cotangents="last"),
    gradients("beta_two", "negative eigenvalues", beta="up_to_two"),
    gradients("groups", "value heads that share a key head", group=4, H=2, T="C/4+5"),
    gradients("packed", "packed segments and rows past the end", lengths=("C+3", 0, 1, 9), past_end=3, quick=True),
]

CASES: list[Case] = [
    *EXACT, *SHAPE, CHUNK_OPTIONS, *PACKING, *GATE, INFINITE, *STRENGTH, *KEY, *VALUE, *GRADIENTS
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
