"""Cases about a kernel's own front end: what it makes of raw projections, and of their gradients.

A raw 0 is no gate of 0, so a padded row has to be treated as such after the activation; eps stands inside the root;
the rate multiplies the bias too in the bounded gate, which is no clamp of the softplus gate.
"""

from __future__ import annotations

from typing import Any

from .cases import Case

LAPACK_EPS = "Rapid-MLX #1817"
MLX_BIAS = "mlx-lm #1792"
SGLANG_SIGMOID = "sglang #17508"
TOKENSPEED_CLAMP = "tokenspeed #847"
LATTICE_RATE = "lattice #314"
FLA_RATE = "flash-linear-attention #1007"
FLASHINFER_SPACE = "flashinfer #2490"
FLA_HEADS = "flash-linear-attention #1115"
MAMBA_PADDING = "mamba #368"
BIT_SOFTPLUS = "1bit-MONSTER #628"
FLASH_QLA = "FlashQLA #28"

EFFECTS = {
    "l2norm": "keys of another length: each write is too weak or too strong",
    "softplus": "memories fade at another speed, or never",
    "bounded": "memories fade at another speed, or never",
    "beta": "writes of another strength; benchmarks may not show it, log-probabilities do",
    "whole": "a model that was trained with another layer",
}
UNTRAINED = "rates, biases and projections train on noise, or not at all, while the output is right"


def front(id: str, subject: str, comment: str, *links: str, quick: bool = False, **knobs: Any) -> Case:
    """A case about one step of a front end, or the whole."""
    flags = ("quick",) if quick else ()
    knobs = {"T": "C/2+5", "K": 20, "V": 12, "queries": "raw", "keys": "raw", **knobs}
    return Case(f"front.{id}", "front", comment, EFFECTS[subject], links, flags, front=subject, **knobs)


def both_gates(id: str, comment: str, *links: str, quick: bool = False, **knobs: Any) -> list[Case]:
    """A case for each form of the gate."""
    return [
        front(f"{form}{id}", form, comment, *links, quick=quick, **{"rates": "typical", **knobs})
        for form in ("softplus", "bounded")
    ]


FRONT = [
    *both_gates("", "raw gates and parameters as models have them", MLX_BIAS, FLASHINFER_SPACE),
    *both_gates("_raw_zero", "a raw gate of 0 decays all the same", MAMBA_PADDING, quick=True,
                raw_gate="zero", bias="zero"),
    *both_gates("_sweep", "raw gates from -8 to 8", TOKENSPEED_CLAMP, quick=True, raw_gate="wide", rates="mild"),
    *both_gates("_saturated", "raw gates of -1e4, -30, 0 and 30", raw_gate="saturated", rates="mild", bias="zero"),
    front(
        "softplus_faint",
        "softplus",
        "decays of 1e-8 times a large rate are not 0",
        raw_gate="faint",
        rates="large",
        bias="zero",
        quick=True,
    ),
    front("softplus_high", "softplus", "exp(89) is inf in fp32; its logarithm is 89", BIT_SOFTPLUS,
          raw_gate="high", rates="gentle", quick=True),
    front(
        "softplus_overflow",
        "softplus",
        "exp(90) is inf in fp32, and times a decay of nearly 0 it is nearly 0",
        LATTICE_RATE,
        FLA_RATE,
        raw_gate="underflow",
        rates="overflow",
        bias="zero",
        quick=True,
    ),
    front("softplus_against_rate", "softplus", "exp(90) is inf in fp32, and times exp(-90), which has lost digits, 1",
          LATTICE_RATE, raw_gate="against_90", rates="ninety", bias="zero"),
    front("bounded_large_rate", "bounded", "a step from no decay to the bound", rates="large", bias="low"),
    front("beta", "beta", "logits as models have them", SGLANG_SIGMOID),
    front("beta_extreme", "beta", "logits of -20, 0 and 20", SGLANG_SIGMOID, logits="extreme", quick=True),
    front("beta_zero", "beta", "a logit of 0 writes half", logits="zero"),
    front("l2norm", "l2norm", "q and k of any length"),
    front("l2norm_tiny", "l2norm", "q and k of length 1e-3: eps is half of what is below the root", LAPACK_EPS,
          keys="tiny", queries="tiny"),
    front("l2norm_faint", "l2norm", "q and k of length 1e-6: eps is all there is", LAPACK_EPS,
          keys="faint", queries="faint"),
    front("l2norm_zero", "l2norm", "q and k of 0 stay 0, and the state only decays", keys="zero", queries="zero",
          rates="mild"),
    front("l2norm_unequal", "l2norm", "lengths from 0 to 100 beside each other", LAPACK_EPS,
          keys="unequal", queries="unequal", quick=True),
    front("whole", "whole", "all steps at once, over more than a chunk", T="C+5"),
    front("whole_groups", "whole", "rates and biases of eight value heads a key head", FLA_HEADS, group=8, K=12),
    front("whole_packed", "whole", "packed segments: the raw rows of neighbours and of padding are not read as 0",
          lengths=("C/2+3", 0, 1, 9), past_end=3, quick=True),
]  # fmt: skip


