"""Kernels come from strangers: what does not load, contradicts itself or misbehaves gets a reason, and no more."""

import textwrap
from pathlib import Path

import pytest
import torch

from kimi_linear.conformance.adapter import (
    BadAdapterError,
    Capabilities,
    Contract,
    FrontForm,
    Pool,
    checked_capabilities,
    load_adapter,
)
from kimi_linear.conformance.limits import CASE_SECONDS
from kimi_linear.conformance.suite import run_suite
from kimi_linear.conformance.waivers import read_waivers
from strange_kernels import (
    CONTRACT,
    Correct,
    Foreign,
    Hangs,
    Overwrites,
    Raises,
    ReturnsInput,
    ReturnsNaN,
    ReturnsNothing,
    WrongDtype,
    WrongShape,
)

TOKENS = Contract(chunk_size=None)
TWO = ("shape.T=2", "shape.K=7")

MISBEHAVIOUR = {
    Raises: "raises RuntimeError: no such instruction",
    Hangs: "hangs: no result after 0.2 s",
    WrongShape: "o must be",
    WrongDtype: "o must be torch.bfloat16; got torch.float64",
    ReturnsInput: "returns its own input v as o",
    ReturnsNothing: "run() must return a tensor 'final_state'",
    Overwrites: "overwrites its input k",
}


@pytest.mark.parametrize("kernel", MISBEHAVIOUR, ids=lambda kernel: kernel.__name__)
def test_misbehaviour_fails_its_case_with_the_reason_and_the_run_goes_on(kernel):
    report = run_suite(kernel(), only=TWO, seconds=0.2 if kernel is Hangs else CASE_SECONDS)
    assert [verdict.status for verdict in report.verdicts] == ["fail", "fail"]
    for verdict in report.verdicts:
        assert MISBEHAVIOUR[kernel] in verdict.reason


def test_one_nan_is_found_where_it_is():
    (verdict,) = run_suite(ReturnsNaN(), only=["shape.K=7"]).verdicts
    assert "o is nan at [0, 3, 0, 0]" in verdict.reason


def test_a_declared_overwrite_is_no_failure():
    class Declared(Overwrites):
        def capabilities(self):
            return Capabilities(contracts=(CONTRACT,), overwrites=("k",))

    assert run_suite(Declared(), only=TWO).ok


def test_a_kernel_with_other_conventions_is_judged_in_its_own():
    ids = ("exact.square", "gate.slow", "strength.two", "values.square_state", "relation.signs")
    report = run_suite(Foreign(), only=ids)
    assert report.ok
    assert {verdict.id for verdict in report.verdicts if verdict.status == "skip"} == {"strength.two"}


def test_conventions_that_are_declared_wrongly_fail():
    class NotReally(Foreign):
        def gate(self, g):
            return g

    assert not run_suite(NotReally(), only=["gate.slow"]).ok


