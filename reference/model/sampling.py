"""From logits to the next token: the most likely one, or a draw from the likeliest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..contract import compute_dtype


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    temperature   logits are divided by it; 0 takes the most likely token, the lowest id on a tie
    top_p         only the fewest likeliest tokens whose probabilities reach it can be drawn; 1 keeps all
    """

    temperature: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a finite positive number; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p}")

    def __call__(
        self, logits: Float[Tensor, "N vocab"], generator: torch.Generator | None = None
    ) -> Int[Tensor, " N"]:
        """One token id a row."""
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = torch.softmax(logits.to(compute_dtype(logits.dtype)) / self.temperature, dim=-1)
        kept = torch.where(in_nucleus(probabilities, self.top_p), probabilities, 0.0)
        return torch.multinomial(kept, 1, generator=generator)[:, 0]


def in_nucleus(probabilities: Float[Tensor, "N vocab"], top_p: float) -> Bool[Tensor, "N vocab"]:
    """The fewest likeliest tokens of each row whose probabilities sum to at least top_p: never none.

    A token is in if those before it, in falling order, do not reach top_p yet.
    """
    order = probabilities.argsort(dim=-1, descending=True, stable=True)
    falling = probabilities.gather(-1, order)
    before = falling.cumsum(-1) - falling
    return (before < top_p).gather(-1, order.argsort(-1))
