"""The adapter of fla's chunk kernel calls it as it wants, shown on a stand-in: the kernel itself needs a GPU."""

import sys
from types import ModuleType

import pytest
import torch

from kimi_linear.conformance.adapter import FrontForm, front_end_of
from kimi_linear.conformance.adapters import fla_chunk
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.suite import check_by_id
from kimi_linear.reference.chunked import chunk_kda

FORMS = {False: FrontForm(gate="softplus", beta="sigmoid"), True: FrontForm(gate="bounded", beta="double_sigmoid")}


class FlatGradient(torch.autograd.Function):
    """A kernel whose backward gives the gradient of dt_bias as one row, whatever its shape was."""

    @staticmethod
    def forward(ctx, dt_bias):
        return dt_bias.flatten().clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def stand_in(q, k, v, g, beta, *, safe_gate, chunk_size, A_log, dt_bias, **options):
    bias = FlatGradient.apply(dt_bias).view(g.shape[-2:])
    q, k, g, beta = front_end_of(FORMS[safe_gate], A_log, bias)(q, k, g, beta)
    given = {name: options[name] for name in ("scale", "initial_state", "cu_seqlens", "output_final_state")}
    inputs = (x.float() for x in (q, k, v, g, beta))
    o, S = chunk_kda(*inputs, **given, chunk_size=chunk_size)
    return o.to(v.dtype), S


@pytest.fixture(params=["any_gate", "safe_gate"])
def kernel(request, monkeypatch):
    module = ModuleType("fla.ops.kda")
    module.chunk_kda = stand_in
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "fla.ops.kda", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fla_chunk, "run_on", lambda device, call, run: run(call))
    return getattr(fla_chunk, request.param)


def test_the_gradient_of_a_bias_comes_back_in_its_shape(kernel):
    caps = kernel.capabilities()
    verdict = check_by_id("limit.front_gradients")(Bench(kernel, caps, caps.contracts[1]))
    assert verdict.status == "pass", verdict.reason
    assert any("softplus" in name or "bounded" in name for name in verdict.ratios)


def test_only_the_bounded_gate_needs_more_than_eight_channels(kernel):
    channels = kernel.capabilities().K
    assert channels == (tuple(range(9, 257)) if kernel.safe else None)
