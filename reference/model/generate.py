"""Generation: the prompts in pieces, then one token a sequence and step.

    cache = empty
    for each piece of the prompts:   hidden, cache = model(piece, cache)
    repeat:                          token = draw(lm_head(last hidden));  hidden, cache = model(token, cache)

Prompts may differ in length: they are packed, not padded. A sequence that has ended leaves the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .cache import Cache, empty_cache
from .model import KimiLinearForCausalLM
from .sampling import Sampling

PREFILL_PIECE = 512  # tokens of each prompt a call: bounds the [t, L] scores of MLA


class Next(NamedTuple):
    """What decides the next tokens: logits after each sequence's last token, and the cache behind them."""

    logits: Float[Tensor, "N vocab"]
    cache: Cache


def prefill(model: KimiLinearForCausalLM, prompts: Sequence[Sequence[int]], piece: int = PREFILL_PIECE) -> Next:
    """Read prompts of any lengths, at most `piece` tokens of each in a call.

    The pieces change nothing but rounding. Raises ValueError for no prompts, an empty one, or a piece below 1.
    """
    _check_prompts(prompts, piece)
    device = model.lm_head.weight.device
    cache = empty_cache(model.config, len(prompts), model.model.dtype, device)
    last: list[Tensor] = [torch.empty(0)] * len(prompts)
    for start in range(0, max(map(len, prompts)), piece):
        parts = [prompt[start : start + piece] for prompt in prompts]
        hidden, cache = packed_call(model, parts, cache)
        last = [x[-1] if len(x) else before for x, before in zip(hidden, last, strict=True)]
    return Next(model.lm_head(torch.stack(last)), cache)


def packed_call(
    model: KimiLinearForCausalLM, parts: Sequence[Sequence[int]], cache: Cache
) -> tuple[tuple[Float[Tensor, "t D"], ...], Cache]:
    """The next tokens of each sequence, of which some may have none: their hidden states, and the cache."""
    device = model.lm_head.weight.device
    lengths = torch.tensor([0, *map(len, parts)], device=device)
    tokens = torch.tensor([[token for part in parts for token in part]], dtype=torch.int64, device=device)
    out = model.model(tokens, cu_seqlens=lengths.cumsum(0), cache=cache)
    return out.x[0].split([len(part) for part in parts]), out.cache


def decode(model: KimiLinearForCausalLM, tokens: Int[Tensor, " N"], cache: Cache) -> Next:
    """One more token for every sequence, whatever their lengths."""
    out = model(tokens[:, None], cache=cache)
    return Next(out.logits[:, 0], out.cache)


@torch.no_grad()
def stream(
    model: KimiLinearForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    stop_ids: Sequence[int] | None = None,
    prefill_piece: int = PREFILL_PIECE,
) -> Iterator[dict[int, int]]:
    """Yield each step's new tokens as they are drawn: {index of the prompt: token}.

    A sequence ends with a stop token, which is yielded, or after max_new_tokens; the last step is the one
    that ends the last of them. sampling None is greedy; stop_ids None are those of the config. A generator
    on the model's device makes draws repeatable, for the same prompts in the same order.
    """
    draw = sampling or Sampling()
    stops = set(model.config.stop_ids if stop_ids is None else stop_ids)
    logits, cache = prefill(model, prompts, prefill_piece)
    live = list(range(len(prompts)))
    for step in range(max_new_tokens):
        tokens = draw(logits, generator)
        drawn = dict(zip(live, tokens.tolist(), strict=True))
        yield drawn
        going = [row for row, prompt in enumerate(live) if drawn[prompt] not in stops]
        if not going or step + 1 == max_new_tokens:
            return
        live = [live[row] for row in going]
        logits, cache = decode(model, tokens[going], cache.select(going))


def generate(
    model: KimiLinearForCausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    stop_ids: Sequence[int] | None = None,
    prefill_piece: int = PREFILL_PIECE,
) -> list[list[int]]:
    """The new tokens of each prompt, its stop token included: `stream`, collected."""
    texts: list[list[int]] = [[] for _ in prompts]
    steps = stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        generator=generator,
        stop_ids=stop_ids,
        prefill_piece=prefill_piece,
    )
    for step in steps:
        for prompt, token in step.items():
            texts[prompt].append(token)
    return texts


def _check_prompts(prompts: Sequence[Sequence[int]], piece: int) -> None:
    if not prompts or not all(len(prompt) for prompt in prompts):
        lengths = [len(prompt) for prompt in prompts]
        raise ValueError(f"prompts must be one or more of one or more tokens; got lengths {lengths}")
    if piece < 1:
        raise ValueError(f"prefill_piece must be 1 or more tokens; got {piece}")
