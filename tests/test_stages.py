"""Each stage alone, against its definition written out over pairs of tokens."""

import dataclasses

import pytest
import torch
from test_exact import LONG

from cases import GATES, draw_inputs, normal
from judge import assert_same_bits, assert_within_envelope, bounds_of
from kimi_linear.reference.chunked import (
    chunk_kda,
    chunk_layout,
    chunk_output,
    chunk_stages,
    cumulative_gate,
    decayed_products,
    invert_unit_lower,
    key_products,
    query_products,
    state_pass,
    wy_vectors,
)
from kimi_linear.reference.naive import recurrent_kda

CASE = dataclasses.replace(LONG, gate="mixed")


@pytest.fixture(params=["batch", "packed"])
def stages(request):
    case = CASE if request.param == "batch" else dataclasses.replace(CASE, B=1, lengths=(33, 0, 1, 60))
    x = draw_inputs(case)
    return chunk_stages(*x.args, initial_state=x.h0, cu_seqlens=x.cu_seqlens, chunk_size=32)


def pairwise(x, y, g):
    """<x_i, y_j exp(g_{j+1} + .. + g_i)> for j <= i, each exponent summed on its own."""
    C = x.shape[-2]
    M = x.new_zeros(*x.shape[:-2], C, C)
    for i in range(C):
        for j in range(i + 1):
            decay = torch.exp(g[..., j + 1 : i + 1, :].sum(-2))
            M[..., i, j] = (x[..., i, :] * y[..., j, :] * decay).sum(-1)
    return M


def assert_close(got, want, form):
    assert want.abs().max() > 0
    assert_within_envelope([got], [want], bounds_of([want], form))


def test_stage_1_is_the_cumulative_gate_and_every_decay_a_factor(stages):
    g, decays = stages.inputs.g, stages.decays
    assert_same_bits(decays.G.isinf(), g.cumsum(-2).isinf())
    finite = decays.G.isfinite()
    assert torch.allclose(decays.G[finite], g.cumsum(-2)[finite], rtol=1e-14, atol=0)
    assert_close(decays.to_end, g.flip(-2).cumsum(-2).roll(1, -2).index_fill(-2, torch.tensor(0), 0).flip(-2).exp(),
                 lambda: [cumulative_gate(g).to_end])  # fmt: skip
    for factors in (decays.from_start, decays.to_end, *(f for level in decays.levels for f in level)):
        assert factors.min() >= 0
        assert factors.max() <= 1


@pytest.mark.parametrize("gate", GATES)
def test_stage_2_is_the_decayed_product_of_every_pair(gate):
    x = draw_inputs(dataclasses.replace(CASE, gate=gate))
    y = chunk_stages(*x.args, chunk_size=32)
    k, g = y.inputs.k, y.inputs.g
    A = pairwise(y.inputs.beta_k, k, g).tril(-1)
    Aqk = pairwise(y.inputs.q, k, g)
    assert_within_envelope([y.A], [A], bounds_of([A], lambda: [key_products(y.inputs.beta_k, k, cumulative_gate(g))]))
    assert_close(y.Aqk, Aqk, lambda: [query_products(y.inputs.q, k, cumulative_gate(g))])
    assert not y.A.triu().any()
    assert not y.Aqk.triu(1).any()


def test_stage_3_is_the_inverse(stages):
    C = stages.A.shape[-1]
    want = torch.linalg.inv(torch.eye(C, dtype=torch.float64) + stages.A)
    assert_close(stages.T, want, lambda: [invert_unit_lower(stages.A)])
    assert_same_bits(stages.T.diagonal(dim1=-2, dim2=-1), torch.ones(*stages.T.shape[:-1], dtype=torch.float64))


def test_stage_3_is_exact_over_integers():
    A = torch.randint(-1, 2, (3, 64, 64), generator=torch.Generator().manual_seed(0)).tril(-1)
    A = A * (torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(1)) < 0.05)
    T = invert_unit_lower(A)
    assert torch.equal(T @ (A + torch.eye(64, dtype=torch.int64)), torch.eye(64, dtype=torch.int64).expand(3, 64, 64))
    assert A.any()


def test_stage_4_solves_for_w_and_u(stages):
    y, decays = stages.inputs, stages.decays
    system = torch.eye(32, dtype=torch.float64) + stages.A
    form = lambda: wy_vectors(invert_unit_lower(stages.A), y.beta_k, y.beta_v, decays)  # noqa: E731
    want = [
        torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
        for rhs in (y.beta_k * decays.from_start, y.beta_v)
    ]
    assert_within_envelope([stages.w, stages.u], want, bounds_of(want, form))


def test_stage_5_has_the_recurrence_state_at_every_chunk_start_and_its_writes():
    x = draw_inputs(CASE)
    y = chunk_stages(*x.args, initial_state=x.h0, chunk_size=32)
    for chunk, start in enumerate(range(0, CASE.T, 32)):
        _, S = recurrent_kda(*(a[:, :start] for a in x.args), initial_state=x.h0, output_final_state=True)
        got = y.by_chunk("S").unflatten(0, (CASE.B, -1))[:, chunk]
        assert_close(got, S, lambda: [y_of(x).by_chunk("S").unflatten(0, (CASE.B, -1))[:, chunk]])  # noqa: B023
    state, v_new = x.h0, []
    for t in range(CASE.T):
        token = [a[:, t : t + 1] for a in x.args]
        k = x.k[:, t].repeat_interleave(CASE.group, 1)
        pred = torch.einsum("bhk,bhkv->bhv", k * x.g[:, t].exp(), state)
        v_new.append(x.beta[:, t, :, None] * (x.v[:, t] - pred))
        _, state = recurrent_kda(*token, initial_state=state, output_final_state=True)
    assert_close(y.by_token("v_new"), torch.stack(v_new, 1), lambda: [y_of(x).by_token("v_new")])


