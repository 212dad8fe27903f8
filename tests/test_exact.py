"""Checks without a tolerance: arithmetic modulo a prime, and floats whose every intermediate is an integer."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import Case, Inputs, draw_inputs, normal, offsets
from judge import assert_same_bits
from kimi_linear.conformance.algebra import compared, residues
from kimi_linear.conformance.modular import GENERATOR, PRIME, Modular
from kimi_linear.reference.chunked import chunk_kda, halving
from kimi_linear.reference.chunked.forward import run_all_stages
from kimi_linear.reference.naive import kda_scan, recurrent_kda

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def recurrence_in_python(x, start, end, S):
    """The recurrence on Python integers, one number at a time: the definition, read aloud."""
    q, k, v, g, beta = (y[0, start:end].tolist() for y in (x.q, x.k, x.v, x.g, x.beta))
    outputs = []
    for t in range(end - start):
        row = []
        for h, head in enumerate(S):
            keys, values = range(x.dims.K), range(x.dims.V)
            D = [[pow(GENERATOR, g[t][h][i], PRIME) * head[i][j] for j in values] for i in keys]
            pred = [sum(D[i][j] * k[t][h][i] for i in keys) for j in values]
            u = [beta[t][h] * (v[t][h][j] - pred[j]) for j in values]
            S[h] = [[(D[i][j] + k[t][h][i] * u[j]) % PRIME for j in values] for i in keys]
            row.append([x.scale * sum(S[h][i][j] * q[t][h][i] for i in keys) % PRIME for j in values])
        outputs.append(row)
    return outputs, S


def test_the_step_is_the_recurrence_over_python_integers():
    x = residues(seed=1, T=9)
    with Modular():
        o, S = kda_scan(x.q, x.k, x.v, x.g, x.beta, scale=x.scale, S=x.h0)
    want_o, want_S = recurrence_in_python(x, 0, 9, x.h0[0].tolist())
    assert o[0].tolist() == want_o
    assert S[0].tolist() == want_S


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(0, 140), st.sampled_from((16, 32, 64, 128)))
def test_the_chunk_form_equals_the_recurrence_modulo_a_prime(seed, T, chunk_size):
    x = residues(seed, T)
    row = compared(x, chunk_size)
    assert row.different == 0
    assert row.numbers == 2 * 3 * (T + 5)


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 70), min_size=1, max_size=6), st.sampled_from((16, 64)))
def test_packed_segments_equal_the_recurrence_of_each_modulo_a_prime(seed, lengths, chunk_size):
    x = residues(seed, sum(lengths) + 2, lengths=tuple(lengths))
    row = compared(x, chunk_size)
    assert row.different == 0
    assert row.numbers == 2 * 3 * (sum(lengths) + 5 * len(lengths))
    with Modular():
        assert not run_all_stages(x, chunk_size).by_token("o")[:, x.offsets[-1] :].any()


def shift_suffix(original):
    """A cumulative gate whose sums to the block's end include the token itself: one index off."""

    def broken(g):
        decays = original(g)
        levels = [level._replace(out_of_left=level.out_of_left + 1) for level in decays.levels[1:]]
        return decays._replace(levels=(decays.levels[0], *levels))

    return broken


@pytest.mark.parametrize("bug", ["gate off by one", "inverse of I - A", "state decays at the wrong row"])
def test_one_wrong_index_breaks_the_equality_modulo_a_prime(bug, monkeypatch):
    x = residues(seed=3, T=50)
    forward = "kimi_linear.reference.chunked.forward."
    if bug == "gate off by one":
        monkeypatch.setattr(forward + "cumulative_gate", shift_suffix(halving.cumulative_gate))
    if bug == "inverse of I - A":
        monkeypatch.setattr(forward + "invert_unit_lower", lambda A: halving.invert_unit_lower(-A))
    if bug == "state decays at the wrong row":
        original = halving.cumulative_gate
        monkeypatch.setattr(
            forward + "cumulative_gate",
            lambda g: original(g)._replace(from_start=original(g).from_start.roll(1, dims=-2)),
        )
    row = compared(x, 16)
    assert row.different > row.numbers / 2


