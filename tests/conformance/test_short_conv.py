"""A short convolution before the judge: its truth, its checks, and adapters that have nothing else."""

import json
import os
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from kimi_linear.cli.main import app
from kimi_linear.conformance.adapter import (
    BadAdapterError,
    Capabilities,
    Contract,
    ShortConv,
    checked_capabilities,
    load_adapter,
)
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.conv_gold import conv_bounds, conv_truth, gated, rectified
from kimi_linear.conformance.emulated_conv import CONV
from kimi_linear.conformance.exchange import export
from kimi_linear.conformance.isolation import Isolated
from kimi_linear.conformance.mutants import MUTANTS, build
from kimi_linear.conformance.mutants.registry import BASES
from kimi_linear.conformance.panel import panel
from kimi_linear.conformance.precision import DTYPES
from kimi_linear.conformance.short_conv import LENGTHS, D, conv_call, integers_of
from kimi_linear.conformance.suite import all_checks, benches, check_by_id, checked_identity, run_suite
from strange_kernels import CONTRACT, Correct

CHECKS = [check for check in all_checks() if check.family == "short_conv"]
TOKENS = Contract(io="fp32", operand="fp32", chunk_size=None)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
SEEN = {
    "ConvStateShifted": ("state", "split"),
    "ConvTapsReversed": ("exact", "envelope"),
    "ConvNotReset": ("packed",),
    "ConvStepLinear": ("update",),
    "ConvStateBf16": ("state",),
    "ConvShortPieceForgets": ("state", "split"),
    "ConvCentred": ("exact", "causality"),
    "ConvStateActivated": ("state", "split"),
    "ConvStateIgnored": ("exact", "split"),
    "ConvPoolCopied": ("update",),
    "ConvPadWraps": ("update_slots",),
    "ConvSumsBf16": ("envelope", "update"),
}


def bench_of(kernel):
    return Bench(kernel, kernel.capabilities(), kernel.contract)


def statuses(bench, checks=CHECKS):
    return {check.id.removeprefix("short_conv."): check(bench).status for check in checks}


def test_every_planted_bug_of_a_convolution_is_seen_where_it_should_be():
    planted = {mutant.name: mutant for mutant in MUTANTS if mutant.group == "short_conv"}
    assert planted.keys() == SEEN.keys()
    for name, checks in SEEN.items():
        found = statuses(bench_of(build(planted[name])))
        assert {found[check] for check in checks} == {"fail"}, (name, found)
    for on in {mutant.on for mutant in planted.values()}:
        assert set(statuses(bench_of(BASES[on]())).values()) == {"pass"}


def test_every_correct_kernel_passes():
    assert len(CHECKS) == 9
    for kernel in panel():
        assert set(statuses(bench_of(kernel)).values()) == {"pass"}, kernel.identity()


def test_the_truth_is_that_of_torchs_convolution():
    bench = bench_of(Correct())
    call = conv_call(bench)
    state = call.initial_state.double()
    seen = torch.cat([state, call.x.double().transpose(1, 2)], 2)
    weight = call.weight.double()[:, None]
    want = torch.nn.functional.silu(torch.nn.functional.conv1d(seen, weight, groups=D)).transpose(1, 2)
    got = conv_truth(call, state.transpose(1, 2), gated)
    torch.testing.assert_close(got["y"], want, rtol=1e-12, atol=1e-12)
    assert torch.equal(got["final_state"], seen[:, :, -3:].transpose(1, 2))


def test_segments_of_the_truth_are_sequences_of_their_own():
    bench = bench_of(Correct())
    call = conv_call(bench, lengths=LENGTHS)
    assert min(LENGTHS) == 0
    assert sum(0 < length < 3 for length in LENGTHS) == 2
    whole = conv_truth(call, call.initial_state.transpose(1, 2), gated)
    part = replace(call, x=call.x[:, 5:7], initial_state=call.initial_state[3:4], cu_seqlens=None)
    alone = conv_truth(part, part.initial_state.transpose(1, 2), gated)
    assert torch.equal(whole["y"][:, 5:7], alone["y"])
    assert torch.equal(whole["final_state"][3], alone["final_state"][0])
    assert torch.equal(whole["final_state"][1], call.initial_state[1].T.double())


@pytest.mark.parametrize("io", ["fp32", "bf16", "fp16"])
def test_silu_of_the_integers_is_exact_in_every_format(io):
    call = integers_of(conv_call(replace(bench_of(Correct()), contract=Contract(io=io))))
    dtype = DTYPES[io]
    assert call.x.dtype == dtype
    y = conv_truth(call, call.initial_state.transpose(1, 2), rectified)["y"]
    assert (y == 0).sum() > 20
    assert (y > 0).sum() > 20
    assert torch.equal(y.to(dtype).double(), y)
    before = conv_truth(call, call.initial_state.transpose(1, 2), lambda x: x)["y"]
    assert torch.equal(torch.nn.functional.silu(before.float()).to(dtype).double(), y)


def test_an_error_of_ten_roundings_is_over_the_envelope_and_one_is_not():
    bench = bench_of(Correct())
    call = conv_call(bench)
    state = call.initial_state.transpose(1, 2)
    want, bounds = conv_truth(call, state, gated)["y"], conv_bounds(call, state, CONTRACT)
    one = (want.to(torch.bfloat16).double() - want).square().mean(-1).sqrt() / bounds
    ten = (want * (1 + 10 * 2.0**-8) - want).square().mean(-1).sqrt() / bounds
    assert one.max() < 1
    assert ten.min() > 4


