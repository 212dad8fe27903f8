"""A model larger than memory: each layer's weights are read when its turn comes, and dropped after it.

    model = stream_model(folder, dtype=...)     weights on disk; two layers' at a time in memory
    model(input_ids).logits                     the same bits as from `load_model(folder, dtype=...)`

While a layer computes, a thread reads the next one. Every call reads the whole checkpoint, so that this is for
a prompt's logits and not for generation, a checkpoint's read for each token.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..chunked import chunk_kda
from ..naive import recurrent_kda
from .checkpoint import Checkpoint, open_checkpoint, stations
from .kda import KDAOperator
from .model import KimiLinearForCausalLM
from .moe import RouterWeights
from .parts import Where
from .progress import Steps
from .reader import reading_thread


def stream_model(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: Where = None,
    kda: KDAOperator = chunk_kda,
    decode_kda: KDAOperator = recurrent_kda,
    router_weights: RouterWeights = "unbiased",
) -> KimiLinearForCausalLM:
    """A model that reads its weights from the folder at every call; arguments as for `load_model`.

    On a terminal, a bar shows which layers are done. A checkpoint that does not fit is refused here.
    """
    checkpoint = open_checkpoint(folder)
    options: dict[str, Any] = {"kda": kda, "decode_kda": decode_kda, "router_weights": router_weights}
    model = KimiLinearForCausalLM(checkpoint.config, dtype=dtype, device="meta", **options)
    WeightStream(checkpoint, model, device).attach()
    return model.requires_grad_(False)


class WeightStream:
    """Fills each station of a model before its forward, and empties it after.

    A station's memory is free before the one after the next is asked for: at most two are held.
    """

    def __init__(self, checkpoint: Checkpoint, model: KimiLinearForCausalLM, device: Where) -> None:
        self.checkpoint, self.device = checkpoint, device
        self.stations = stations(model)
        self.reader = reading_thread()
        self.ahead: dict[int, Future[dict[str, Tensor]]] = {}
        self.steps = Steps(len(self.stations), "running layers")

    def attach(self) -> None:
        """Hook every station; the hooks keep this object alive as long as the model."""
        for at, station in enumerate(self.stations):
            station.module.register_forward_pre_hook(self._filling(at))
            station.module.register_forward_hook(self._emptying(at), always_call=True)

    def _filling(self, at: int) -> Any:
        def fill(module: nn.Module, _: Any) -> None:
            self._ask(at)
            state = self.ahead.pop(at).result()
            self.ahead.clear()  # what a call that failed half-way left
            module.load_state_dict(state, assign=True)
            if at + 1 < len(self.stations):
                self._ask(at + 1)

        return fill

    def _emptying(self, at: int) -> Any:
        def empty(module: nn.Module, *_: Any) -> None:
            module.to("meta")
            self.steps.done(at)

        return empty

    def _ask(self, at: int) -> None:
        """Have a station read, unless it is on its way."""
        if at not in self.ahead:
            self.ahead[at] = self.reader.submit(self.checkpoint.read_state, self.stations[at], self.device)
