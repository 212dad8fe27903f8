"""`config.json`, read and written: the released checkpoint's layout, and the one that transformers writes.

    released                                      transformers 5.24
    linear_attn_config.full_attn_layers (from 1)  layer_types: full_attention | linear_attention
    linear_attn_config.head_dim, .num_heads, ..   linear_head_dim, linear_num_heads, linear_conv_kernel_dim
    first_k_dense_replace                         mlp_layer_types: dense | sparse
    num_experts, num_experts_per_token, ..        the same, or num_local_experts, num_experts_per_tok, ..

A file may hold both, if they agree. Every key is either read, or known to change no result, or checked to
have the one value that is implemented, or unknown; a key that is unknown is refused unless it is empty.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from .config import KimiLinearConfig, reject

RENAMED = {  # transformers' name: the released checkpoint's
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "torch_dtype": "dtype",
}
LINEAR_KEYS = {  # in linear_attn_config: (our name, transformers' name)
    "head_dim": ("kda_head_dim", "linear_head_dim"),
    "num_heads": ("kda_num_heads", "linear_num_heads"),
    "short_conv_kernel_size": ("short_conv_kernel_size", "linear_conv_kernel_dim"),
    "gate_lower_bound": ("gate_lower_bound", "gate_lower_bound"),
    "use_full_rank_gate": ("use_full_rank_gate", "use_full_rank_gate"),
}
ONLY: dict[str, tuple[Any, ...]] = {  # keys with one meaning that is implemented; null is that meaning too
    "model_type": ("kimi_linear",),
    "hidden_act": ("silu",),
    "mla_use_nope": (True,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "attention_bias": (False,),
    "attention_dropout": (0.0,),
    "tie_word_embeddings": (False,),
    "num_nextn_predict_layers": (0,),
    "rope_scaling": (),
    "quantization_config": (),
}
NO_EFFECT = {  # on the result of this model
    *("architectures", "auto_map", "transformers_version", "_name_or_path", "use_cache", "pretraining_tp"),
    *("head_dim", "qk_head_dim", "rope_theta", "rope_parameters", "output_router_logits", "max_length"),
    *("return_dict", "output_hidden_states", "output_attentions", "task_specific_params", "problem_type"),
    *("chunk_size_feed_forward", "is_encoder_decoder", "id2label", "label2id", "torchscript"),
}
STATED = ("rms_norm_eps", "num_experts")  # no default: those of different codes differ
STATED_WITH_EXPERTS = (
    *("first_k_dense_replace", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size"),
    *("moe_renormalize", "routed_scaling_factor", "num_expert_group", "topk_group"),
)
LAYOUT = {"linear_attn_config", "layer_types", "mlp_layer_types", "num_key_value_heads", "use_grouped_topk"}


def read_config(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    """The arguments of `KimiLinearConfig` that a `config.json` states."""
    raw = _with_released_names(_load(source))
    linear = dict(raw.get("linear_attn_config") or {})
    if "num_hidden_layers" not in raw:
        reject("num_hidden_layers", "there", "nothing")
    _check_fixed(raw)
    _check_known(raw, linear)
    values = {name: raw[name] for name in _field_names() if name in raw}
    values |= _linear_values(raw, linear)
    values["mla_layers"] = _mla_layers(raw, linear)
    values |= _dense_values(raw)
    _check_complete(values)
    return _without_nulls(values)


def original_layout(config: KimiLinearConfig) -> dict[str, Any]:
    """A config as the released checkpoint's file spells it."""
    nested = {"mla_layers", *(ours for ours, _ in LINEAR_KEYS.values())}
    flat = {name: getattr(config, name) for name in _field_names() if name not in nested}
    if isinstance(config.eos_token_id, tuple):
        flat["eos_token_id"] = list(config.eos_token_id)
    fixed = {"hidden_act": "silu", "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
    fixed |= {"num_nextn_predict_layers": 0, "rope_scaling": None, "rope_theta": 10000.0}
    fixed |= {"tie_word_embeddings": False, "use_cache": True, "use_grouped_topk": True}
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **flat,
        **fixed,
        "head_dim": config.hidden_size // config.num_attention_heads,  # in the file, and without effect
        "num_key_value_heads": config.num_attention_heads,
        "linear_attn_config": _linear_attn_config(config),
    }


def _linear_attn_config(config: KimiLinearConfig) -> dict[str, Any]:
    linear: dict[str, Any] = {
        "full_attn_layers": [layer + 1 for layer in config.mla_layers],
        "kda_layers": [layer + 1 for layer in config.kda_layers],
        "head_dim": config.kda_head_dim,
        "num_heads": config.kda_num_heads,
        "short_conv_kernel_size": config.short_conv_kernel_size,
    }
    if config.gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.gate_lower_bound
    if config.use_full_rank_gate:
        linear["use_full_rank_gate"] = True
    return linear


def _load(source: str | Path | dict[str, Any]) -> dict[str, Any]:
    if isinstance(source, dict):
        return source
    path = Path(source)
    return json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))


def _with_released_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Rename transformers' keys; a file that has both names must mean the same by them."""
    renamed: dict[str, Any] = {}
    for key, value in raw.items():
        name = RENAMED.get(key, key)
        if name in renamed and renamed[name] != value:
            reject(name, f"the same under its other name, {key}", f"{renamed[name]!r} and {value!r}")
        renamed[name] = value
    return renamed


