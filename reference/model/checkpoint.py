"""From a folder to a model: what the folder must hold is checked by name first, then read layer by layer.

    checkpoint = open_checkpoint(folder)      config and headers; one error that lists all that does not fit
    model = load_model(folder, dtype=...)     the model, with memory of its own

A layer's tensors are copied out of files that are mapped only meanwhile, so that loading takes the model's memory
and one layer's more. A_log, dt_bias, the router's weight and its correction bias become fp32 whatever `dtype` is
(fp64 in an fp64 model); widening bf16 is exact, and a warning says where a file kept less than fp32 of the first two.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..chunked import chunk_kda
from ..naive import recurrent_kda
from .config import KimiLinearConfig
from .files import CheckpointError, StoredTensor, opened, read_json, stored_tensors
from .kda import KDAOperator
from .layouts import Layout, Part, match
from .model import KimiLinearForCausalLM
from .moe import RouterWeights
from .names import checkpoint_shapes, parameter_of
from .parts import Where
from .progress import tracked
from .reader import reading_thread

CONFIG = "config.json"
READABLE = ("F64", "F32", "F16", "BF16")  # safetensors' names of the dtypes that are weights and not codes
WIDE = ("F64", "F32")
DECAY_RATES = ("A_log", "dt_bias")  # fp32 in the released checkpoint
LISTED = 20  # names of a kind in an error's message; its attributes have all


class MisfitError(CheckpointError):
    """Tensors and config do not belong together; `layout` has the names, all of them."""

    def __init__(self, folder: Path, layout: Layout, unreadable: Mapping[str, str]) -> None:
        self.layout, self.unreadable = layout, dict(unreadable)
        wrong = [f"{name} must be {list(want)}; got {list(got)}" for name, (want, got) in layout.misshaped.items()]
        codes = [f"{name} must be one of {', '.join(READABLE)}; got {dtype}" for name, dtype in unreadable.items()]
        kinds = {"missing": layout.missing, "unexpected": layout.unexpected, "of another shape": wrong}
        lists = [_listed(kind, names) for kind, names in {**kinds, "of another dtype": codes}.items() if names]
        super().__init__("\n".join([f"{folder} must hold the tensors that its {CONFIG} asks for; got", *lists]))


class RoundedWarning(UserWarning):
    """A tensor was stored with fewer bits than the released checkpoint gives it."""


class Station(NamedTuple):
    """A piece of the model that is read at once, and the prefix of its tensors' names."""

    prefix: str
    module: nn.Module


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose tensors fit its config. Holds no tensor."""

    folder: Path
    config: KimiLinearConfig
    stored: Mapping[str, StoredTensor]  # by the names in the files
    parts: Mapping[str, Part]  # by the original names

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Original name and tensor, file by file; a tensor is mapped memory, valid until the next one."""
        by_file = defaultdict(list)
        for name in names:
            by_file[self.stored[self.parts[name].stored].file].append(name)
        for file, held in by_file.items():
            with opened(file) as tensors:
                for name in held:
                    part = self.parts[name]
                    yield name, _cut(tensors, part)

    def read_state(self, station: Station, device: Where = None) -> dict[str, Tensor]:
        """The station's parameters and buffers, filled: new memory, in the dtype that the model gives each."""
        places = station.module.state_dict(prefix=station.prefix)
        filled = {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in places.items()}
        for name, tensor in self.read(name for name in self.parts if name.startswith(station.prefix)):
            parameter, expert = parameter_of(name)
            place = filled[parameter] if expert is None else filled[parameter][expert]
            place.copy_(tensor)
        return {name.removeprefix(station.prefix): x for name, x in filled.items()}


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read config and headers, and check that every tensor of the model is there, with its shape.

    Raises `CheckpointError` for files that are missing or broken and `MisfitError`, which is one, for tensors
    that are missing, unexpected, or of another shape or dtype. Warns where A_log or dt_bias were rounded.
    """
    folder = Path(folder)
    stored = stored_tensors(folder)
    config = read_config(folder / CONFIG)
    layout = match({name: shape for name, (shape, _) in checkpoint_shapes(config).items()}, stored)
    unreadable = {name: x.dtype for name, x in stored.items() if x.dtype not in READABLE}
    if layout.missing or layout.unexpected or layout.misshaped or unreadable:
        raise MisfitError(folder, layout, unreadable)
    _warn_of_rounding(folder, stored)
    return Checkpoint(folder, config, stored, layout.parts)


def read_config(file: Path) -> KimiLinearConfig:
    """A config.json; what is wrong with it gets the file's name."""
    content = read_json(file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold an object; got a {type(content).__name__}")
    try:
        return KimiLinearConfig.from_json(content)
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: Where = None,
    kda: KDAOperator = chunk_kda,
    decode_kda: KDAOperator = recurrent_kda,
    router_weights: RouterWeights = "unbiased",
) -> KimiLinearForCausalLM:
    """The model of a checkpoint; arguments as for `KimiLinearForCausalLM`. On a terminal, a bar shows progress."""
    checkpoint = open_checkpoint(folder)
    options: dict[str, Any] = {"kda": kda, "decode_kda": decode_kda, "router_weights": router_weights}
    model = KimiLinearForCausalLM(checkpoint.config, dtype=dtype, device="meta", **options)
    with reading_thread() as reader:
        for station in tracked(stations(model), "loading layers"):
            state = reader.submit(checkpoint.read_state, station, device).result()
            station.module.load_state_dict(state, assign=True)
    return model


def stations(model: KimiLinearForCausalLM) -> list[Station]:
    """The model in pieces, in the order in which a forward pass needs them."""
    layers = [Station(f"model.layers.{i}.", layer) for i, layer in enumerate(model.model.layers)]
    first, norm = Station("model.embed_tokens.", model.model.embed_tokens), Station("model.norm.", model.model.norm)
    return [first, *layers, norm, Station("lm_head.", model.lm_head)]


class ParameterCount(NamedTuple):
    """Parameters of a model, and those among them that one token meets; both embeddings count."""

    total: int
    activated: int


def count_parameters(config: KimiLinearConfig) -> ParameterCount:
    """Of the routed experts a token meets num_experts_per_token of num_experts."""
    sizes = {name: math.prod(shape) for name, (shape, _) in checkpoint_shapes(config).items()}
    total = sum(sizes.values())
    routed = sum(size for name, size in sizes.items() if parameter_of(name).expert is not None)
    idle = routed // max(config.num_experts, 1) * (config.num_experts - config.num_experts_per_token)
    return ParameterCount(total, total - idle)


def _cut(tensors: Any, part: Part) -> Tensor:
    """A stored tensor or a piece of it, without reading the rest."""
    if not part.cut:
        return tensors.get_tensor(part.stored)
    return tensors.get_slice(part.stored)[part.cut]


def _warn_of_rounding(folder: Path, stored: Mapping[str, StoredTensor]) -> None:
    rounded = [name for name, x in stored.items() if name.endswith(DECAY_RATES) and x.dtype not in WIDE]
    if rounded:
        dtypes = ", ".join(sorted({stored[name].dtype for name in rounded}))
        text = f"{folder} holds {len(rounded)} decay rates in {dtypes}, {rounded[0]} among them"
        warnings.warn(f"{text}: the fp32 values of the original were rounded", RoundedWarning, stacklevel=3)


def _listed(kind: str, names: Iterable[str]) -> str:
    names = list(names)
    more = f"\n    … and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"  {len(names)} {kind}:\n    " + "\n    ".join(names[:LISTED]) + more
