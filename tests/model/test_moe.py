"""The experts: who is chosen, with what weight, and that grouping tokens by expert changes nothing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from judge import assert_same_bits, assert_within_envelope, bounds_of
from kimi_linear.reference.model import KimiLinearForCausalLM
from kimi_linear.reference.model.moe import choose_experts
from kimi_linear.reference.model.parts import gated_mlp
from model_cases import CONFIGS, SMALL, random_tokens, small_model

ROUTED = {name: CONFIGS[name] for name in ("four_layers", "groups", "plain_weights")}


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def moe_layer(config=SMALL, **options):
    layer = small_model(config, **options).model.layers[2].block_sparse_moe
    return layer.requires_grad_(False)


def by_hand(layer, config, x, router_weights):
    """The layer again, token by token, in the order of the checkpoint's own code: choice, then weights."""
    outputs = []
    for token in x:
        scores = torch.sigmoid(layer.gate.weight @ token)
        biased = scores + layer.gate.e_score_correction_bias
        chosen = best_in_groups(biased.tolist(), config)
        mixing = (biased if router_weights == "biased" else scores)[chosen]
        if config.moe_renormalize:
            mixing = mixing / mixing.sum()
        y = layer.shared_experts(token)
        for weight, e in zip(mixing, chosen, strict=True):
            y = y + config.routed_scaling_factor * weight * gated_mlp(token, *layer.experts.weights_of(e))
        outputs.append(y)
    return torch.stack(outputs)


def best_in_groups(scores, config):
    size = len(scores) // config.num_expert_group
    groups = [range(g * size, (g + 1) * size) for g in range(config.num_expert_group)]
    if len(groups) > 1:
        worth = [sum(sorted((scores[e] for e in group), reverse=True)[:2]) for group in groups]
        best = sorted(range(len(groups)), key=lambda g: (-worth[g], g))[: config.topk_group]
        groups = [groups[g] for g in best]
    candidates = [e for group in groups for e in group]
    return sorted(candidates, key=lambda e: (-scores[e], e))[: config.num_experts_per_token]


@pytest.mark.parametrize("router_weights", ["unbiased", "biased"])
@pytest.mark.parametrize("config", ROUTED.values(), ids=ROUTED)
def test_the_layer_is_the_weighted_sum_over_each_tokens_experts(config, router_weights):
    layer, x = moe_layer(config, router_weights=router_weights), normal(23, config.hidden_size)
    exact = [by_hand(layer, config, x, router_weights)]
    bounds = bounds_of(exact, lambda: [layer(x[None])[0]])
    assert_within_envelope([layer(x[None])[0]], exact, bounds)
    other = by_hand(layer, config, x, "biased" if router_weights == "unbiased" else "unbiased")
    assert (exact[0] - other).abs().max() > 1e-3 * other.abs().max()


def test_biased_weights_change_the_logits_and_not_the_choice_of_the_first_layer():
    ids = random_tokens(1, 13)
    with torch.no_grad():
        runs = {name: small_model(router_weights=name)(ids) for name in ("unbiased", "biased")}
        models = {name: small_model(router_weights=name) for name in runs}
        routings = {
            name: model.model.layers[1].block_sparse_moe.gate(runs[name].hidden_states[1][0])
            for name, model in models.items()
        }
    assert_same_bits(routings["unbiased"].experts, routings["biased"].experts)
    assert not torch.equal(routings["unbiased"].weights, routings["biased"].weights)
    assert (runs["unbiased"].logits - runs["biased"].logits).abs().max() > 0.01
    assert torch.equal(runs["unbiased"].hidden_states[1], runs["biased"].hidden_states[1])


def test_an_unknown_kind_of_router_weights_is_refused():
    with pytest.raises(ValueError, match="router_weights must be one of 'unbiased', 'biased'; got 'both'"):
        KimiLinearForCausalLM(SMALL, router_weights="both", device="meta")


@given(st.integers(0, 2**32 - 1), st.sampled_from([(12, 1, 1), (12, 4, 2), (12, 6, 3), (10, 5, 1)]))
def test_the_choice_is_the_best_of_the_best_groups_and_ties_go_to_the_lower_index(seed, sizes):
    E, groups, kept = sizes
    k = min(3, E // groups * kept)
    scores = torch.randint(-2, 4, (5, E), generator=torch.Generator().manual_seed(seed)).double()  # many ties
    config = replace(SMALL, num_experts=E, num_expert_group=groups, topk_group=kept, num_experts_per_token=k)
    want = [best_in_groups(row.tolist(), config) for row in scores]
    assert choose_experts(scores, k, groups, kept).tolist() == want


def test_a_group_that_is_left_out_gives_no_expert_even_if_all_others_are_negative():
    scores = torch.tensor([[-0.5, -0.6, -0.1, -0.9, 0.3, -3.0]])
    assert choose_experts(scores, 2, groups=3, kept_groups=1).tolist() == [[2, 3]]  # not expert 4
    assert choose_experts(scores, 2).tolist() == [[4, 2]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_routes_in_fp32(dtype):
    config = replace(SMALL, num_experts_per_token=4)
    x = normal(31, SMALL.hidden_size).to(dtype)
    routing = moe_layer(config, dtype=dtype).gate(x)
    assert_same_bits(routing.experts, moe_layer(config, dtype=torch.float32).gate(x.float()).experts)
    assert routing.weights.dtype == torch.float32


def test_experts_that_no_token_chose_are_not_read():
    layer = moe_layer()
    x = normal(1, SMALL.hidden_size)
    chosen = set(layer.gate(x).experts.flatten().tolist())
    read, weights_of = [], layer.experts.weights_of
    layer.experts.weights_of = lambda e: read.append(e) or weights_of(e)
    layer(x[None])
    assert read == sorted(chosen)
    assert len(chosen) == SMALL.num_experts_per_token < SMALL.num_experts


def test_no_tokens_are_no_trouble():
    layer = moe_layer()
    assert layer(normal(1, 0, SMALL.hidden_size)).shape == (1, 0, SMALL.hidden_size)


def test_a_layer_without_a_shared_expert_lacks_just_its_part():
    config = replace(SMALL, num_shared_experts=0)
    layer, x = moe_layer(), normal(1, 7, SMALL.hidden_size)
    alone = KimiLinearForCausalLM(config, dtype=torch.float64).model.layers[2].block_sparse_moe
    alone.load_state_dict({name: w for name, w in layer.state_dict().items() if not name.startswith("shared")})
    with torch.no_grad():
        assert_same_bits(alone(x) + layer.shared_experts(x), layer(x))