def _check_fixed(raw: dict[str, Any]) -> None:
    for name, allowed in ONLY.items():
        value = raw.get(name)
        if value is not None and value not in allowed:
            want = " or ".join([*map(repr, allowed), "null"])
            reject(name, f"{want}, the one that is implemented", repr(value))
    heads = raw.get("num_key_value_heads")
    if heads is not None and heads != raw.get("num_attention_heads"):
        want = f"num_attention_heads={raw.get('num_attention_heads')}: MLA has a key and a value for every head"
        reject("num_key_value_heads", want, heads)
    if raw.get("use_grouped_topk") is False and raw.get("num_expert_group", 1) != 1:
        want = f"true where num_expert_group={raw['num_expert_group']}: released codes differ on what false means"
        reject("use_grouped_topk", want, False)


def _check_known(raw: dict[str, Any], linear: dict[str, Any]) -> None:
    known = {*_field_names(), *ONLY, *NO_EFFECT, *LAYOUT, *(theirs for _, theirs in LINEAR_KEYS.values())}
    unknown = {key: value for key, value in raw.items() if key not in known}
    inside = set(linear) - {*LINEAR_KEYS, "kda_layers", "full_attn_layers"}
    unknown |= {f"linear_attn_config.{key}": linear[key] for key in sorted(inside)}
    for key, value in unknown.items():
        if value:
            reject(key, "absent, null, 0 or false: it is unknown here and may change the result", repr(value))


def _linear_values(raw: dict[str, Any], linear: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, (ours, theirs) in LINEAR_KEYS.items():
        found = [place[name] for place, name in ((linear, key), (raw, theirs)) if place.get(name) is not None]
        if len(found) == 2 and found[0] != found[1]:
            reject(f"linear_attn_config.{key}", f"what {theirs} says, {found[1]!r}", repr(found[0]))
        if found:
            values[ours] = found[0]
    return values


def _mla_layers(raw: dict[str, Any], linear: dict[str, Any]) -> tuple[int, ...]:
    """0-based MLA layers. There is no default: those of different codes differ from the checkpoint."""
    if "layer_types" not in raw and "full_attn_layers" not in linear:
        reject("linear_attn_config.full_attn_layers", "there, or layer_types", "neither")
    layers = range(raw["num_hidden_layers"])
    found = []
    if raw.get("layer_types") is not None:
        found.append(_positions("layer_types", raw["layer_types"], ("linear_attention", "full_attention"), layers))
    if "full_attn_layers" in linear:
        mla = sorted(linear["full_attn_layers"])
        kda = sorted(linear.get("kda_layers", [i + 1 for i in layers if i + 1 not in mla]))
        if sorted([*mla, *kda]) != [i + 1 for i in layers]:
            want = f"every layer from 1 to {len(layers)} once, in kda_layers or full_attn_layers"
            reject("linear_attn_config", want, f"kda_layers={kda}, full_attn_layers={mla}")
        found.append(tuple(layer - 1 for layer in mla))
    if found[0] != found[-1]:
        reject("layer_types", f"what linear_attn_config says: 0-based MLA layers {found[-1]}", found[0])
    return found[0]


def _dense_values(raw: dict[str, Any]) -> dict[str, Any]:
    """first_k_dense_replace from mlp_layer_types, which must be dense layers followed by sparse ones."""
    if raw.get("mlp_layer_types") is None:
        return {}
    layers = range(raw["num_hidden_layers"])
    sparse = _positions("mlp_layer_types", raw["mlp_layer_types"], ("dense", "sparse"), layers)
    dense = len(layers) - len(sparse)
    if sparse != tuple(layers)[dense:]:
        reject("mlp_layer_types", "dense layers followed by sparse ones", raw["mlp_layer_types"])
    if raw.get("first_k_dense_replace", dense) != dense or raw.get("moe_layer_freq", 1) != 1:
        got = f"first_k_dense_replace={raw.get('first_k_dense_replace')}, moe_layer_freq={raw.get('moe_layer_freq')}"
        reject("mlp_layer_types", f"what the other keys say; it has {dense} dense layers", got)
    return {"first_k_dense_replace": dense}


def _positions(name: str, kinds: list[str], allowed: tuple[str, str], layers: range) -> tuple[int, ...]:
    """Where a list of layer kinds has the second of the two that are allowed."""
    if len(kinds) != len(layers) or not set(kinds) <= set(allowed):
        reject(name, f"{len(layers)} (num_hidden_layers) of {' or '.join(allowed)}", kinds)
    return tuple(layer for layer in layers if kinds[layer] == allowed[1])


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Null means the default; a list of token ids becomes a tuple."""
    values = {name: value for name, value in values.items() if value is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _check_complete(values: dict[str, Any]) -> None:
    wanted = [field.name for field in fields(KimiLinearConfig) if field.default is MISSING]
    wanted += STATED
    wanted += STATED_WITH_EXPERTS if values.get("num_experts") else ()
    for name in wanted:
        if name not in values:
            reject(name, "there", "nothing")


def _field_names() -> list[str]:
    return [field.name for field in fields(KimiLinearConfig)]
