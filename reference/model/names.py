"""The names, shapes and dtypes of a checkpoint's tensors, and where each one goes in the model.

A parameter of `KimiLinearForCausalLM` has the name of its tensor in the checkpoint, with one exception: the
weights of a layer's E routed experts, a tensor each in the file, are slices of three parameters.

    checkpoint, e = 0 .. E-1                                   model
    model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight    model.layers.{i}.block_sparse_moe.experts.w1[e]
                                                 w3.weight                                            w3[e]
                                                 w2.weight                                            w2[e]

w1 is the gate, w3 the up and w2 the down projection.

The file keeps A_log and dt_bias in fp32 and everything else in the config's dtype. The model widens the
router's weight and correction bias to fp32, which is exact.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .config import KimiLinearConfig

Shape = tuple[int, ...]
Shapes = dict[str, tuple[Shape, torch.dtype]]
EXPERT_NAME = re.compile(r"(.+\.block_sparse_moe\.experts)\.(\d+)\.(w[123])\.weight")


class Slot(NamedTuple):
    """Where a checkpoint's tensor goes: a parameter, or one expert's slice of it."""

    parameter: str
    expert: int | None


def parameter_of(name: str) -> Slot:
    """The place in the model of a tensor of the checkpoint, by its name."""
    match = EXPERT_NAME.fullmatch(name)
    if match is None:
        return Slot(name, None)
    experts, e, weight = match.groups()
    return Slot(f"{experts}.{weight}", int(e))


def checkpoint_shapes(config: KimiLinearConfig) -> Shapes:
    """Every tensor of the released checkpoint's layout: name -> (shape, dtype), in the order of the layers.

    20,493 tensors with 49,122,681,728 parameters for Kimi-Linear-48B-A3B.
    """
    D, dtype = config.hidden_size, getattr(torch, config.dtype)
    shapes: Shapes = {"model.embed_tokens.weight": ((config.vocab_size, D), dtype)}
    for i in range(config.num_hidden_layers):
        layer = {"input_layernorm.weight": ((D,), dtype), "post_attention_layernorm.weight": ((D,), dtype)}
        mixer = _mla_shapes(config, dtype) if config.is_mla(i) else _kda_shapes(config, dtype)
        mlp = _moe_shapes(config, dtype) if config.is_moe(i) else _dense_shapes(config, dtype)
        for name, entry in (layer | mixer | mlp).items():
            shapes[f"model.layers.{i}.{name}"] = entry
    shapes["model.norm.weight"] = ((D,), dtype)
    shapes["lm_head.weight"] = ((config.vocab_size, D), dtype)
    return shapes


def _kda_shapes(config: KimiLinearConfig, dtype: torch.dtype) -> Shapes:
    D, P, K, H = config.hidden_size, config.kda_width, config.kda_head_dim, config.kda_num_heads
    shapes: dict[str, Shape] = {f"{x}_proj.weight": (P, D) for x in "qkv"}
    shapes |= {f"{x}_conv1d.weight": (P, 1, config.short_conv_kernel_size) for x in "qkv"}
    shapes |= {"f_a_proj.weight": (K, D), "f_b_proj.weight": (P, K), "b_proj.weight": (H, D)}
    if config.use_full_rank_gate:
        shapes |= {"g_proj.weight": (P, D)}
    else:
        shapes |= {"g_a_proj.weight": (K, D), "g_b_proj.weight": (P, K)}
    shapes |= {"o_norm.weight": (K,), "o_proj.weight": (D, P)}
    fp32 = {"A_log": ((1, 1, H, 1), torch.float32), "dt_bias": ((P,), torch.float32)}
    return {f"self_attn.{name}": entry for name, entry in (fp32 | _all_of(dtype, shapes)).items()}


def _mla_shapes(config: KimiLinearConfig, dtype: torch.dtype) -> Shapes:
    D, H, R, Q = config.hidden_size, config.num_attention_heads, config.kv_lora_rank, config.q_lora_rank
    queries = H * config.qk_head_dim
    shapes: dict[str, Shape] = {}
    if Q is None:
        shapes |= {"q_proj.weight": (queries, D)}
    else:
        shapes |= {"q_a_proj.weight": (Q, D), "q_a_layernorm.weight": (Q,), "q_b_proj.weight": (queries, Q)}
    shapes |= {
        "kv_a_proj_with_mqa.weight": (R + config.qk_rope_head_dim, D),
        "kv_a_layernorm.weight": (R,),
        "kv_b_proj.weight": (H * (config.qk_nope_head_dim + config.v_head_dim), R),
        "o_proj.weight": (D, H * config.v_head_dim),
    }
    return {f"self_attn.{name}": entry for name, entry in _all_of(dtype, shapes).items()}


def _dense_shapes(config: KimiLinearConfig, dtype: torch.dtype) -> Shapes:
    shapes = _mlp_shapes(config.hidden_size, config.intermediate_size)
    return {f"mlp.{name}": entry for name, entry in _all_of(dtype, shapes).items()}


def _moe_shapes(config: KimiLinearConfig, dtype: torch.dtype) -> Shapes:
    D, E, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    shapes: dict[str, Shape] = {"gate.weight": (E, D), "gate.e_score_correction_bias": (E,)}
    for e in range(E):
        shapes |= {f"experts.{e}.w1.weight": (width, D), f"experts.{e}.w3.weight": (width, D)}
        shapes |= {f"experts.{e}.w2.weight": (D, width)}
    if config.num_shared_experts:
        shared = _mlp_shapes(D, width * config.num_shared_experts)
        shapes |= {f"shared_experts.{name}": shape for name, shape in shared.items()}
    return {f"block_sparse_moe.{name}": entry for name, entry in _all_of(dtype, shapes).items()}


def _mlp_shapes(D: int, width: int) -> dict[str, Shape]:
    return {"gate_proj.weight": (width, D), "up_proj.weight": (width, D), "down_proj.weight": (D, width)}


def _all_of(dtype: torch.dtype, shapes: Mapping[str, Shape]) -> Shapes:
    return {name: (shape, dtype) for name, shape in shapes.items()}


def load_tensors(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy a checkpoint's tensors, by name, into a model; each must come once and fit.

    Raises ValueError for a name that the model has no place for, a wrong shape, or a tensor that is missing
    at the end. Values are cast to the parameter's dtype.
    """
    places = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {(name, e) for name, x in places.items() for e in (range(len(x)) if _is_stacked(name) else [None])}
    for name, tensor in tensors:
        slot = parameter_of(name)
        if slot not in wanted:
            raise ValueError(f"{name} must be a tensor of this model, once; got one too many")
        _fill(places[slot.parameter], slot.expert, tensor, name)
        wanted.remove(slot)
    if wanted:
        first, e = min(wanted, key=str)
        raise ValueError(f"tensors must cover the model; {len(wanted)} are missing, {first}[{e}] among them")


def _fill(parameter: Tensor, expert: int | None, tensor: Tensor, name: str) -> None:
    with torch.no_grad():
        place = parameter if expert is None else parameter[expert]
        if place.shape != tensor.shape:
            raise ValueError(f"{name} must be {list(place.shape)}; got {list(tensor.shape)}")
        place.copy_(tensor)


def _is_stacked(parameter: str) -> bool:
    return parameter.endswith((".experts.w1", ".experts.w2", ".experts.w3"))
