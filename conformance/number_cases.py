"""Cases about numbers: gates, write strengths, keys, values, and the hardest of them for a backward."""

from __future__ import annotations

from typing import Any

from .cases import Case

TT_INVERSE = "tt-metal #54813"
VLLM_LAYOUT = "vllm #41292"
FLA_HEADS = "flash-linear-attention #1115"
NPU_GATE = "flash-linear-attention-npu #448"
HF_GRADIENT = "transformers #48455"
EXECUTORCH_GATE = "executorch #21417"
MLX_BIAS = "mlx-lm #1792"
GYM_DIAGONAL = "attention-gym #461"
GYM_RANGE = "attention-gym #464"
ASCEND_UPPER = "tilelang-ascend #1460"


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
