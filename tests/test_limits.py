"""Where KDA becomes something older: DeltaNet, Gated DeltaNet, a pure decay, a lookup; and where calls join."""

import dataclasses
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exact import LONG

from cases import draw_inputs
from judge import assert_same_bits, assert_within_envelope, bounds_of
from kimi_linear.reference.chunked import chunk_kda
from kimi_linear.reference.naive import recurrent_kda

TIERS = [recurrent_kda, functools.partial(chunk_kda, chunk_size=32)]
IDS = ["naive", "chunked"]


def gated_deltanet(q, k, v, alpha, beta, S):
    """Gated DeltaNet by its transition matrix: S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T."""
    B, T, HV, K = *v.shape[:3], q.shape[-1]
    o = torch.zeros_like(v)
    for b in range(B):
        for h in range(HV):
            state, kv_head = S[b, h], h * q.shape[2] // HV
            for t in range(T):
                key = k[b, t, kv_head]
                transition = torch.eye(K, dtype=v.dtype) - beta[b, t, h] * torch.outer(key, key)
                state = alpha[b, t, h] * transition @ state + beta[b, t, h] * torch.outer(key, v[b, t, h])
                o[b, t, h] = K**-0.5 * q[b, t, kv_head] @ state
            S = S.index_put((torch.tensor(b), torch.tensor(h)), state)
    return o, S


def deltanet(q, k, v, beta, S):
    """DeltaNet: no gate at all."""
    return gated_deltanet(q, k, v, torch.ones_like(beta), beta, S)


@pytest.mark.parametrize("op", TIERS, ids=IDS)
def test_one_gate_for_all_channels_is_gated_deltanet(op):
    x = draw_inputs(LONG)
    x = dataclasses.replace(x, g=x.g[..., :1].expand_as(x.g))
    bounds = bounds_of(x.call(op), lambda: x.call(op))
    want = gated_deltanet(x.q, x.k, x.v, x.g[..., 0].exp(), x.beta, x.h0)
    assert_within_envelope(x.call(op), want, bounds)
    one_channel_differs = dataclasses.replace(x, g=torch.cat([x.g[..., :1] / 2, x.g[..., 1:]], -1))
    with pytest.raises(AssertionError, match="ratio"):
        assert_within_envelope(one_channel_differs.call(op), want, bounds)


@pytest.mark.parametrize("op", TIERS, ids=IDS)
def test_no_gate_is_deltanet(op):
    x = draw_inputs(dataclasses.replace(LONG, gate="zero"))
    bounds = bounds_of(x.call(op), lambda: x.call(op))
    assert_within_envelope(x.call(op), deltanet(x.q, x.k, x.v, x.beta, x.h0), bounds)


@pytest.mark.parametrize("op", TIERS, ids=IDS)
def test_without_writes_only_the_decay_is_left(op):
    x = draw_inputs(dataclasses.replace(LONG, beta="zero", gate="slow"))
    bounds = bounds_of(x.call(op), lambda: x.call(op))
    _, S = x.call(op)
    want = x.g.sum(1).exp()[..., None] * x.h0
    assert_within_envelope([S], [want], bounds[1:])
    assert not torch.equal(S, x.h0)


@pytest.mark.parametrize("op", TIERS, ids=IDS)
def test_a_gate_of_minus_infinity_starts_afresh(op):
    x = draw_inputs(LONG)
    cut = 64  # a chunk edge, so that both calls see the same chunks
    g = x.g.clone()
    g[:, cut] = -torch.inf
    o, S = dataclasses.replace(x, g=g).call(op)
    rest = [y[:, cut:] for y in (x.q, x.k, x.v, g, x.beta)]
    fresh_o, fresh_S = op(*rest, output_final_state=True)
    bounds = bounds_of((fresh_o, fresh_S), lambda: op(*rest, output_final_state=True))
    assert_within_envelope((o[:, cut:], S), (fresh_o, fresh_S), bounds)


@pytest.mark.parametrize("op", TIERS, ids=IDS)
def test_orthonormal_keys_read_back_the_last_value_written_at_the_query(op):
    x = draw_inputs(dataclasses.replace(LONG, keys="one_hot", beta="one", gate="zero", state=False))
    o, _ = op(x.k, *x.args[1:], scale=1.0)  # ask for the key that was just written
    assert_same_bits(o, x.v)


@settings(max_examples=15)
@given(data=st.data())
def test_chunks_split_anywhere_equal_one_call_through_the_state(data):
    op = functools.partial(chunk_kda, chunk_size=32)
    x = draw_inputs(dataclasses.replace(LONG, seed=data.draw(st.integers(0, 999))))
    cut = data.draw(st.integers(0, LONG.T))
    left, right = ([y[:, s] for y in x.args] for s in (slice(0, cut), slice(cut, None)))

    def split():
        o1, S = op(*left, initial_state=x.h0, output_final_state=True)
        o2, S = op(*right, initial_state=S, output_final_state=True)
        return torch.cat([o1, o2], 1), S

    exact = x.call(recurrent_kda)
    bounds = bounds_of(exact, lambda: x.call(op), split)
    assert_within_envelope(split(), exact, bounds)


def test_the_recurrence_split_anywhere_gives_the_same_bits():
    x = draw_inputs(LONG).to(torch.float32)
    o, S = x.call(recurrent_kda)
    for cut in (0, 1, 37, 99, 100):
        o1, S1 = recurrent_kda(*(y[:, :cut] for y in x.args), initial_state=x.h0, output_final_state=True)
        o2, S2 = recurrent_kda(*(y[:, cut:] for y in x.args), initial_state=S1, output_final_state=True)
        assert_same_bits(torch.cat([o1, o2], 1), o)
        assert_same_bits(S2, S)


@pytest.mark.parametrize("op", TIERS, ids=IDS)
def test_packed_segments_equal_separate_calls(op):
    x = draw_inputs(dataclasses.replace(LONG, B=1, T=100, lengths=(33, 0, 1, 66)))
    separate = []
    for n, (start, end) in enumerate([(0, 33), (33, 33), (33, 34), (34, 100)]):
        segment = [y[:, start:end] for y in x.args]
        separate.append(op(*segment, initial_state=x.h0[n : n + 1], output_final_state=True))
    want = torch.cat([o for o, _ in separate], 1), torch.cat([S for _, S in separate])
    bounds = bounds_of(want, lambda: x.call(op))
    assert_within_envelope(x.call(op), want, bounds)
    assert_same_bits(x.call(op)[1][1], x.h0[1])


@pytest.mark.parametrize("op", TIERS, ids=IDS)
def test_int32_offsets_equal_int64_offsets(op):
    x = draw_inputs(dataclasses.replace(LONG, B=1, T=100, lengths=(33, 67)))
    y = dataclasses.replace(x, cu_seqlens=x.cu_seqlens.int())
    for a, b in zip(x.call(op), y.call(op), strict=True):
        assert_same_bits(a, b)
