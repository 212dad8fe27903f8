"""Decoding from a pool: every convention of the field can be declared, and what goes wrong there is seen."""

from dataclasses import replace

import pytest
import torch

from kimi_linear.conformance.adapter import BadAdapterError, Capabilities, Contract, FrontForm, Pool, load_adapter
from kimi_linear.conformance.adapters import naive
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.panel import chunk_kernel, recurrent_kernel
from kimi_linear.conformance.suite import all_checks, check_by_id, run_suite

DECODE = [check.id for check in all_checks() if check.family == "decode"]
TOKENS = Contract(operand="fp32", chunk_size=None)


class Serving:
    """The reference's step in the conventions of a serving engine: slot 0 is the null block, states are V x K."""

    pool = Pool(index="int32", nobody=(0, -1), zero_rows=True)

    def capabilities(self):
        return Capabilities(
            operations=("decode",), contracts=(TOKENS,), state_layout="VK", pool=self.pool, front_ends=(FRONT,),
            plain=False, beta_above_one=False, gate_dtype="io",
        )  # fmt: skip

    def identity(self):
        return "kimi_linear.reference in a serving engine's conventions"

    def run(self, call, want):
        assert call.front is FRONT
        slots = torch.where(call.slot_indices > 0, call.slot_indices, -1).long()
        pool = call.state_pool.transpose(-1, -2)
        return {"o": naive.decode(replace(call, state_pool=pool, slot_indices=slots))}


FRONT = FrontForm(gate="bounded", beta="sigmoid")


class Returns(Serving):
    """Returns a new pool."""

    pool = Pool(index="int32", nobody=(0, -1), in_place=False)

    def run(self, call, want):
        pool = call.state_pool.clone()
        return {**super().run(replace(call, state_pool=pool), want), "state_pool": pool}


class TakesZeroForASlot(Serving):
    """Pads with -1 alone where 0 is padding too."""

    def run(self, call, want):
        pool = call.state_pool.transpose(-1, -2)
        return {"o": naive.decode(replace(call, state_pool=pool, slot_indices=call.slot_indices.long()))}


@pytest.mark.parametrize("kernel", [Serving(), Returns()], ids=["in_place", "returned"])
def test_the_conventions_of_a_serving_engine_can_be_declared(kernel):
    report = run_suite(kernel, only=[*DECODE, "shape.T=2", "relation.signs", "limit.deltanet", "probe.bits"])
    status = {verdict.id: verdict.status for verdict in report.verdicts}
    assert {id for id in DECODE if status[id] == "skip"} == {"decode.drafts"}
    assert report.ok, [(v.id, v.reason) for v in report.verdicts if v.failed]
    assert {status[id] for id in ("shape.T=2", "relation.signs", "limit.deltanet", "probe.bits")} == {"skip"}


def test_a_second_index_for_padding_is_asked_about():
    failed = [v for v in run_suite(TakesZeroForASlot(), only=DECODE).verdicts if v.failed]
    assert [v.id for v in failed] == ["decode.padding"]
    assert "index 0" in failed[0].reason


@pytest.mark.parametrize("check", DECODE)
@pytest.mark.parametrize(
    "kernel",
    [chunk_kernel(32, "bf16"), chunk_kernel(16, "fp16"), recurrent_kernel("fp32")],
    ids=lambda k: k.identity(),
)
def test_correct_decoders_pass(kernel, check):
    verdict = check_by_id(check)(Bench(kernel, kernel.capabilities(), kernel.contract))
    assert verdict.status == "pass", (verdict.reason, verdict.ratios)


@pytest.mark.parametrize("name", ["naive", "chunked"])
def test_the_reference_decodes_and_refuses_as_it_declares(name):
    adapter = load_adapter(f"kimi_linear.conformance.adapters.{name}")
    refusals = [check.id for check in all_checks() if check.family == "refusals"]
    report = run_suite(adapter, full=False, only=[*DECODE, *refusals])
    assert report.ok, [(v.id, v.reason) for v in report.verdicts if v.failed]
    assert {v.id for v in report.verdicts if v.status == "skip"} == {"refusal.slot_count", "refusal.slot_range"}


class Silent:
    """The reference with a check taken out, or with an error that says nothing."""

    identity = staticmethod(lambda: "kimi_linear.reference that is silent")
    capabilities = staticmethod(naive.capabilities)

    @staticmethod
    def run(call, want):
        try:
            return naive.run(replace(call, g=call.g.clamp(max=0)), want)
        except ValueError:
            raise ValueError("invalid argument") from None


def test_an_error_has_to_come_and_to_name_the_argument():
    report = run_suite(Silent(), full=False, only=["refusal.positive_gate", "refusal.packed_order"])
    said = {verdict.id: verdict.reason for verdict in report.verdicts if verdict.failed}
    assert said["refusal.positive_gate"] == "computes on; it declares an error that names g"
    assert said["refusal.packed_order"] == "the error does not name cu_seqlens: ValueError: invalid argument"


def test_a_decoder_that_is_the_reference_in_secret_is_caught():
    class Secret(Serving):
        def identity(self):
            return "a serving engine"

    with pytest.raises(BadAdapterError, match="comparison of the reference with itself"):
        run_suite(Secret(), only=DECODE)


def test_a_pool_that_should_stay_as_it_was_is_looked_at():
    class Both(Returns):
        def run(self, call, want):
            results = super().run(call, want)
            call.state_pool.copy_(results["state_pool"])
            return results

    (verdict,) = run_suite(Both(), only=["decode.in_place"]).verdicts
    assert verdict.failed
    assert "overwrites its input state_pool" in verdict.reason
