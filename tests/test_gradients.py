"""Derivatives: autograd's own check, adjoints by hand, and identities that need no reference."""

import dataclasses
import functools

import pytest
import torch
from test_exact import LONG

from cases import draw_inputs
from judge import assert_same_bits
from kimi_linear.conformance import rounded_runs
from kimi_linear.reference.chunked import chunk_kda, chunk_kda_backward
from kimi_linear.reference.naive import recurrent_kda, recurrent_kda_backward

SMALL = dataclasses.replace(LONG, B=1, T=5, H=1, group=2, K=3, V=2, seed=2)
ADJOINTS = [recurrent_kda_backward, functools.partial(chunk_kda_backward, chunk_size=32)]
IDS = ["naive", "chunked"]


def differentiable(case, op):
    x = draw_inputs(case)
    inputs = [y.clone().requires_grad_() for y in (*x.args, x.h0)]

    def f(q, k, v, g, beta, h0):
        return op(q, k, v, g, beta, initial_state=h0, output_final_state=True, cu_seqlens=x.cu_seqlens)

    return f, inputs


@pytest.mark.parametrize("op", [recurrent_kda, functools.partial(chunk_kda, chunk_size=16)], ids=IDS)
@pytest.mark.parametrize("lengths", [None, (2, 0, 1, 2)], ids=["batch", "packed"])
def test_first_and_second_derivatives_match_finite_differences(op, lengths):
    f, inputs = differentiable(dataclasses.replace(SMALL, lengths=lengths), op)
    assert torch.autograd.gradcheck(f, inputs)
    assert torch.autograd.gradgradcheck(f, inputs)


@pytest.fixture(params=["typical", "minus_inf", "mixed"])
def backward_case(request):
    x = draw_inputs(dataclasses.replace(LONG, gate=request.param, beta="up_to_two"))
    rng = torch.Generator().manual_seed(7)
    do, dht = (torch.randn(y.shape, generator=rng).double() for y in (x.v, x.h0))
    return x, do, dht


def assert_equal_to_rounding(a, b, size):
    """|a - b| is a few fp64 roundings of the terms that were added up, whose size is given."""
    roundings = 64  # additions behind one element, as a random walk: sqrt(4096)
    assert (a - b).abs().max() <= roundings * torch.finfo(torch.float64).eps * size.abs().max()
    assert a.abs().max() > 0


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=IDS)
def test_gradients_obey_the_identities_that_need_no_reference(adjoint, backward_case):
    """<dq, q> = <do, o>; <dk, k> + <dv, v> = 2 beta dbeta; sum <dv, v> + <dh0, h0> = sum <do, o> + <dht, ht>."""
    x, do, dht = backward_case
    o, ht = x.call(recurrent_kda)
    dq, dk, dv, _, dbeta, dh0 = adjoint(*x.args, do, dht, initial_state=x.h0)

    def by_key_head(y):
        return y.unflatten(2, (LONG.H, LONG.group)).sum(3)

    read = by_key_head((do * o).sum(-1))
    assert_equal_to_rounding((dq * x.q).sum(-1), read, read)
    written = (dk * x.k).sum(-1) + by_key_head((dv * x.v).sum(-1))
    assert_equal_to_rounding(written, 2 * by_key_head(x.beta * dbeta), written)
    given = (dv * x.v).sum() + (dh0 * x.h0).sum()
    assert_equal_to_rounding(given, (do * o).sum() + (dht * ht).sum(), read.abs().sum())


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=IDS)
def test_the_first_gate_gradient_is_the_state_times_its_gradient(adjoint):
    x = draw_inputs(LONG)
    do = torch.randn(x.v.shape, generator=torch.Generator().manual_seed(3)).double()
    grads = adjoint(*x.args, do, initial_state=x.h0)
    want = (x.h0 * grads.dh0).sum(-1)
    assert_equal_to_rounding(grads.dg[:, 0], want, want)


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=IDS)
def test_a_gate_of_minus_infinity_has_gradient_zero_and_cuts_the_past(adjoint):
    x = draw_inputs(dataclasses.replace(LONG, gate="typical"))
    x.g[:, 50] = -torch.inf
    do = torch.zeros_like(x.v)
    do[:, 50:] = 1
    grads = adjoint(*x.args, do, initial_state=x.h0)
    assert_same_bits(grads.dg[:, 50], torch.zeros_like(grads.dg[:, 50]))
    for past in (grads.dq[:, :50], grads.dk[:, :50], grads.dv[:, :50], grads.dg[:, :50], grads.dh0):
        assert not past.any()
    assert grads.dv[:, 50:].abs().min() > 0


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=IDS)
def test_gradients_are_linear_in_the_cotangents_to_the_bit_for_powers_of_two(adjoint, backward_case):
    x, do, dht = backward_case
    once = adjoint(*x.args, do, dht, initial_state=x.h0)
    twice = adjoint(*x.args, 2 * do, 2 * dht, initial_state=x.h0)
    for a, b in zip(once, twice, strict=True):
        assert_same_bits(2 * a, b)


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=IDS)
def test_gradients_of_rows_past_the_last_segment_are_zero(adjoint):
    x = draw_inputs(dataclasses.replace(LONG, B=1, lengths=(30, 0, 61)))
    grads = adjoint(*x.args, torch.ones_like(x.v), initial_state=x.h0, cu_seqlens=x.cu_seqlens)
    for dx in grads[:-1]:
        assert not dx[:, 91:].any()
        assert dx[:, :91].any()


@pytest.mark.parametrize("adjoint", ADJOINTS, ids=IDS)
def test_no_tokens_pass_the_state_gradient_through(adjoint):
    x = draw_inputs(dataclasses.replace(LONG, T=0))
    grads = adjoint(*x.args, x.v, torch.ones_like(x.h0), initial_state=x.h0)
    assert_same_bits(grads.dh0, torch.ones_like(x.h0))
    assert [tuple(y.shape) for y in grads[:-1]] == [tuple(y.shape) for y in x.args]


def test_strong_constant_gates_lose_no_digits_of_dg():
    """Under a gate of -5 a token still sees a trace of its neighbour: exp(-5). A dg made as a difference of sums
    over the chunk would drown it; made from the tree, its error is that of the terms themselves."""
    x = draw_inputs(dataclasses.replace(LONG, gate="minus5"))
    do = torch.randn(x.v.shape, generator=torch.Generator().manual_seed(3)).double()
    exact = recurrent_kda_backward(*x.args, do, initial_state=x.h0).dg
    samples = rounded_runs(lambda: [recurrent_kda_backward(*x.args, do, initial_state=x.h0).dg])[0]
    y = x.to(torch.float32)
    got = chunk_kda_backward(*y.args, do.float(), initial_state=y.h0).dg
    spread = torch.stack([(s - exact).abs() for s in samples]).amax(0)
    tail = slice(10, None)  # where the initial state is forgotten
    assert (got.double() - exact)[:, tail].abs().mean() <= 2 * spread[:, tail].mean()
