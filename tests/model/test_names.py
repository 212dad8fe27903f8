"""The checkpoint's tensors: as many as there are, and each with its place in the model."""

import math
from pathlib import Path

import pytest
import torch

from kimi_linear.reference.model import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    checkpoint_shapes,
    load_tensors,
    parameter_of,
)
from model_cases import CONFIGS, K3_CONFIGS, SMALL, random_tensors, small_model

RELEASED = Path(__file__).parent / "kimi_linear_48b_config.json"
ALWAYS_FP32 = ("A_log", "dt_bias", "block_sparse_moe.gate.weight", "e_score_correction_bias")
EVERY_CONFIG = {**CONFIGS, **K3_CONFIGS}


def test_the_released_checkpoint_has_as_many_tensors_parameters_and_bytes_as_counted():
    shapes = checkpoint_shapes(KimiLinearConfig.from_json(RELEASED))
    sizes = {name: math.prod(shape) for name, (shape, _) in shapes.items()}
    assert len(shapes) == 20_493
    assert sum(sizes.values()) == 49_122_681_728
    assert sum(sizes[name] * dtype.itemsize for name, (_, dtype) in shapes.items()) == 98_245_528_576
    assert {name for name, (_, dtype) in shapes.items() if dtype == torch.float32} == {
        name for name in shapes if name.endswith(("A_log", "dt_bias"))
    }


@pytest.mark.parametrize(
    ("prefix", "parameters"),
    [
        ("model.layers.0.self_attn.", 39_514_272),
        ("model.layers.3.self_attn.", 29_114_880),
        ("model.layers.0.mlp.", 63_700_992),
        ("model.layers.1.block_sparse_moe.", 1_819_607_040 + 256),  # and the correction bias
    ],
)
def test_a_layer_has_as_many_parameters_as_counted(prefix, parameters):
    shapes = checkpoint_shapes(KimiLinearConfig.from_json(RELEASED))
    assert sum(math.prod(shape) for name, (shape, _) in shapes.items() if name.startswith(prefix)) == parameters


@pytest.mark.parametrize("config", EVERY_CONFIG.values(), ids=EVERY_CONFIG)
def test_the_model_has_a_place_for_every_tensor_and_no_other(config):
    model = KimiLinearForCausalLM(config, device="meta")
    places = dict(model.state_dict())
    filled = {name: 0 for name in places}
    for name, (shape, _) in checkpoint_shapes(config).items():
        parameter, expert = parameter_of(name)
        place = places[parameter] if expert is None else places[parameter][expert]
        assert place.shape == shape
        filled[parameter] += math.prod(shape)
    assert filled == {name: place.numel() for name, place in places.items()}


def test_the_released_model_fits_on_no_device_at_all():
    model = KimiLinearForCausalLM(KimiLinearConfig.from_json(RELEASED), dtype=torch.bfloat16, device="meta")
    assert sum(x.numel() for x in model.state_dict().values()) == 49_122_681_728
    assert {x.device.type for x in model.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_decay_rates_and_router_are_fp32_in_every_model(dtype):
    model = KimiLinearForCausalLM(SMALL, dtype=dtype, device="meta")
    for name, x in model.state_dict().items():
        assert x.dtype == (torch.float32 if name.endswith(ALWAYS_FP32) else dtype), name


def test_loading_puts_each_tensor_where_its_name_says():
    tensors = random_tensors(SMALL)
    state = small_model(dtype=torch.float32).state_dict()
    for name, tensor in tensors.items():
        parameter, expert = parameter_of(name)
        assert torch.equal(state[parameter] if expert is None else state[parameter][expert], tensor)
    assert parameter_of("model.layers.2.block_sparse_moe.experts.11.w3.weight") == (
        "model.layers.2.block_sparse_moe.experts.w3",
        11,
    )


def test_a_checkpoint_that_does_not_fit_is_refused_by_name():
    def load(items):
        load_tensors(KimiLinearForCausalLM(SMALL), items)

    tensors = random_tensors(SMALL)
    first = "model.layers.1.block_sparse_moe.experts.0.w1.weight"
    with pytest.raises(ValueError, match=r"tensors must cover the model; 1 are missing, .*experts\.w1\[0\]"):
        load((name, x) for name, x in tensors.items() if name != first)
    with pytest.raises(ValueError, match=r"lm_head\.bias must be a tensor of this model"):
        load([*tensors.items(), ("lm_head.bias", torch.zeros(3))])
    with pytest.raises(ValueError, match="once; got one too many"):
        load([*tensors.items(), (first, tensors[first])])
    with pytest.raises(ValueError, match=r"w1\.weight must be \[18, 44\]; got \[44, 18\]"):
        load({**tensors, first: tensors[first].T}.items())
