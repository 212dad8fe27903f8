"""`kimi-linear logits` and `kimi-linear generate`: a checkpoint on a text."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor

from ..reference.chunked import chunk_kda
from ..reference.model.checkpoint import load_model
from ..reference.model.generate import stream
from ..reference.model.kda import KDAOperator
from ..reference.model.sampling import Sampling
from ..reference.model.stream import stream_model
from ..reference.model.tokenizer import Tokenizer, load_tokenizer
from ..reference.naive import recurrent_kda
from .common import CheckpointFolder, DType, RouterWeightsOption, plain_errors, table_console
from .compare import compare, reference_logits

LONGEST_CHARACTER = 4  # bytes of UTF-8, so tokens of a byte-level vocabulary at most
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
CONTROLS = {  # what a model writes must not command the terminal
    code: UNFINISHED for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"
}

DTypeOption = Annotated[DType, typer.Option(help="Precision of weights and activations.")]
RouterOption = Annotated[
    RouterWeightsOption,
    typer.Option(help="Mixing weights without the correction bias, or with it as in the checkpoint's own code."),
]


class TierOption(StrEnum):
    """Which KDA operator the model runs."""

    chunked = "chunked"
    naive = "naive"

    def operator(self) -> KDAOperator:
        """The operator itself."""
        return chunk_kda if self is TierOption.chunked else recurrent_kda


def logits_command(
    folder: CheckpointFolder,
    text: Annotated[str | None, typer.Option(help="The text, special tokens included.")] = None,
    ids: Annotated[str | None, typer.Option(help="Instead of --text: token ids with commas or spaces.")] = None,
    tier: Annotated[TierOption, typer.Option(help="KDA operator.")] = TierOption.chunked,
    stream_layers: Annotated[
        bool, typer.Option("--stream-layers", help="Read a layer when its turn comes: two in memory at a time.")
    ] = False,
    dtype: DTypeOption = DType.fp32,
    router_weights: RouterOption = RouterWeightsOption.unbiased,
    top: Annotated[int, typer.Option(min=1, help="Likeliest next tokens to show.")] = 10,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write input_ids and logits as safetensors.", dir_okay=False)
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="transformers|FILE", help="Compare: transformers, or what --out wrote.")
    ] = None,
) -> None:
    """Run a text through the model, show the likeliest next tokens, record or compare the logits.

    Exit code 1 when --against would choose another token anywhere.
    """
    with plain_errors():
        tokenizer = load_tokenizer(folder)
        tokens = torch.tensor([_tokens(tokenizer, text, ids)])
        load = stream_model if stream_layers else load_model
        model = load(folder, dtype=dtype.torch(), router_weights=router_weights.value, kda=tier.operator())
        with torch.no_grad():
            logits = model(tokens).logits
        if out is not None:
            save_file({"input_ids": tokens, "logits": logits.contiguous()}, out)
        found = None if against is None else compare(logits, reference_logits(against, folder, tokens))
    table_console().print(_likeliest(logits[0, -1], tokenizer, top))
    typer.echo(f"{tokens.shape[1]} tokens, {logits.shape[-1]:,} logits each.")
    if found is not None:
        typer.echo(f"Against {against}: {found}.")
        raise typer.Exit(1 if found.disagree else 0)


def generate_command(
    folder: CheckpointFolder,
    prompt: Annotated[str, typer.Option(help="The text to continue, special tokens included.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens of this total probability.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    at_once: Annotated[bool, typer.Option("--stream/--no-stream", help="Print as it is written, or whole.")] = True,
    dtype: DTypeOption = DType.fp32,
    router_weights: RouterOption = RouterWeightsOption.unbiased,
) -> None:
    """Continue a text."""
    with plain_errors():
        tokenizer = load_tokenizer(folder)
        ids = _encoded(tokenizer, prompt, "--prompt")
        sampling = Sampling(temperature=temperature, top_p=top_p)
        model = load_model(folder, dtype=dtype.torch(), router_weights=router_weights.value)
        generator = torch.Generator().manual_seed(seed)
        steps = stream(model, [ids], max_new_tokens=max_new_tokens, sampling=sampling, generator=generator)
        pieces = as_text(tokenizer, (step[0] for step in steps))
        for piece in pieces if at_once else ["".join(pieces)]:
            typer.echo(piece.translate(CONTROLS), nl=False)
    typer.echo()


def as_text(tokenizer: Tokenizer, tokens: Iterator[int]) -> Iterator[str]:
    """The text of a stream of tokens, as soon as its characters are complete."""
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if not text.endswith(UNFINISHED) or len(waiting) == LONGEST_CHARACTER:
            yield text
            waiting = []
    if waiting:
        yield tokenizer.decode(waiting)


def _tokens(tokenizer: Tokenizer, text: str | None, ids: str | None) -> list[int]:
    if (text is None) == (ids is None):
        raise ValueError("give --text or --ids, one of them")
    if text is not None:
        return _encoded(tokenizer, text, "--text")
    words = (ids or "").replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"--ids must be token ids with commas or spaces between; got {ids!r}")
    return [int(word) for word in words]


def _encoded(tokenizer: Tokenizer, text: str, option: str) -> list[int]:
    ids = tokenizer.encode(text)
    if not ids:
        raise ValueError(f"{option} must hold one token or more; got {text!r}")
    return ids


def _likeliest(logits: Tensor, tokenizer: Tokenizer, top: int) -> Table:
    table = Table(title="Likeliest next tokens")
    for heading in ("token", "text", "logit", "probability"):
        table.add_column(heading, justify="left" if heading == "text" else "right")
    probabilities = logits.double().softmax(-1)
    for token in logits.argsort(descending=True, stable=True)[:top].tolist():
        text = escape(repr(tokenizer.decode([token])))
        table.add_row(str(token), text, f"{logits[token].item():.4f}", f"{probabilities[token].item():.4f}")
    return table
