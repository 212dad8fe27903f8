"""Roundings that the conformance suite found on a GPU, at sizes that the interpreter shows."""

import pytest
import torch
from triton_inputs import DEVICE, make_call, reference

from kimi_linear.reference import FrontEnd, SoftplusGate
from kimi_linear.reference.naive import recurrent_kda
from kimi_linear.triton_kernels import chunk_kda, fused_recurrent_kda

HALF = torch.float16


def test_the_rounding_of_beta_is_not_in_every_channel_of_a_write():
    """Keys that are orthogonal write beta v: roundings of the products differ in sign, one of beta would not."""
    T, V = 16, 100
    rng = torch.Generator().manual_seed(0)
    k = torch.eye(T, dtype=HALF, device=DEVICE)[None, :, None]
    v = (1 + torch.rand(1, T, 1, V, generator=rng)).to(HALF).to(DEVICE)
    logits = torch.randn(1, T, 1, generator=rng).to(HALF).to(DEVICE)
    g = torch.zeros_like(k)
    _, state = chunk_kda(k, k, v, g, logits, front_end=FrontEnd(gate=None, l2norm_eps=None), output_final_state=True)
    strength = logits.double().sigmoid()
    bias = (state[0, 0].double() / (strength[0] * v[0, :, 0].double()) - 1).mean(-1)
    seen = (strength.to(HALF).double() / strength - 1).abs().max()
    assert seen > 1e-4, "a strength that rounds to itself proves nothing"
    assert bias.abs().max() < 0.4 * seen


def test_a_faint_row_in_fp16_keeps_its_direction_through_a_decay():
    T, K = 20, 20
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, 1, K, generator=rng) for _ in range(3))
    q[:, 5] *= 1e-6 / q[:, 5].norm()
    g = -0.5 * torch.rand(1, T, 1, K, generator=rng)
    beta = torch.randn(1, T, 1, generator=rng)
    x = [y.to(HALF) for y in (q, k, v, g, beta)]
    front_end = FrontEnd(gate=None)
    exact, _ = recurrent_kda(*(y.double() for y in x), front_end=front_end)
    o, _ = chunk_kda(*(y.to(DEVICE) for y in x), front_end=front_end)
    error = (o.cpu().double() - exact)[0, 5].norm() / exact[0, 5].norm()
    assert error < 0.05


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, in the branch not taken
@pytest.mark.parametrize("op", [chunk_kda, fused_recurrent_kda])
@pytest.mark.parametrize(("A_log", "raw"), [(90.0, -90.0), (88.0, -90.0), (-80.0, 80.0), (60.0, -62.0), (90.0, 1.0)])
def test_a_rate_and_a_softplus_that_are_no_fp32_numbers_may_have_a_product_that_is_one(op, A_log, raw):
    """e^90 is inf in fp32, and softplus(-90) less than its smallest normal number."""
    call = make_call(T=3, HV=1, seed=3)
    call["g"] = raw + 0.1 * call["g"]
    rate, bias = torch.full((1,), A_log, device=DEVICE), torch.zeros(1, 12, device=DEVICE)
    call["front_end"] = FrontEnd(SoftplusGate(rate, bias))
    o, state = op(**call, output_final_state=True)
    for got, wanted in zip((o, state), reference(**call), strict=True):
        error = (got.cpu().double() - wanted).norm() / wanted.norm()
        assert error < 2e-6
