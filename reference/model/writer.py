"""Small valid checkpoints in the original layout, with random weights that are the same bytes everywhere.

    config.json, generation_config.json                     what the model is, how it stops
    model-0000i-of-0000n.safetensors, ….index.json          the weights: original names, bf16; A_log, dt_bias fp32
    tokenizer.json, tokenizer_config.json                   a token a byte

The weights are untrained but alive: what each layer adds is about as large as the residual stream, gates decay at
rates from a token to a thousand, routers disagree, and next-token probabilities differ by orders of magnitude.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .byte_tokenizer import BOS_ID, END_ID, PAD_ID, VOCABULARY, tokenizer_config, tokenizer_json
from .config import KimiLinearConfig
from .draws import normal, uniform
from .files import INDEX
from .names import Shapes, checkpoint_shapes
from .progress import tracked
from .tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON

Shape = tuple[int, ...]

LOG_RATE_RANGE = (0.0, 2.77)  # A_log of a fresh layer: log U(1, 16); here uniform in the logarithm
STEP_BIAS_RANGE = (-6.9, -2.25)  # dt_bias of a fresh layer: the inverse softplus of steps from 1e-3 to 1e-1
NORM_STD = 0.1  # of the norms' weights, about 1: a norm that forgets its weight shows
CORRECTION_STD = 0.1  # of the router's correction bias: it changes choices, and so does leaving it out
HEAD_GAIN = 3.0  # of the logits: the likeliest token gets some tenths of the probability


def tiny_config(layers: int = 4, **changes: Any) -> KimiLinearConfig:
    """A model of some 100,000 parameters that has every kind of layer; `changes` replaces fields.

    Every fourth layer and the last one are MLA, the first layer's MLP is dense: as in the released checkpoint.
    Sizes are unequal, so that one in the place of another does not fit.
    """
    last = [layers - 1] if layers > 1 else []
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 72, "num_hidden_layers": layers, "intermediate_size": 88}
    mla = {"num_attention_heads": 3, "kv_lora_rank": 28, "qk_nope_head_dim": 20, "qk_rope_head_dim": 12}
    kda = {"kda_num_heads": 5, "kda_head_dim": 16, "v_head_dim": 18}
    moe = {"num_experts": 7, "num_experts_per_token": 3, "num_shared_experts": 1, "moe_intermediate_size": 40}
    tokens = {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID, "model_max_length": 8192}
    rest = {"mla_layers": tuple(sorted({*range(3, layers, 4), *last})), "routed_scaling_factor": 2.446}
    return KimiLinearConfig(**{**sizes, **mla, **kda, **moe, **tokens, **rest, **changes})


def make_checkpoint(
    folder: str | Path,
    config: KimiLinearConfig | None = None,
    seed: int = 0,
    *,
    shards: int = 3,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a checkpoint that transformers and `load_model` read, and return its folder.

    The same arguments give the same bytes on every machine. The folder must be new or empty; `config` defaults
    to `tiny_config()`; `dtype`, bf16 or fp32, is that of all tensors but A_log and dt_bias. One shard is held in
    memory at a time.
    """
    folder = Path(folder)
    config = replace(config or tiny_config(), dtype=_dtype_name(dtype))
    if config.vocab_size < VOCABULARY:
        raise ValueError(f"vocab_size must be {VOCABULARY} or more, a token a byte; got {config.vocab_size}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} must be a new or empty folder; got one with files in it, or a file")
    shapes = checkpoint_shapes(config)
    groups = split_evenly({name: _bytes(*entry) for name, entry in shapes.items()}, shards)
    folder.mkdir(parents=True, exist_ok=True)
    _write_words(folder, config)
    _write_weights(folder, shapes, groups, seed)
    return folder


def draw_tensor(name: str, shape: Shape, dtype: torch.dtype, seed: int) -> Tensor:
    """The weight of this name: matrices keep the size of what they are given, the rest as the constants say."""
    if name.endswith(".A_log"):
        return uniform(seed, name, shape, low=LOG_RATE_RANGE[0], high=LOG_RATE_RANGE[1])
    if name.endswith(".dt_bias"):
        return uniform(seed, name, shape, low=STEP_BIAS_RANGE[0], high=STEP_BIAS_RANGE[1])
    if name.endswith(".e_score_correction_bias"):
        return normal(seed, name, shape, std=CORRECTION_STD).to(dtype)
    if len(shape) == 1:
        return normal(seed, name, shape, mean=1.0, std=NORM_STD).to(dtype)
    if name == "model.embed_tokens.weight":
        return normal(seed, name, shape).to(dtype)
    gain = HEAD_GAIN if name == "lm_head.weight" else 1.0
    return normal(seed, name, shape, std=gain / math.sqrt(math.prod(shape[1:]))).to(dtype)


def split_evenly(sizes: Mapping[str, int], shards: int) -> list[list[str]]:
    """Names in their order, cut into groups of about equal size; no group is empty."""
    if not 1 <= shards <= len(sizes):
        raise ValueError(f"shards must be 1 to {len(sizes)}, the number of tensors; got {shards}")
    names, total, before = list(sizes), sum(sizes.values()), 0
    groups: list[list[str]] = [[] for _ in range(shards)]
    group = 0
    for at, name in enumerate(names):
        left = len(names) - at
        full = before >= (group + 1) * total / shards
        if groups[group] and group + 1 < shards and (full or left < shards - group):
            group += 1
        groups[group].append(name)
        before += sizes[name]
    return groups


def _write_words(folder: Path, config: KimiLinearConfig) -> None:
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    _write_json(folder / "config.json", config.to_json())
    _write_json(folder / "generation_config.json", {**generation, "pad_token_id": config.pad_token_id})
    _write_json(folder / TOKENIZER_JSON, tokenizer_json())
    _write_json(folder / TOKENIZER_CONFIG, tokenizer_config(config.model_max_length))


def _write_weights(folder: Path, shapes: Shapes, groups: list[list[str]], seed: int) -> None:
    weight_map: dict[str, str] = {}
    for number, names in enumerate(tracked(groups, "writing shards"), start=1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        tensors = {name: draw_tensor(name, *shapes[name], seed) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(_bytes(*entry) for entry in shapes.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _bytes(shape: Shape, dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _dtype_name(dtype: torch.dtype) -> str:
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype must be torch.bfloat16 or torch.float32; got {dtype}")
    return str(dtype).removeprefix("torch.")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8", newline="\n")