@pytest.mark.parametrize("name", ["short_convolution", "triton_short_conv"])
@pytest.mark.filterwarnings("ignore")
def test_shipped_adapters_of_a_convolution_pass_all_and_are_asked_nothing_else(name):
    if name.startswith("triton") and not INTERPRETED:
        pytest.skip("runs kernels on CPU tensors: needs TRITON_INTERPRET=1 and no GPU")
    adapter = load_adapter(f"kimi_linear.conformance.adapters.{name}")
    bench = benches(adapter)[0]
    assert checked_identity(adapter, bench)
    assert set(statuses(bench).values()) == {"pass"}
    others = [check for check in all_checks(full=False) if check.family != "short_conv"]
    assert set(statuses(bench, others).values()) == {"skip"}


def test_a_convolution_in_a_process_of_its_own_is_judged_alike(tmp_path):
    isolated = Isolated("kimi_linear.conformance.adapters.short_convolution")
    try:
        bench = Bench(isolated, isolated.capabilities(), TOKENS)
        ids = ["short_conv.update", "short_conv.update_slots", "short_conv.packed"]
        assert {check_by_id(id)(bench).status for id in ids} == {"pass"}
    finally:
        isolated.close()


def test_a_wrong_shape_and_a_lack_of_steps_have_their_words():
    class Short(Correct):
        def convolve(self, call, want):
            return {name: y[..., :-1] for name, y in super().convolve(call, want).items()}

    verdict = check_by_id("short_conv.exact")(bench_of(Short()))
    assert verdict.failed
    assert "y of a convolution must be [2, 11, 20], torch.bfloat16; got [2, 11, 19]" in verdict.reason
    kernel = Correct()
    for fields, id, words in (
        ({"update": False}, "update", "a step of the short convolution is not declared"),
        ({"packed": False}, "packed", "a short convolution of packed segments is not declared"),
    ):
        caps = replace(kernel.capabilities(), short_conv=replace(CONV, **fields))
        verdict = check_by_id(f"short_conv.{id}")(Bench(kernel, caps, CONTRACT))
        assert (verdict.status, verdict.reason) == ("skip", words)


def test_a_kernel_without_a_convolution_is_not_asked_for_one():
    kernel = Correct()
    caps = replace(kernel.capabilities(), operations=("chunk",), short_conv=None, pool=None)
    verdicts = [check(Bench(kernel, caps, CONTRACT)) for check in CHECKS]
    assert {(verdict.status, verdict.reason) for verdict in verdicts} == {
        ("skip", "a short convolution is not declared")
    }


@pytest.mark.parametrize(
    ("caps", "message"),
    [
        (Capabilities(short_conv=ShortConv()), '"short_conv" and short_conv go together'),
        (Capabilities(("chunk", "short_conv")), '"short_conv" and short_conv go together'),
        (Capabilities(("short_conv",), (TOKENS,), short_conv=ShortConv(taps=())), "taps must be at least 2"),
        (Capabilities(("short_conv",), (TOKENS,), short_conv=ShortConv(layout="KV")), "layout must be one of"),
    ],
)
def test_a_convolution_that_contradicts_itself_is_refused(caps, message):
    class Declares(Correct):
        def capabilities(self):
            return caps

    with pytest.raises(BadAdapterError, match=message):
        checked_capabilities(Declares())


def test_an_adapter_without_the_function_that_it_declares_is_refused(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text(
        "from kimi_linear.conformance.adapter import Capabilities, Contract, ShortConv\n"
        "def capabilities():\n"
        "    return Capabilities(('short_conv',), (Contract(chunk_size=None),), short_conv=ShortConv())\n"
        "def identity():\n    return 'nothing'\n"
        "def run(call, want):\n    return {}\n"
    )
    with pytest.raises(BadAdapterError, match=r"need a function convolve\(call, want\); there is none"):
        checked_capabilities(load_adapter(str(file)))


def test_a_reference_that_does_not_say_so_is_caught():
    adapter = load_adapter("kimi_linear.conformance.adapters.short_convolution")

    class Disguised:
        capabilities, convolve = staticmethod(adapter.capabilities), staticmethod(adapter.convolve)

        @staticmethod
        def identity():
            return "my kernel"

    with pytest.raises(BadAdapterError, match="short_convolution"):
        run_suite(Disguised(), full=False, only=["short_conv.exact"])


def test_a_convolution_does_not_travel_by_file(tmp_path):
    done = export(tmp_path / "calls", Correct().capabilities(), only=["short_conv.exact"])
    assert done.skipped == {"short_conv.exact": "a short convolution does not travel by file"}
    assert json.loads((tmp_path / "calls" / "manifest.json").read_text())["calls"] == []


def test_the_command_judges_a_convolution_alone(tmp_path):
    where = "kimi_linear.conformance.adapters.short_convolution"
    said = CliRunner().invoke(app, ["conformance", "run", where, "--json", str(tmp_path / "report.json")])
    assert said.exit_code == 0, said.output
    counts = json.loads((tmp_path / "report.json").read_text())["counts"]
    assert counts["pass"] == len(CHECKS)
