"""Logits beside other logits: transformers' for the same files, or those that another machine recorded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from .verify_model import transformers_logits

TRANSFORMERS = "transformers"  # what --against calls it


class Comparison(NamedTuple):
    """How two models' logits for the same tokens differ."""

    largest: float  # |a - b| anywhere
    at: tuple[int, int]  # token of the text, token of the vocabulary
    rms: float  # of the reference's logits
    disagree: int  # tokens of the text whose likeliest next token differs

    def __str__(self) -> str:
        token, entry = self.at
        return (
            f"largest difference {self.largest:.3g} at token {token}, vocabulary entry {entry}; "
            f"rms of the logits {self.rms:.3g}; likeliest next token differs at {self.disagree} tokens"
        )


def compare(got: Float[Tensor, "1 T vocab"], want: Float[Tensor, "1 T vocab"]) -> Comparison:
    """Compare logits of one text; NaN in either counts as a difference of inf."""
    if got.shape != want.shape:
        raise ValueError(f"--against must hold logits {list(got.shape)}; got {list(want.shape)}")
    difference = (got[0].double() - want[0].double()).abs().nan_to_num(nan=torch.inf)
    largest = int(difference.argmax())
    at = (largest // difference.shape[1], largest % difference.shape[1])
    disagree = int((got[0].argmax(-1) != want[0].argmax(-1)).sum())
    return Comparison(difference.max().item(), at, want.double().square().mean().sqrt().item(), disagree)


def reference_logits(against: str, folder: Path, ids: Int[Tensor, "1 T"]) -> Float[Tensor, "1 T vocab"]:
    """The logits that --against names, for these very tokens."""
    if against == TRANSFORMERS:
        return transformers_logits(folder, ids)
    try:
        saved = load_file(against)
    except (SafetensorError, OSError) as error:
        want = f"{TRANSFORMERS}, or a file that --out wrote"
        raise ValueError(f"--against must be {want}; got {against} ({error})") from None
    if not {"input_ids", "logits"} <= saved.keys():
        raise ValueError(f"--against must hold input_ids and logits; got {', '.join(sorted(saved)) or 'nothing'}")
    if not torch.equal(saved["input_ids"], ids):
        raise ValueError(f"--against must be of the same {ids.shape[1]} tokens; got others: {against}")
    return saved["logits"]
