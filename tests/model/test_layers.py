"""The layers one by one: each against a second way to compute the same."""

from dataclasses import replace

import pytest
import torch

from judge import assert_same_bits, assert_within_envelope, bounds_of
from kimi_linear.reference.chunked import chunk_kda
from kimi_linear.reference.model import KDAState, short_convolution
from kimi_linear.reference.model.mla import Query, UpProjection, attend, attend_absorbed
from kimi_linear.reference.model.segments import Segments
from kimi_linear.reference.naive import recurrent_kda
from model_cases import K3_CONFIGS, SMALL, random_tokens, small_model


def normal(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Short convolution


def test_the_short_convolution_is_torchs_depthwise_convolution():
    x, weight = normal(2, 9, 7), normal(7, 1, 4, seed=1)
    got, _ = short_convolution(x, weight, torch.zeros(2, 3, 7, dtype=torch.float64))

    def by_torch():
        y = torch.nn.functional.conv1d(x.mT, weight, padding=3, groups=7)[..., :9].mT
        return [torch.nn.functional.silu(y)]

    assert_within_envelope([got], by_torch(), bounds_of(by_torch(), lambda: [reference_taps(x, weight)]))


def reference_taps(x, weight):
    padded = torch.cat([torch.zeros(2, 3, 7, dtype=x.dtype), x], dim=1)
    y = sum(padded[:, w : w + 9] * weight[:, 0, w] for w in range(4))
    return y * torch.sigmoid(y)


@pytest.mark.parametrize("split", range(10))
def test_the_short_convolution_goes_on_where_it_stopped(split):
    x, weight, start = normal(2, 9, 7), normal(7, 1, 4, seed=1), normal(2, 3, 7, seed=2)
    whole, end = short_convolution(x, weight, start)
    first, state = short_convolution(x[:, :split], weight, start)
    second, state = short_convolution(x[:, split:], weight, state)
    bounds = bounds_of([whole], lambda: [short_convolution(x, weight, start)[0]])
    assert_within_envelope([torch.cat([first, second], dim=1)], [whole], bounds)  # a sigmoid may round differently
    assert_same_bits(state, end)
    assert not torch.equal(end, start)


# KDA


def kda_layer(config=SMALL, **options):
    return small_model(config, **options).model.layers[1].self_attn


def zero_state(layer, N, config=SMALL):
    conv = torch.zeros(N, config.short_conv_kernel_size - 1, config.kda_width, dtype=torch.float64)
    S = torch.zeros(N, config.kda_num_heads, config.kda_head_dim, config.kda_head_dim, dtype=torch.float64)
    return KDAState(conv, conv, conv, S)


def test_the_operator_is_an_argument_and_decoding_has_its_own():
    calls = []

    def spy(name, op):
        def call(*args, **options):
            calls.append(name)
            return op(*args, **options)

        return call

    layer = kda_layer(kda=spy("many", chunk_kda), decode_kda=spy("one", recurrent_kda))
    x = normal(2, 5, SMALL.hidden_size)
    layer(x, Segments((5, 5), packed=False), zero_state(layer, 2))
    layer(x[:, :1], Segments((1, 1), packed=False), zero_state(layer, 2))
    layer(x[:1, :1], Segments((0, 1), packed=True), zero_state(layer, 2))
    assert calls == ["many", "one", "one"]


def test_an_operator_without_a_final_state_is_refused():
    layer = kda_layer(kda=lambda q, k, v, g, beta, **options: (v, None))
    with pytest.raises(TypeError, match="kda must return a final state"):
        layer(normal(1, 5, SMALL.hidden_size), Segments((5,), packed=False), zero_state(layer, 1))


@pytest.mark.parametrize("config", [SMALL, *K3_CONFIGS.values()], ids=["softplus_gate", *K3_CONFIGS])
def test_every_kind_of_gate_is_what_its_formula_says(config):
    layer, x = kda_layer(config), normal(2, 5, config.hidden_size)
    raw = (x @ layer.f_a_proj.weight.T @ layer.f_b_proj.weight.T).unflatten(-1, (config.kda_num_heads, -1))
    biased = raw + layer.dt_bias.reshape(config.kda_num_heads, -1)
    rate = layer.A_log.flatten()[:, None].exp()
    if config.gate_lower_bound is None:
        g = -rate * torch.log1p(biased.exp())
    else:
        g = config.gate_lower_bound * torch.sigmoid(rate * biased)
    gate = layer.front_end().gate
    exact = [g.detach()]
    assert_within_envelope([gate(raw).detach()], exact, bounds_of(exact, lambda: [gate(raw).detach()]))

    low_rank = not config.use_full_rank_gate
    want = x @ layer.g_a_proj.weight.T @ layer.g_b_proj.weight.T if low_rank else x @ layer.g_proj.weight.T
    exact = [want.detach()]
    assert_within_envelope([layer.output_gate(x).detach()], exact, bounds_of(exact, lambda: [layer.output_gate(x)]))
    assert hasattr(layer, "g_proj") != low_rank


@pytest.mark.parametrize("config", K3_CONFIGS.values(), ids=K3_CONFIGS)
def test_models_with_the_later_gates_run_and_differ(config):
    ids = random_tokens(1, 11)
    with torch.no_grad():
        bounded = small_model(config)(ids).logits
        softplus = small_model(replace(config, gate_lower_bound=None))(ids).logits
    assert bounded.isfinite().all()
    assert (bounded - softplus).abs().max() > 1e-3 * softplus.abs().max()


# MLA


def mla_inputs(t, L):
    H, N, P, V, R = 3, 10, 6, 14, 20
    q = Query(normal(t, H, N), normal(t, H, P, seed=1))
    up = UpProjection(normal(H, N, R, seed=2), normal(H, V, R, seed=3))
    return q, up, normal(L, R, seed=4), normal(L, P, seed=5), 0.25


@pytest.mark.parametrize(("t", "L"), [(1, 1), (1, 13), (5, 13), (13, 13), (0, 7)])
def test_the_absorbed_form_of_mla_equals_the_plain_one(t, L):
    inputs = mla_inputs(t, L)
    exact = [attend(*inputs)]
    bounds = bounds_of(exact, lambda: [attend(*inputs)], lambda: [attend_absorbed(*inputs)])
    assert_within_envelope([attend_absorbed(*inputs)], exact, bounds)
    assert exact[0].shape == (t, 3, 14)


def test_mla_is_softmax_attention_over_the_tokens_so_far():
    q, up, c, p, scale = mla_inputs(5, 13)
    got = attend(q, up, c, p, scale)
    want = torch.zeros_like(got)
    for i in range(5):
        for h in range(3):
            seen = range(13 - 5 + i + 1)
            score = [scale * (q.own[i, h] @ up.key[h] @ c[j] + q.shared[i, h] @ p[j]) for j in seen]
            weight = torch.stack(score).softmax(0)
            want[i, h] = sum(w * (up.value[h] @ c[j]) for w, j in zip(weight, seen, strict=True))
    inputs = q, up, c, p, scale
    assert_within_envelope([got], [want], bounds_of([want], lambda: [attend(*inputs)]))


def test_mla_ignores_what_comes_later_to_the_bit():
    q, up, c, p, scale = mla_inputs(5, 5)
    got = attend(q, up, c, p, scale)
    other = attend(q, up, torch.cat([c[:3], 9 + c[3:]]), p, scale)
    assert_same_bits(got[:3], other[:3])
    assert not torch.equal(got[3:], other[3:])


def test_mla_knows_no_positions():
    """The last token's output is the same whatever the order of the earlier ones."""
    layer = small_model().model.layers[3].self_attn
    latent = normal(7, SMALL.kv_lora_rank + SMALL.qk_rope_head_dim)
    q = normal(1, SMALL.num_attention_heads, SMALL.qk_head_dim)
    exact = [layer.attention(q, latent).detach()]
    bounds = bounds_of(exact, lambda: [layer.attention(q, latent).detach()])
    shuffled = latent[[4, 2, 0, 5, 1, 3, 6]]
    assert_within_envelope([layer.attention(q, shuffled).detach()], exact, bounds)


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_keeps_its_states_in_fp32(dtype):
    with torch.no_grad():
        out = small_model(dtype=dtype)(random_tokens(2, 9))
    assert out.logits.dtype == dtype
    assert out.logits.isfinite().all()
    for i, state in enumerate(out.cache.layers):
        if i in SMALL.mla_layers:
            assert {x.dtype for x in state.latents} == {dtype}
        else:
            assert state.S.dtype == torch.float32
            assert state.conv_q.dtype == dtype
