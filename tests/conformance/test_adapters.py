"""Shipped adapters that run on a CPU: each plugs its kernel in rightly, so a correct kernel passes.

A few checks each, those that a wrong layout, scale, offset or state shows in; whole runs are in
docs/conformance-matrix.md.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from kimi_linear.conformance.adapter import BadAdapterError, Call, Capabilities, checked_capabilities, load_adapter
from kimi_linear.conformance.on_device import moved, run_on
from kimi_linear.conformance.suite import benches, check_by_id, checked_identity
from kimi_linear.conformance.waivers import read_waivers
from strange_kernels import CONTRACT, Correct

PACKAGE = "kimi_linear.conformance.adapters"
WIRING = ("exact.square", "shape.K=7", "values.no_state", "relation.strides")
PACKED = ("exact.packed",)
SHORT = ("exact.one_token", "exact.wide", "packing.all_empty")  # the interpreter is slow
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()

CHECKS = {
    "naive": WIRING + PACKED,
    "chunked": WIRING + PACKED,
    "transformers_torch": ("shape.K=7", "values.no_state", "relation.strides"),
    "onnx_reference": WIRING,
    "triton_chunk": ("exact.wide", "packing.all_empty"),
    "triton_recurrent": SHORT,
    "triton_decode": (*SHORT, "decode.untouched", "refusal.slot_count"),
}


def first_bench(name):
    adapter = load_adapter(f"{PACKAGE}.{name}")
    return benches(adapter)[0]


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_speaks_its_kernels_conventions(name):
    if name.startswith("triton") and not INTERPRETED:
        pytest.skip("runs kernels on CPU tensors: needs TRITON_INTERPRET=1 and no GPU")
    bench = first_bench(name)
    assert checked_identity(bench.adapter, bench)
    for id in CHECKS[name]:
        verdict = check_by_id(id)(bench)
        assert verdict.status == "pass", f"{id}: {verdict.reason}"


@pytest.mark.filterwarnings("ignore")
def test_known_failures_of_transformers_still_fail():
    bench = first_bench("transformers_torch")
    for id in read_waivers(Path(bench.adapter.__file__).with_suffix(".waivers")):
        check = id.partition(" @ ")[0]
        assert check_by_id(check)(bench).status == "fail", f"{id} passes: remove the waiver"


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="fla is installed")
def test_an_adapter_without_its_package_says_which_is_missing():
    with pytest.raises(BadAdapterError, match="No module named 'fla'; this adapter needs fla-core and flash-linear"):
        checked_capabilities(load_adapter(f"{PACKAGE}.fla_recurrent"))


def call_in_poison():
    """A call whose q is cut out of a buffer of NaN."""
    q = torch.full((2, 4, 2, 6), torch.nan)[:, 1:, :, ::2]
    q.copy_(torch.randn(q.shape))
    return Call(q, q.clone(), torch.randn(2, 3, 2, 5), -torch.rand(2, 3, 2, 3), torch.rand(2, 3, 2), scale=1.0)


def test_inputs_travel_with_their_strides_and_the_buffer_around_them():
    q = call_in_poison().q
    there = moved(q, "cpu")
    assert there.data_ptr() != q.data_ptr()
    assert (there.stride(), there.storage_offset()) == (q.stride(), q.storage_offset())
    assert torch.equal(there, q)
    assert there._base is None
    around = torch.empty(0).set_(there.untyped_storage())
    assert around.isnan().sum() == 2 * 4 * 2 * 6 - q.numel()


def test_what_a_kernel_does_to_its_inputs_elsewhere_shows_here():
    call = call_in_poison()

    def kernel(there):
        assert there.q.data_ptr() != call.q.data_ptr()
        there.k.add_(1)
        return {"o": there.v, "final_state": torch.zeros(1)}

    k = call.k.clone()
    results = run_on("cpu", call, kernel)
    assert torch.equal(call.k, k + 1)
    assert results["o"].data_ptr() == call.v.data_ptr()
    assert results["final_state"].item() == 0


class BoundedGates(Correct):
    """A kernel that takes gates from -5 up, and checks that the judge keeps to that."""

    def capabilities(self):
        return Capabilities(contracts=(CONTRACT,), lowest_gate=-5.0)

    def run(self, call, want):
        assert call.g.min() >= -5
        return super().run(call, want)


def test_a_kernel_is_not_asked_for_gates_below_its_lowest():
    bench = benches(BoundedGates())[0]
    asked = {id: check_by_id(id)(bench) for id in ("gate.bound", "gate.strong", "exact.square", "relation.reset")}
    assert asked["gate.bound"].status == "pass", asked["gate.bound"].reason
    for id in ("gate.strong", "exact.square", "relation.reset"):
        assert asked[id].status == "skip"
        assert "are not declared" in asked[id].reason


def test_a_lowest_gate_that_takes_no_decay_is_refused():
    class TakesNoDecay(Correct):
        def capabilities(self):
            return Capabilities(lowest_gate=0.0)

    with pytest.raises(BadAdapterError, match="lowest_gate must be negative"):
        checked_capabilities(TakesNoDecay())