def backward(id: str, subject: str, comment: str, *links: str, quick: bool = False, **knobs: Any) -> Case:
    """A case about a backward through one step of a front end, or the whole."""
    flags = ("gradients", "quick") if quick else ("gradients",)
    flags = ("beyond_fp16", *flags) if knobs.pop("beyond_fp16", False) else flags
    knobs = {"T": "C/4+5", "K": 20, "V": 9, "queries": "raw", "keys": "raw", **knobs}
    return Case(f"front_gradients.{id}", "front_gradients", comment, UNTRAINED, links, flags, front=subject, **knobs)


FRONT_GRADIENTS = [
    backward("softplus", "softplus", "rates and biases as models have them, summed over a batch", FLASH_QLA, B=3),
    backward("bounded", "bounded", "rates and biases as models have them, summed over a batch", FLASH_QLA, B=3),
    backward("softplus_sweep", "softplus", "raw gates from -8 to 8: both ends of a softplus's slope", raw_gate="wide",
             rates="mild"),
    backward("bounded_sweep", "bounded", "raw gates from -8 to 8: a slope that comes and goes", raw_gate="wide",
             rates="mild"),
    backward("softplus_high_rate", "softplus", "exp(80) times a slope of nearly 0", FLA_RATE, raw_gate="underflow",
             rates="high", bias="zero", group=4),
    backward("softplus_against_rate", "softplus", "exp(90), inf in fp32, times a slope of exp(-90)", FLA_RATE,
             raw_gate="against_90", rates="ninety", bias="zero", group=4),
    backward("softplus_overflow", "softplus", "exp(90), inf in fp32, times a slope of nearly 0, or one that is 0",
             FLA_RATE, raw_gate="underflow", rates="overflow", bias="zero", group=4),
    backward("beta", "beta", "logits as models have them"),
    backward("beta_extreme", "beta", "logits of -20, 0 and 20: a slope of 2e-9 is not 0", logits="extreme"),
    backward("l2norm", "l2norm", "q and k of any length: what points along them has no gradient"),
    backward("l2norm_tiny", "l2norm", "q and k of length 1e-3: with eps in it, what points along them has one",
             keys="tiny", queries="tiny"),
    backward("l2norm_unequal", "l2norm", "lengths from 0 to 100 beside each other", keys="unequal", queries="unequal",
             beyond_fp16=True),
    backward("whole", "whole", "all steps at once, over more than a chunk", T="C+7", K=12, bias="low"),
    backward("whole_batch", "whole", "all steps at once, in a batch of two", quick=True, B=2, group=4, bias="low"),
    backward("whole_groups", "whole", "eight value heads a key head, and an odd number of channels", FLA_HEADS,
             H=2, group=8, K=7, V=3, bias="low"),
    backward("whole_packed", "whole", "packed segments: no rate learns from their neighbours or from padding",
             FLA_RATE, bias="low", lengths=("C/4+3", 0, 1, 9), past_end=3),
    backward("whole_state", "whole", "only the final state has a gradient", cotangents="state", bias="low"),
]  # fmt: skip
