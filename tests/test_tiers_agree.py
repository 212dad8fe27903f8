"""The tiers compute one function: the chunk form against the recurrence, over everything the contract allows."""

import dataclasses
import functools

import pytest
import torch
from hypothesis import example, given, settings

from cases import GATES, Case, cases, draw_inputs
from judge import assert_within_envelope, bounds_of
from kimi_linear.reference import BoundedGate, FrontEnd, SoftplusGate
from kimi_linear.reference.chunked import chunk_kda, chunk_kda_backward
from kimi_linear.reference.naive import recurrent_kda, recurrent_kda_backward

PLAIN = Case(
    B=2,
    T=77,
    H=2,
    group=2,
    K=12,
    V=20,
    lengths=None,
    gate="typical",
    keys="random",
    beta="half_open",
    state=True,
    chunk_size=32,
    seed=0,
)
PACKED = dataclasses.replace(PLAIN, B=1, T=80, lengths=(0, 1, 33, 0, 43, 0))


@given(cases())
@example(PLAIN)
@example(PACKED)
def test_chunks_and_the_recurrence_agree_to_the_rounding_of_fp64_and_of_fp32(case):
    x = draw_inputs(case)
    chunk = functools.partial(chunk_kda, chunk_size=case.chunk_size)
    exact = x.call(recurrent_kda)
    naive_bounds = bounds_of(exact, lambda: x.call(recurrent_kda))
    chunk_bounds = bounds_of(exact, lambda: x.call(chunk))
    bounds = [torch.maximum(*pair) for pair in zip(naive_bounds, chunk_bounds, strict=True)]
    assert_within_envelope(x.call(chunk), exact, bounds)
    assert_within_envelope(x.to(torch.float32).call(recurrent_kda), exact, naive_bounds)
    assert_within_envelope(x.to(torch.float32).call(chunk), exact, bounds)


@settings(max_examples=30)
@given(cases(max_T=40))
@example(PLAIN)
@example(PACKED)
def test_adjoints_by_hand_and_autograd_through_chunks_equal_autograd_of_the_recurrence(case):
    x = draw_inputs(case)
    chunk = functools.partial(chunk_kda, chunk_size=case.chunk_size)
    exact, do, dht = by_autograd(recurrent_kda, x, case.seed)

    def by_hand(adjoint, x, **options):
        cotangents = (do.to(x.q.dtype), dht.to(x.q.dtype))
        grads = adjoint(*x.args, *cotangents, initial_state=x.h0, cu_seqlens=x.cu_seqlens, **options)
        return by_row(grads)

    def naive():
        return by_hand(recurrent_kda_backward, x)

    def chunked():
        return by_hand(chunk_kda_backward, x, chunk_size=case.chunk_size)

    bounds = bounds_of(by_row(exact), naive, chunked)
    assert_within_envelope(naive(), by_row(exact), bounds, gradients=True)
    assert_within_envelope(chunked(), by_row(exact), bounds, gradients=True)
    assert_within_envelope(by_row(by_autograd(chunk, x, case.seed)[0]), by_row(exact), bounds, gradients=True)
    in_fp32 = by_hand(chunk_kda_backward, x.to(torch.float32), chunk_size=case.chunk_size)
    assert_within_envelope(in_fp32, by_row(exact), bounds, gradients=True)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_through_chunks_are_finite_for_every_gate(gate, dtype):
    x = draw_inputs(dataclasses.replace(PLAIN, gate=gate, keys="repeated")).to(dtype)
    inputs = [y.clone().requires_grad_() for y in x.args]
    o, _ = chunk_kda(*inputs)
    grads = torch.autograd.grad(o.square().sum(), inputs)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[2].abs().sum() > 0


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
@pytest.mark.parametrize("beta", ["sigmoid", "double_sigmoid", None])
@pytest.mark.parametrize("case", [PLAIN, PACKED], ids=["batch", "packed"])
def test_tiers_agree_behind_either_gate_of_the_front_end(gate, beta, case):
    x = draw_inputs(case)
    HV = case.H * case.group
    x = dataclasses.replace(x, q=3 * x.q, k=2 * x.k, g=4 * torch.randn_like(x.g).float().double())
    A_log = torch.linspace(-2, 2, HV)
    dt_bias = torch.linspace(-4, 1, HV * case.K)
    gates = {"softplus": SoftplusGate(A_log, dt_bias), "bounded": BoundedGate(A_log, dt_bias)}
    options = {"front_end": FrontEnd(gate=gates[gate], beta=beta)}
    chunk = functools.partial(chunk_kda, chunk_size=case.chunk_size)
    exact = x.call(recurrent_kda, **options)
    bounds = bounds_of(exact, lambda: x.call(recurrent_kda, **options), lambda: x.call(chunk, **options))
    y = x.to(torch.float32)
    assert_within_envelope(x.call(chunk, **options), exact, bounds)
    assert_within_envelope(y.call(recurrent_kda, **options), exact, bounds)
    assert_within_envelope(y.call(chunk, **options), exact, bounds)


def test_half_precision_inputs_are_computed_in_fp32_and_only_the_output_is_rounded():
    for dtype in (torch.float16, torch.bfloat16):
        x = draw_inputs(PLAIN).to(dtype)
        for op in (recurrent_kda, chunk_kda):
            o, state = x.call(op)
            o32, state32 = x.to(torch.float32).call(op)
            assert o.dtype == dtype
            assert state.dtype == torch.float32
            assert torch.equal(o, o32.to(dtype))
            assert torch.equal(state, state32)


def by_autograd(op, x, seed):
    """Gradients [dq .. dbeta, dh0] of <o, do> + <final_state, dht> by autograd; do; dht."""
    inputs = [y.clone().requires_grad_() for y in x.args]
    N = len(x.q) if x.cu_seqlens is None else len(x.cu_seqlens) - 1
    h0 = x.q.new_zeros(N, x.v.shape[2], x.q.shape[3], x.v.shape[3]) if x.h0 is None else x.h0.clone()
    h0.requires_grad_()
    o, state = op(*inputs, initial_state=h0, output_final_state=True, cu_seqlens=x.cu_seqlens)
    rng = torch.Generator().manual_seed(seed + 1)
    do, dht = (torch.randn(y.shape, generator=rng).double() for y in (o, state))
    loss = (o * do).sum() + (state * dht).sum()
    return torch.autograd.grad(loss, [*inputs, h0], materialize_grads=True), do, dht  # T = 0 reads no q


def by_row(gradients):
    """dbeta has no channels: make each of its elements a row."""
    dq, dk, dv, dg, dbeta, dh0 = gradients
    return dq, dk, dv, dg, dbeta[..., None], dh0
