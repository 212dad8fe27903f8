"""Front ends, decoding, refusals and memory: each check sees its bug, and nothing in the kernel without it."""

import pytest

from kimi_linear.conformance.adapter import load_adapter
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.catalogue import subset
from kimi_linear.conformance.mutants import MUTANTS, build
from kimi_linear.conformance.mutants.registry import BASES
from kimi_linear.conformance.panel import recurrent_kernel
from kimi_linear.conformance.suite import all_checks, check_by_id

BY_NAME = {mutant.name: mutant for mutant in MUTANTS}

SEEN = {
    "front.l2norm_unequal": ["EpsOutsideRoot", "EpsTenfold", "EpsAsFloor", "EpsOfMean", "EpsForgotten"],
    "front.bounded_sweep": ["BoundedAsClamp", "SoftplusForBounded", "BoundFixed", "BiasOutsideRate", "BiasForgotten"],
    "front.softplus_sweep": [
        "BiasPerHead",
        "RateFirstHead",
        "RateLogTaken",
        "PaddingActivated",
        "BoundedForSoftplus",
    ],
    "front.softplus_overflow": ["RateOverflows"],
    "front.softplus_high": ["SoftplusOverflows"],
    "front.whole_packed": ["GateFormKept"],
    "front.softplus_faint": ["SoftplusNaive", "GateActivationBf16"],
    "front.softplus_raw_zero": ["RawZeroNoGate"],
    "front.beta_extreme": ["SigmoidTwice", "LogitAsStrength", "DoubleForgotten", "SigmoidBf16", "LogitClamped"],
    "front_gradients.whole_batch": ["GradRateOfBatch", "GradNormProjection", "GradNormLength", "GradAfterSigmoid"],
    "front_gradients.bounded": ["GradBoundedSign", "GradBoundedRate", "GradDoubleForgotten"],
    "front_gradients.softplus": ["GradRateOfRate", "GradSoftplusSlope", "GradGateRaw", "GradBiasOfBatch"],
    "front_gradients.whole_packed": ["GradRateOfPadding"],
    "limit.front_gradients": ["GradRateOfTokens", "GradRateOfChannels", "GradBiasOfHeads", "GradBiasBf16"],
    "decode.prefill": ["PoolCopied", "SlotOfFirst", "DecodeOutputBefore", "DecodeGateLog2", "DecodeStateCut"],
    "decode.front": ["DecodeSigmoidTwice"],
    "decode.slots": ["SlotStride", "SlotWidth"],
    "decode.untouched": ["NextSlotCleared", "PoolRewritten"],
    "decode.strided_pool": ["PoolStride"],
    "decode.in_place": ["PoolCopied"],
    "decode.padding": ["PadWraps", "PadClamped", "PadRowsLeft"],
    "decode.drafts": ["DraftsAllKept", "DraftsOneShort", "DraftsOfFirst", "DraftsOneSlot"],
    "refusal.gate_channels": ["ShapesUnchecked"],
    "refusal.groups": ["GroupsUnchecked"],
    "refusal.key_dtype": ["DtypesUnchecked"],
    "refusal.positive_gate": ["GateUnchecked"],
    "refusal.packed_order": ["OffsetsUnchecked", "OffsetsUnnamed"],
    "refusal.state_rows": ["StatesUnchecked"],
    "refusal.slot_count": ["SlotsUnchecked"],
    "relation.offset": ["OffsetIgnored"],
    "relation.singleton": ["StridesIn32Bits"],
    "relation.one_projection": ["RowsDense"],
    "relation.expanded": ["ZeroStride"],
    "relation.dirty_memory": ["OutputAccumulated"],
    "relation.overwrite": ["NoDelta"],
    "relation.refilled": ["SegmentsByAddress"],
    "relation.linear_gradients": ["GradDirty"],
    "gradients.bound": ["MaskSelectsAfterExp"],
    "keys.cosine_0.9": ["InverseByPowers"],
    "relation.batch_order": ["StaleCache"],
}


def bench_of(kernel):
    return Bench(kernel, kernel.capabilities(), kernel.contract)


@pytest.mark.parametrize("check", SEEN)
def test_each_check_sees_its_bugs_and_passes_the_kernel_without_them(check):
    judge = check_by_id(check)
    for name in SEEN[check]:
        assert judge(bench_of(build(BY_NAME[name]))).failed, name
    for on in {BY_NAME[name].on for name in SEEN[check]}:
        assert judge(bench_of(BASES[on]())).status == "pass"


@pytest.mark.parametrize("family", ["agreement", "decode", "refusals"])
def test_a_recurrent_kernel_with_a_state_in_bf16_passes(family):
    bench = bench_of(recurrent_kernel("bf16", state="bf16"))
    verdicts = [check(bench) for check in all_checks() if check.family == family]
    assert not [(v.id, v.reason) for v in verdicts if v.failed]
    assert sum(verdict.status == "pass" for verdict in verdicts) >= 3


def test_contracts_of_one_kernel_are_compared_with_each_other():
    chunked = load_adapter("kimi_linear.conformance.adapters.chunked")
    caps = chunked.capabilities()

    class WrongAt32:
        identity = staticmethod(chunked.identity)
        capabilities = staticmethod(chunked.capabilities)

        @staticmethod
        def run(call, want):
            wrong = call.contract.chunk_size == 32
            return {name: x * (1 + 1e-3 * wrong) for name, x in chunked.run(call, want).items()}

    check = check_by_id("agreement.contracts")
    assert check(Bench(chunked, caps, caps.contracts[0])).status == "pass"
    assert check(Bench(WrongAt32(), caps, caps.contracts[0])).failed


def test_the_stress_is_for_full_runs_alone():
    ids = {full: {check.id for check in all_checks(full)} for full in (True, False)}
    assert "relation.stress" in ids[True] - ids[False]
    assert {"relation.rerun", "decode.prefill", "refusal.groups"} <= ids[False]
    assert any(case.family == "front" for case in subset(full=False))
