"""The part of `kimi-linear verify` that runs a whole model: a small checkpoint, written and read back, on a text.

    what the KDA layers saw     each layer's q, k, v, g and beta on their way to the operator, as cases for all tiers
    logits                      ours in fp32, ours layer by layer from disk, and transformers' where it is installed

The truth of the logits is our model in fp64, their limit the rounding envelope of that model. transformers writes
softplus as log(1 + exp(x)), which drops what lies below the roundoff of 1; so its envelope has roundings of that too.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..conformance import RATIO_LIMIT, envelope, rounded_runs
from ..reference import FrontEnd, SoftplusGate
from ..reference.chunked import chunk_kda
from ..reference.model.checkpoint import load_model
from ..reference.model.kda import KDAOperator
from ..reference.model.stream import stream_model
from ..reference.model.tokenizer import load_tokenizer
from ..reference.model.writer import make_checkpoint
from .activations import shipped_text
from .rows import Row, VerifyCase, judge

SEED = 0
TOKENS = 100  # of the text: a chunk of 64 and a bit
SAMPLES = 4  # rounded runs of the whole model
CASE = "model, logits"
LOGIT_TIERS = ("model, fp32", "model, layer by layer", "transformers, fp32")


class Recorder:
    """A KDA operator that keeps its arguments and lets `chunk_kda` do the work."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = []

    def __call__(self, *inputs: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        self.calls.append((inputs, options))
        return chunk_kda(*inputs, **options)


@torch.no_grad()
def model_cases() -> list[VerifyCase]:
    """What each KDA layer of the model gives its operator."""
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as parent:
        folder = make_checkpoint(Path(parent, "tiny"), seed=SEED)
        load_model(folder, kda=recorder)(_text(folder))
    return [
        VerifyCase(f"model, KDA layer {number}", _fp64(inputs), {"front_end": options["front_end"]})
        for number, (inputs, options) in enumerate(recorder.calls, start=1)
    ]


@torch.no_grad()
def logit_rows(progress: Callable[[str], None]) -> Iterator[Row]:
    """Judge the logits; `progress` is told what comes next, once a row."""
    with tempfile.TemporaryDirectory() as parent:
        folder = make_checkpoint(Path(parent, "tiny"), seed=SEED)
        ids = _text(folder)
        progress(f"{CASE}: truth and limits, {LOGIT_TIERS[0]}")
        truth, runs = _rounded(folder, ids, chunk_kda)
        limit = RATIO_LIMIT * envelope(truth, runs)
        in_memory = load_model(folder)(ids).logits
        yield judge(CASE, LOGIT_TIERS[0], [(in_memory, truth, limit)])
        progress(f"{CASE}: {LOGIT_TIERS[1]}")
        streamed = stream_model(folder)(ids).logits
        yield judge(CASE, LOGIT_TIERS[1], [(streamed, in_memory.double(), torch.zeros_like(limit))])
        progress(f"{CASE}: {LOGIT_TIERS[2]}")
        yield _transformers_row(folder, ids, truth, runs)


def transformers_logits(folder: Path, ids: Tensor) -> Tensor:
    """The same checkpoint through transformers' own Kimi Linear, in fp32. ImportError where it cannot run."""
    try:
        import transformers
    except ImportError:
        raise ImportError("transformers is not installed") from None
    if not hasattr(transformers, "KimiLinearForCausalLM"):
        raise ImportError(f"transformers {transformers.__version__} has no Kimi Linear")
    if find_spec("fla") is not None:
        raise ImportError("fla is installed, and transformers would call its GPU kernels on the CPU's tensors")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a config in the released layout it deprecates a key
        model = transformers.KimiLinearForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(ids).logits


def kda_with_plain_softplus(*inputs: Tensor, front_end: FrontEnd, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`chunk_kda` behind a gate that is computed as transformers does it."""
    q, k, v, g, beta = inputs
    assert isinstance(front_end.gate, SoftplusGate)  # the tiny checkpoint's
    x = g + front_end.gate.dt_bias.reshape(g.shape[-2:])
    g = -front_end.gate.A_log.exp().reshape(-1, 1) * torch.log(1 + torch.exp(x))
    return chunk_kda(q, k, v, g, beta, front_end=replace(front_end, gate=None), **options)


def _transformers_row(folder: Path, ids: Tensor, truth: Tensor, runs: list[Tensor]) -> Row:
    try:
        logits = transformers_logits(folder, ids)
    except ImportError as error:
        return Row(CASE, LOGIT_TIERS[2], 0.0, 0.0, ok=True, skipped=f"skipped: {error}")
    _, more_runs = _rounded(folder, ids, kda_with_plain_softplus)
    return judge(CASE, LOGIT_TIERS[2], [(logits, truth, RATIO_LIMIT * envelope(truth, runs + more_runs))])


def _rounded(folder: Path, ids: Tensor, kda: KDAOperator) -> tuple[Tensor, list[Tensor]]:
    """Logits of the fp64 model, exact and under roundings to fp32."""
    model = load_model(folder, dtype=torch.float64, kda=kda)
    (runs,) = rounded_runs(lambda: [model(ids).logits], samples=SAMPLES)
    return model(ids).logits, runs


def _text(folder: Path) -> Tensor:
    return torch.tensor([load_tokenizer(folder).encode(shipped_text().decode())[:TOKENS]])


def _fp64(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.double() for x in tensors)