def y_of(x):
    return chunk_stages(*x.args, initial_state=x.h0, chunk_size=32)


def test_stages_called_one_by_one_give_the_operator():
    x = draw_inputs(CASE)
    layout = chunk_layout(CASE.B, CASE.T, None, 32, x.q.device)
    q, k = (layout.split(a.repeat_interleave(CASE.group, 2)) for a in (x.q * CASE.K**-0.5, x.k))
    v, g, beta = layout.split(x.v), layout.split(x.g), layout.split(x.beta[..., None])
    decays = cumulative_gate(g)
    T = invert_unit_lower(key_products(beta * k, k, decays))
    w, u = wy_vectors(T, beta * k, beta * v, decays)
    S, v_new, left = state_pass(w, u, k, decays, layout.longest_first(x.h0), layout.steps)
    o_inter, o_intra = chunk_output(q, query_products(q, k, decays), S, v_new, decays)
    o, state = x.call(chunk_kda, chunk_size=32)
    assert_same_bits(layout.join(o_inter + o_intra), o)
    assert_same_bits(layout.segment_order(left), state)


def test_layout_splits_and_joins_every_token_once_and_zeroes_the_rest():
    x = torch.arange(1.0, 101).reshape(1, 100, 1, 1)
    layout = chunk_layout(1, 100, [0, 40, 40, 41, 97], 16, x.device)
    chunks = layout.split(x)
    assert chunks.shape == (1, 3 + 0 + 1 + 4, 16, 1)
    assert chunks[0, 0, :, 0].tolist() == list(range(42, 58))  # the longest segment's first chunk
    assert chunks.sum() == x[:, :97].sum()
    joined = layout.join(chunks)
    assert_same_bits(joined[:, :97], x[:, :97])
    assert not joined[:, 97:].any()


def test_a_long_segment_beside_many_short_ones_pads_nothing():
    offsets = [0, *range(1, 301), 300 + 6400]
    layout = chunk_layout(1, offsets[-1], offsets, 64, torch.device("cpu"))
    assert len(layout.segment) == 300 + 100
    assert [s.stop - s.start for s in layout.steps] == [301] + [1] * 99


def test_by_chunk_orders_by_segment_then_time():
    x = draw_inputs(dataclasses.replace(CASE, B=1, lengths=(33, 0, 1, 60)))
    y = chunk_stages(*x.args, initial_state=x.h0, cu_seqlens=x.cu_seqlens, chunk_size=32)
    starts = y.by_chunk("S")
    assert_same_bits(starts[0], x.h0[0])  # segment 0: chunks 0 and 1
    assert_same_bits(starts[2], x.h0[2])  # segment 2: one chunk
    assert_same_bits(starts[3], x.h0[3])  # segment 3: chunks 3 and 4
    assert len(starts) == 5


def test_no_intermediate_is_larger_than_the_states_or_the_rows(monkeypatch):
    """Recursive halving needs no [C, C, K] tensor: nothing grows with C * C * K or beyond the inputs."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    g = torch.randn(1, 1, 64, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).abs().neg()
    with Watch():
        decayed_products(g, g, cumulative_gate(g), g[..., 0])
    assert largest == 64 * 64  # the result itself


def test_chunk_size_changes_the_result_by_rounding_only():
    x = draw_inputs(CASE)
    exact = x.call(recurrent_kda)
    for chunk_size in (16, 32, 64, 128):
        bounds = bounds_of(exact, lambda: x.call(chunk_kda, chunk_size=chunk_size))  # noqa: B023
        assert_within_envelope(x.call(chunk_kda, chunk_size=chunk_size), exact, bounds)


def test_normal_draws_are_not_all_zero():
    assert normal(torch.Generator().manual_seed(0), 4).abs().min() > 0


@pytest.mark.parametrize("lengths", [None, (33, 0, 1, 60)], ids=["batch", "packed"])
@pytest.mark.parametrize("window", [1, 32 * 4 * 20 * 2])
def test_windows_over_the_chunks_change_the_result_by_rounding_only(lengths, window, monkeypatch):
    x = draw_inputs(dataclasses.replace(CASE, B=2 if lengths is None else 1, lengths=lengths))
    exact = x.call(recurrent_kda)
    bounds = bounds_of(exact, lambda: x.call(chunk_kda, chunk_size=32))
    calls = []
    monkeypatch.setattr("kimi_linear.reference.chunked.forward.WINDOW", window)
    monkeypatch.setattr(
        "kimi_linear.reference.chunked.forward.cumulative_gate", lambda g: calls.append(g.shape) or cumulative_gate(g)
    )
    assert_within_envelope(x.call(chunk_kda, chunk_size=32), exact, bounds)
    assert len(calls) > 1
    assert sum(shape[1] for shape in calls) == len(chunk_stages(*x.args, cu_seqlens=x.cu_seqlens, chunk_size=32).G[0])


def test_windows_are_runs_of_steps_of_at_most_so_many_chunks():
    layout = chunk_layout(1, 500, [0, 100, 200, 500], 16, torch.device("cpu"))
    groups = list(layout.windows(7))
    assert [step for group in groups for step in group] == list(layout.steps)
    assert all(group[-1].stop - group[0].start <= 7 for group in groups)
    assert len(groups) < len(layout.steps)
    assert list(layout.windows(1)) == [(step,) for step in layout.steps]
