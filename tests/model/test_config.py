"""`config.json`: both layouts are read, and what would change the result is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kimi_linear.reference.model import KimiLinearConfig
from kimi_linear.reference.model.presets import KIMI_LINEAR_48B
from model_cases import CONFIGS, K3_CONFIGS, SMALL

RELEASED = json.loads((Path(__file__).parent / "kimi_linear_48b_config.json").read_text())
NOT_OURS = {"auto_map", "transformers_version"}  # code beside the checkpoint; who wrote the file


def changed(**keys):
    return {**RELEASED, **keys}


def changed_inside(**keys):
    return {**RELEASED, "linear_attn_config": {**RELEASED["linear_attn_config"], **keys}}


def without(*keys):
    return {key: value for key, value in RELEASED.items() if key not in keys}


def test_the_released_config_says_which_layers_are_what():
    config = KimiLinearConfig.from_json(RELEASED)
    assert config.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert config.kda_layers == tuple(i for i in range(27) if i not in config.mla_layers)
    assert config.dense_layers == (0,)
    assert config.moe_layers == tuple(range(1, 27))
    assert config.qk_head_dim == 192
    assert config.stop_ids == (163586,)
    assert config == KIMI_LINEAR_48B


def test_the_released_config_is_written_as_it_was_read():
    written = KimiLinearConfig.from_json(RELEASED).to_json()
    assert written == {key: value for key, value in RELEASED.items() if key not in NOT_OURS}
    assert json.loads(json.dumps(written)) == written


@pytest.mark.parametrize("config", [*CONFIGS.values(), *K3_CONFIGS.values()], ids=[*CONFIGS, *K3_CONFIGS])
def test_a_config_survives_a_file(config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    assert KimiLinearConfig.from_json(tmp_path) == config
    assert KimiLinearConfig.from_json(str(tmp_path / "config.json")) == config


def test_several_stop_tokens_survive_a_file():
    config = replace(SMALL, eos_token_id=(7, 9))
    assert KimiLinearConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.stop_ids == (7, 9)
    assert replace(SMALL, eos_token_id=None).stop_ids == ()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")
def test_the_config_that_transformers_writes_means_the_same(config, tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.24", reason="has Kimi Linear from 5.24 on")
    theirs = transformers.KimiLinearConfig(**config.to_json())
    theirs.save_pretrained(tmp_path)
    assert KimiLinearConfig.from_json(tmp_path) == config

    raw = json.loads((tmp_path / "config.json").read_text())
    ours_only = ("linear_attn_config", "first_k_dense_replace", "moe_layer_freq", "use_grouped_topk")
    theirs_only = {key: value for key, value in raw.items() if key not in ours_only}
    assert KimiLinearConfig.from_json(theirs_only) == config


def test_transformers_names_are_read_beside_the_released_ones():
    names = {"n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize", "num_local_experts": "num_experts"}
    names |= {"num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts"}
    renamed = without(*names.values()) | {theirs: RELEASED[ours] for theirs, ours in names.items()}
    assert KimiLinearConfig.from_json(renamed) == KimiLinearConfig.from_json(RELEASED)


REFUSED = {
    "hidden_act must be 'silu'": changed(hidden_act="gelu"),
    "moe_router_activation_func must be 'sigmoid'": changed(moe_router_activation_func="softmax"),
    "mla_use_nope must be True": changed(mla_use_nope=False),
    "attention_bias must be False": changed(attention_bias=True),
    "rope_scaling must be null": changed(rope_scaling={"type": "yarn"}),
    "tie_word_embeddings must be False": changed(tie_word_embeddings=True),
    "num_nextn_predict_layers must be 0": changed(num_nextn_predict_layers=1),
    "quantization_config must be null": changed(quantization_config={"bits": 4}),
    "model_type must be 'kimi_linear'": changed(model_type="kimi_k3"),
    "num_key_value_heads must be num_attention_heads=32": changed(num_key_value_heads=8),
    "use_grouped_topk must be true where num_expert_group=8": changed(use_grouped_topk=False, num_expert_group=8),
    "mla_use_output_gate must be absent": changed(mla_use_output_gate=True),
    "linear_attn_config.allow_neg_eigval must be absent": changed_inside(allow_neg_eigval=True),
    "dtype must be one of bfloat16": changed(dtype="int8"),
    "gate_lower_bound must be null": changed_inside(gate_lower_bound=5.0),
    "linear_attn_config.full_attn_layers must be there": without("linear_attn_config"),
    "kda_num_heads must be there": {**without("linear_attn_config"), "layer_types": ["linear_attention"] * 27},
    "linear_attn_config must be every layer from 1 to 27 once": changed_inside(full_attn_layers=[4, 8]),
    "layer_types must be what linear_attn_config says": changed(layer_types=["linear_attention"] * 27),
    "layer_types must be 27": changed(layer_types=["full_attention"]),
    "mlp_layer_types must be dense layers followed": changed(mlp_layer_types=["sparse", *["dense"] * 26]),
    "mlp_layer_types must be what the other keys say": changed(mlp_layer_types=[*["dense"] * 2, *["sparse"] * 25]),
    "num_experts must be the same under its other name": changed(num_local_experts=8),
    "linear_attn_config.head_dim must be what linear_head_dim says": changed(linear_head_dim=64),
    "num_experts must be there": without("num_experts"),
    "moe_renormalize must be there": without("moe_renormalize"),
    "num_expert_group must be a divisor of num_experts=256": changed(num_expert_group=3),
    "topk_group must be at most num_expert_group=1": changed(topk_group=2),
    "num_experts_per_token must be 1 to 128": changed(num_expert_group=2, num_experts_per_token=129),
    "hidden_size must be a positive integer": changed(hidden_size=0),
    "vocab_size must be there": without("vocab_size"),
    "num_hidden_layers must be there": without("num_hidden_layers"),
    "moe_intermediate_size must be a positive integer": changed(moe_intermediate_size=0),
    "rms_norm_eps must be a positive number": changed(rms_norm_eps=0.0),
    "qk_rope_head_dim must be an integer, 0 or more": changed(qk_rope_head_dim=-1),
}


@pytest.mark.parametrize("message", REFUSED, ids=[message.split(" must")[0] for message in REFUSED])
def test_what_would_change_the_result_is_refused_by_name(message):
    with pytest.raises(ValueError) as error:  # noqa: PT011
        KimiLinearConfig.from_json(REFUSED[message])
    assert str(error.value).startswith(f"config: {message}")
    assert "; got " in str(error.value)


def test_keys_that_change_nothing_are_read_over():
    config = KimiLinearConfig.from_json(RELEASED)
    more = changed(_name_or_path="x", use_cache=False, attn_res_block_size=None, mla_use_output_gate=False)
    assert KimiLinearConfig.from_json(more) == config
    assert KimiLinearConfig.from_json(without("mla_use_nope", "auto_map", "head_dim")) == config


def test_layers_out_of_order_are_refused_where_a_config_is_made_by_hand():
    with pytest.raises(ValueError, match="mla_layers must be increasing"):
        replace(SMALL, mla_layers=(3, 1))
    with pytest.raises(ValueError, match="mla_layers must be increasing"):
        replace(SMALL, mla_layers=(4,))


def test_every_other_layer_can_have_experts():
    config = replace(SMALL, num_hidden_layers=6, moe_layer_freq=2, first_k_dense_replace=1)
    assert config.moe_layers == (2, 4)
    assert replace(config, num_experts=0).moe_layers == ()
    assert KimiLinearConfig.from_json(config.to_json()) == config