@pytest.mark.parametrize(
    ("caps", "complaint"),
    [
        (Capabilities(operations=("backward",)), "operations must name"),
        (Capabilities(operations=("chunk", "sparse")), "operations must be one of"),
        (Capabilities(operations=("chunk", "decode")), '"decode" and pool go together'),
        (Capabilities(pool=Pool()), '"decode" and pool go together'),
        (Capabilities(operations=("decode",), pool=Pool(nobody=(2**40,)), contracts=(TOKENS,)), "must fit int32"),
        (Capabilities(operations=("decode",), pool=Pool(drafts=-1), contracts=(TOKENS,)), "drafts must be"),
        (Capabilities(operations=("decode",), pool=Pool(index="int8"), contracts=(TOKENS,)), "pool index must be"),
        (Capabilities(plain=False), "needs the front end that every call goes through"),
        (Capabilities(plain=False, front_ends=(FrontForm(beta="sigmoid"),)), "beta_above_one must be False"),
        (Capabilities(front_ends=(FrontForm(l2norm_eps=None),)), "does nothing"),
        (Capabilities(front_ends=(FrontForm(gate="safe"),)), "front_ends gate must be one of"),
        (Capabilities(front_ends=(FrontForm(gate="bounded", lower_bound=5.0),)), "lower_bound must be negative"),
        (Capabilities(front_ends=(FrontForm(l2norm_eps=0.0),)), "l2norm_eps must be"),
        (Capabilities(log_base="2", front_ends=(FrontForm(gate="softplus"),)), "a raw gate has no log base"),
        (
            Capabilities(beta="logit", beta_above_one=False, front_ends=(FrontForm(),)),
            "a sigmoid in every call",
        ),
        (Capabilities(refuses=("nonsense",)), "refuses must be one of"),
        (Capabilities(packed=False, refuses=("packed_order",)), "such a call cannot be made"),
        (Capabilities(refuses=("slots",)), "there is no pool"),
        (Capabilities(alignment=3), "alignment must be a power of two"),
        (Capabilities(gate_dtype="bf16"), "gate_dtype must be one of"),
        (Capabilities(contracts=(Contract(activation="fast"),)), "activation must be one of"),
        (Capabilities(contracts=()), "contracts must name at least one"),
        (Capabilities(contracts=(Contract(io="fp8"),)), "io must be one of"),
        (Capabilities(contracts=(Contract(operand="int8"),)), "operand must be one of"),
        (Capabilities(contracts=(Contract(chunk_size=None),)), "needs the operation"),
        (Capabilities(contracts=(Contract(chunk_size=48),)), "chunk_size must be"),
        (Capabilities(beta="logit"), "beta_above_one"),
        (Capabilities(operations=("chunk", "backward"), log_base="2"), "gradients are judged for"),
        (Capabilities(square=True, K=(64,), V=(128,)), "size common"),
        (Capabilities(state_layout="HK"), "state_layout must be one of"),
    ],
)
def test_contradictions_are_refused_before_the_first_case(caps, complaint):
    class Contradicts(Correct):
        def capabilities(self):
            return caps

        def run(self, call, want):
            raise AssertionError("ran")

    with pytest.raises(BadAdapterError, match=complaint):
        run_suite(Contradicts())


def test_running_the_reference_by_accident_is_caught():
    naive = load_adapter("kimi_linear.conformance.adapters.naive")

    class Fallback(Correct):
        capabilities = staticmethod(naive.capabilities)
        run = staticmethod(naive.run)

    with pytest.raises(BadAdapterError, match="comparison of the reference with itself"):
        run_suite(Fallback(), only=TWO)
    assert run_suite(naive, full=False, only=["gate.slow"]).ok


def test_adapters_load_from_modules_objects_and_files(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent("""
            from kimi_linear.conformance.panel import chunk_kernel
            kernel = chunk_kernel(16, "fp32")
        """)
    )
    assert "chunk 16" in load_adapter(f"{file}:kernel").identity()
    assert "wrong" in load_adapter("kimi_linear.conformance.adapters.wrong").identity()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("no.such.module", "does not load: ModuleNotFoundError"),
        ("nowhere.py", "no such file"),
        ("kimi_linear.conformance.adapters.naive:missing", "AttributeError"),
        ("kimi_linear.conformance.limits", "must have a function capabilities"),
    ],
)
def test_what_does_not_load_says_why(where, message):
    with pytest.raises(BadAdapterError, match=message):
        load_adapter(where)


@pytest.mark.parametrize("name", ["naive", "chunked", "wrong", "transformers_torch"])
@pytest.mark.filterwarnings("ignore")
def test_shipped_adapters_are_short_and_declare_what_can_be_judged(name):
    adapter = load_adapter(f"kimi_linear.conformance.adapters.{name}")
    assert checked_capabilities(adapter).contracts
    with open(adapter.__file__) as file:
        assert len(file.readlines()) < 60


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["chunked", "transformers_torch"])
def test_other_peoples_and_our_own_correct_kernels_pass(name):
    adapter = load_adapter(f"kimi_linear.conformance.adapters.{name}")
    waivers = Path(adapter.__file__).with_suffix(".waivers")
    report = run_suite(adapter, full=False, waivers=read_waivers(waivers) if waivers.exists() else {})
    assert not [verdict for verdict in report.verdicts if verdict.failed]
    assert report.count("pass") > 40


def test_threads_of_torch_are_left_alone():
    before = torch.get_num_threads()
    run_suite(Correct(), only=["shape.T=2"])
    assert torch.get_num_threads() == before