def integer_inputs(seed, B=2, T=75, H=2, group=2, K=8, V=5, lengths=None):
    """Inputs whose every intermediate is a small integer: see the test that uses them."""
    rng = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=rng).double()

    HV, N = H * group, B if lengths is None else len(lengths)
    key = torch.randint(K, (B, T, H), generator=rng)
    key = torch.where(torch.rand(B, T, H, generator=rng) < 0.4, key.roll(1, 1), key)  # repeats
    sign = 2 * integers(0, 1, B, T, H, 1) - 1
    forget = torch.rand(B, T, HV, K, generator=rng) < 0.05
    return Inputs(
        q=integers(-2, 2, B, T, H, K),
        k=sign * torch.nn.functional.one_hot(key, K),
        v=integers(-3, 3, B, T, HV, V),
        g=torch.where(forget, -1e4, 0.0).double(),
        beta=integers(0, 1, B, T, HV),
        h0=integers(-3, 3, N, HV, K, V),
        cu_seqlens=None if lengths is None else offsets(lengths),
    )


def integer_recurrence(x, scale):
    """The recurrence in int64, written against a dictionary-like state: an independent third opinion."""
    q, k, v, beta = (y.long() for y in (x.q, x.k, x.v, x.beta))
    keep = (x.g == 0).long()
    B, T, HV, V = v.shape
    group = HV // q.shape[2]
    bounds = [(b, 0, T) for b in range(B)]
    if x.cu_seqlens is not None:
        ends = x.cu_seqlens.tolist()
        bounds = [(0, start, end) for start, end in pairwise(ends)]
    o, S = torch.zeros(B, T, HV, V), x.h0.long().clone()
    for n, (b, start, end) in enumerate(bounds):
        for t in range(start, end):
            for h in range(HV):
                key = k[b, t, h // group]
                S[n, h] *= keep[b, t, h, :, None]
                if beta[b, t, h]:
                    slot = key.abs().argmax()
                    S[n, h, slot] = key[slot] * v[b, t, h]  # the row is overwritten, whatever it held
                o[b, t, h] = scale * (q[b, t, h // group] @ S[n, h])
    return o, S


@pytest.mark.parametrize("lengths", [None, (0, 40, 1, 0, 27, 5)], ids=["batch", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_integer_inputs_give_identical_bits_in_every_tier_and_dtype(dtype, lengths, seed):
    """One-hot keys and beta in {0, 1} overwrite a row of the state or leave it; g in {0, -1e4} keeps or clears
    it; so the state holds entries of v and h0, and an output is a sum of eight small products."""
    x = integer_inputs(seed, B=2 if lengths is None else 1, lengths=lengths)
    want_o, want_S = integer_recurrence(x, scale=0.5)
    assert want_o.unique().numel() > 20
    y = x.to(dtype)
    for chunk_size in (None, 16, 32, 64, 128):
        op, options = (recurrent_kda, {}) if chunk_size is None else (chunk_kda, {"chunk_size": chunk_size})
        o, S = y.call(op, scale=0.5, **options)
        assert_same_bits(o, want_o.to(dtype))
        assert_same_bits(S, want_S.to(S.dtype))


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", [1, 8, 15, 16, 63, 64, 65, 90])
def test_outputs_before_t_ignore_everything_after_t(op, dtype, t):
    x = draw_inputs(dataclasses.replace(LONG, lengths=None)).to(dtype)
    other = draw_inputs(dataclasses.replace(LONG, lengths=None, seed=9, gate="minus30")).to(dtype)
    changed = [torch.cat([a[:, :t], 100 * b[:, t:]], 1) for a, b in zip(x.args, other.args, strict=True)]
    o, _ = x.call(op)
    got, _ = dataclasses.replace(x, **dict(zip(["q", "k", "v", "g", "beta"], changed, strict=True))).call(op)
    assert_same_bits(got[:, :t], o[:, :t])
    assert not torch.equal(got[:, t:], o[:, t:])


LONG = Case(
    B=2,
    T=100,
    H=2,
    group=2,
    K=12,
    V=20,
    lengths=None,
    gate="typical",
    keys="cosine_0.9",
    beta="half_open",
    state=True,
    chunk_size=64,
    seed=5,
)


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_batch_items_and_heads_do_not_touch_each_other(op, poison):
    x = draw_inputs(LONG).to(torch.float32)
    o, S = x.call(op)
    q, k, v, beta, h0 = (y.clone() for y in (x.q, x.k, x.v, x.beta, x.h0))
    for y in (q, k, v, beta, h0):
        y[1] = poison  # another batch item
    q[0, :, 1] = k[0, :, 1] = poison  # another key head, read by value heads 2 and 3
    v[0, :, 1] = beta[0, :, 1] = h0[0, 1] = poison  # another value head
    got, state = dataclasses.replace(x, q=q, k=k, v=v, beta=beta, h0=h0).call(op)
    assert_same_bits(got[0, :, 0], o[0, :, 0])
    assert_same_bits(state[0, 0], S[0, 0])
    assert not torch.equal(got[1], o[1])


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_packed_neighbours_and_rows_past_the_end_do_not_touch_a_segment(op, poison):
    case = dataclasses.replace(LONG, B=1, T=100, lengths=(30, 0, 1, 21, 40))
    x = draw_inputs(case).to(torch.float32)
    o, S = x.call(op)
    start, end = 31, 52  # segment 3
    outside = torch.ones(100, dtype=torch.bool)
    outside[start:end] = False
    poisoned = {name: getattr(x, name).clone() for name in ("q", "k", "v", "beta", "h0")}
    for name, y in poisoned.items():
        if name != "h0":
            y[:, outside] = poison
    poisoned["h0"][[0, 1, 2, 4]] = poison
    got, state = dataclasses.replace(x, **poisoned).call(op)
    assert_same_bits(got[:, start:end], o[:, start:end])
    assert_same_bits(state[3], S[3])
    assert not torch.equal(got[:, :30], o[:, :30])
    assert_same_bits(got[:, 92:], torch.zeros_like(o[:, 92:]))


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
def test_reruns_and_strided_inputs_give_the_same_bits(op):
    x = draw_inputs(LONG).to(torch.float32)
    o, S = x.call(op)

    def inside_a_larger_buffer(y):
        buffer = torch.full((*y.shape[:-1], 3 * y.shape[-1]), float("nan"))
        buffer[..., : 2 * y.shape[-1] : 2] = y
        return buffer[..., : 2 * y.shape[-1] : 2]

    strided = dataclasses.replace(
        x, **{n: inside_a_larger_buffer(getattr(x, n)) for n in ("q", "k", "v", "g", "beta")}
    )
    assert not strided.q.is_contiguous()
    for y in (x, strided):
        got, state = y.call(op)
        assert_same_bits(got, o)
        assert_same_bits(state, S)


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
def test_no_initial_state_is_the_zero_state(op):
    x = dataclasses.replace(draw_inputs(LONG), h0=None)
    zeros = dataclasses.replace(x, h0=normal(torch.Generator(), 2, 4, 12, 20) * 0)
    for a, b in zip(x.call(op), zeros.call(op), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("op", [recurrent_kda, chunk_kda])
def test_no_tokens_return_the_initial_state(op):
    x = draw_inputs(dataclasses.replace(LONG, T=0))
    o, S = x.call(op)
    assert o.shape == (2, 0, 4, 20)
    assert_same_bits(S, x.h0)
    assert x.call(op)[1].data_ptr() != x.h0.data_ptr()
