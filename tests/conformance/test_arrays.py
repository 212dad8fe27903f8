"""Kernels in NumPy, or in anything that speaks DLPack."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch

from kimi_linear.conformance import arrays
from kimi_linear.conformance.adapter import BadAdapterError, Capabilities, Contract
from kimi_linear.conformance.arrays import as_tensor, to_numpy
from kimi_linear.conformance.suite import run_suite
from strange_kernels import Correct

IDS = (
    "exact.packed",
    "shape.T=0",
    "shape.K=60",
    "gate.slow",
    "relation.strides",
    "relation.alone",
    "values.no_state",
)


class InNumPy:
    """The recurrence, token by token, in plain NumPy."""

    def __init__(self, io="fp32", slip=1.0):
        self.contract, self.slip = Contract(io=io, operand="fp32", chunk_size=None), slip

    def capabilities(self):
        return Capabilities(operations=("recurrent",), contracts=(self.contract,), arrays="numpy")

    def identity(self):
        return "a recurrence in NumPy"

    def run(self, call, want):
        assert all(not isinstance(x, torch.Tensor) for x in vars(call).values())
        q, k, v = (self.wide(x) for x in (call.q, call.k, call.v))
        (B, T, HV, V), (H, K) = v.shape, q.shape[2:]
        segments = [(b, 0, T) for b in range(B)]
        if call.cu_seqlens is not None:
            segments = [(0, *pair) for pair in zip(call.cu_seqlens[:-1], call.cu_seqlens[1:], strict=True)]
        states = np.zeros((len(segments), HV, K, V), np.float32)
        if call.initial_state is not None:
            states = call.initial_state.copy()
        o = np.zeros(v.shape, np.float32)
        for S, (b, start, end) in zip(states, segments, strict=True):
            for t in range(start, end):
                for head in range(HV):
                    key, query = k[b, t, head // (HV // H)], q[b, t, head // (HV // H)]
                    S[head] *= np.exp(call.g[b, t, head])[:, None]
                    u = call.beta[b, t, head] * (v[b, t, head] - key @ S[head])
                    S[head] += key[:, None] * u
                    o[b, t, head] = self.slip * call.scale * (query @ S[head])
        return {"o": self.narrow(o, call.v.dtype), "final_state": states}

    def wide(self, x):
        return as_tensor(x, half=self.contract.io == "bf16").float().numpy()

    def narrow(self, o, dtype):
        return o if self.contract.io == "fp32" else to_numpy(torch.from_numpy(o).bfloat16())


@pytest.mark.parametrize("io", ["fp32", "bf16"])
def test_a_kernel_in_numpy_is_judged(io):
    report = run_suite(InNumPy(io), only=IDS)
    assert report.count("pass") == len(IDS), [verdict.reason for verdict in report.verdicts]
    assert not run_suite(InNumPy(io, slip=1.05), only=["gate.slow"]).ok


def test_arrays_share_memory_so_that_a_write_or_an_input_as_result_is_seen():
    class Writes(InNumPy):
        def run(self, call, want):
            call.beta[...] = 0
            return super().run(call, want)

    class Returns(InNumPy):
        def run(self, call, want):
            return {**super().run(call, want), "o": call.v}

    (written,) = run_suite(Writes(), only=["gate.slow"]).verdicts
    assert "overwrites its input beta" in written.reason
    (returned,) = run_suite(Returns(), only=["gate.slow"]).verdicts
    assert "returns its own input v as o" in returned.reason


def test_any_dlpack_producer_is_a_result():
    class Foreign:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **options):
            return self.x.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.x.__dlpack_device__()

    class Wrapped(Correct):
        def run(self, call, want):
            return {name: Foreign(x) for name, x in super().run(call, want).items()}

    assert run_suite(Wrapped(), only=["gate.slow", "relation.alone"]).ok


def test_half_precision_is_bits_where_numpy_has_no_name_for_it(monkeypatch):
    x = torch.tensor([[1.0, -2.5], [3.0, float("nan")]], dtype=torch.bfloat16)
    if importlib.util.find_spec("ml_dtypes"):
        assert to_numpy(x).dtype.name == "bfloat16"
        assert torch.equal(as_tensor(to_numpy(x)).view(torch.uint16), x.view(torch.uint16))
    monkeypatch.setattr(arrays, "find_spec", lambda name: None)
    bits = to_numpy(x[:, 0])
    assert (bits.dtype, bits.tolist()) == (np.uint16, [0x3F80, 0x4040])
    assert as_tensor(bits, half=True).tolist() == [1.0, 3.0]
    assert as_tensor(bits).dtype == torch.uint16  # of a kernel without bf16 they are no numbers


def test_what_is_no_array_is_named():
    class Lists(InNumPy):
        def run(self, call, want):
            return {name: x.tolist() for name, x in super().run(call, want).items()}

    (verdict,) = run_suite(Lists(), only=["gate.slow"]).verdicts
    assert verdict.reason == "run() must return a tensor 'final_state'; got list"


def test_other_arrays_are_refused():
    class Other(Correct):
        def capabilities(self):
            return replace(super().capabilities(), arrays="jax")

    with pytest.raises(BadAdapterError, match="arrays must be one of"):
        run_suite(Other())
