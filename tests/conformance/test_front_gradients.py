"""A backward through a kernel's own front end: gradients of raw projections and of the gate's parameters."""

import json
from dataclasses import replace

import pytest
import torch

from kimi_linear.conformance.adapter import Contract, FrontForm, front_end_of, load_adapter
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.by_autograd import gradients_of
from kimi_linear.conformance.catalogue import by_id
from kimi_linear.conformance.emulated import Emulated
from kimi_linear.conformance.exchange import export
from kimi_linear.conformance.explain import explain_one
from kimi_linear.conformance.front_gradients import errors_of_tokens_added, rate_slope
from kimi_linear.conformance.gold import envelopes_of, truth_of
from kimi_linear.conformance.guard import guarded_run, wanted
from kimi_linear.conformance.panel import chunk_kernel
from kimi_linear.conformance.problem import problems_of
from kimi_linear.conformance.report import text
from kimi_linear.conformance.suite import check_by_id, run_suite
from kimi_linear.reference.naive import recurrent_kda
from strange_kernels import CONTRACT, Correct

STEP = 1e-6
FINE = Contract(io="fp64", operand="fp64", accumulate="fp64", state="fp64", chunk_size=None)
GATES = {"softplus": FrontForm(gate="softplus", beta="sigmoid"), "bounded": FrontForm(gate="bounded", beta="sigmoid")}
PARAMETERS = {"dA_log", "ddt_bias"}


def problems(id, contract=CONTRACT, **knobs):
    caps = replace(chunk_kernel(32, "bf16").capabilities(), contracts=(contract,))
    return problems_of(replace(by_id(id), **knobs), caps, contract)


def loss(problem, given):
    """<o, do> + <S, dht> of raw inputs, through the front end and the recurrence."""
    x, raw = problem.judge, problem.raw.holding(given)
    q, k, g, beta = front_end_of(raw.form, raw.A_log, raw.dt_bias)(raw.q, raw.k, raw.g, raw.beta)
    o, S = recurrent_kda(q, k, x.v, g, beta, **problem.options(), output_final_state=True)
    return ((o * x.do).sum() + (S * x.dht).sum()).item()


@pytest.mark.parametrize(
    "id", ["front_gradients.softplus", "front_gradients.bounded", "front_gradients.whole_packed"]
)
def test_the_truth_is_what_finite_differences_give(id):
    for problem in problems(id, FINE, K=3, V=2, group=2, B=1):
        truth, raw = truth_of(problem), problem.raw.by_gradient()
        assert raw.keys() == {"dq", "dk", "dg", "dbeta"} | PARAMETERS
        for name, x in raw.items():
            along = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
            there, back = (loss(problem, {name: x + step * along}) for step in (STEP, -STEP))
            assert (truth[name] * along).sum().item() == pytest.approx(
                (there - back) / (2 * STEP), rel=1e-6, abs=1e-7
            )


@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_a_rates_gradient_is_made_of_those_of_its_raw_gates(gate):
    for problem in problems(f"front_gradients.{gate}_sweep"):
        truth = truth_of(problem)
        parts = truth["dg"] * rate_slope(problem.raw)
        assert truth["dA_log"].abs().min() > 1e-3
        torch.testing.assert_close(parts.sum((0, 1, 3)), truth["dA_log"], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(truth["dg"].sum((0, 1)), truth["ddt_bias"], rtol=1e-10, atol=1e-12)


def test_errors_of_tokens_add_up_like_noise():
    (problem, *_) = problems("front_gradients.bounded")
    errors = torch.zeros(2, *problem.raw.g.shape, dtype=torch.float64)
    errors[1, 0, 2, 1], errors[0, 2, 4, 1] = 3.0, -4.0  # a token of another batch item, in another sample
    added = errors_of_tokens_added(problem.raw, errors)
    assert added["ddt_bias"].tolist() == pytest.approx([0, 5.0])
    y = (problem.raw.g + problem.raw.dt_bias).sum(-1)
    assert added["dA_log"].tolist() == pytest.approx([0, torch.stack([3 * y[0, 2, 1], 4 * y[2, 4, 1]]).norm().item()])
    bounds = envelopes_of(problem)
    assert bounds["dA_log"].shape == bounds["ddt_bias"].shape == (2,)


def test_parameters_have_gradients_where_the_gate_is_inside():
    wants = {str(problem.call.front): wanted(problem) & PARAMETERS for problem in problems("front_gradients.l2norm")}
    assert len(wants) == 3
    assert sorted(map(len, wants.values())) == [0, 2, 2]


def test_the_same_gate_of_other_raw_inputs_is_another_truth():
    (problem, *_) = problems("front_gradients.softplus")
    moved = replace(problem, raw=problem.raw.holding({"dq": 2 * problem.raw.q}))
    assert not torch.equal(truth_of(moved)["dq"], truth_of(problem)["dq"])


def test_a_backward_that_ends_at_the_front_end_is_declared_and_not_judged_beyond():
    kernel = chunk_kernel(32, "bf16")
    caps = replace(kernel.capabilities(), front_backward=False)
    for id in ("front_gradients.whole", "limit.front_gradients"):
        verdict = check_by_id(id)(Bench(kernel, caps, kernel.contract))
        assert (verdict.status, verdict.reason) == ("skip", "a backward through the front end is not declared")


class InTheChainRulesOrder(Correct):
    """Its gate is right; its backward multiplies by exp(A_log), of which the forward takes the root, at once."""

    def softplus_gate(self, x, A_log, dt_bias, lower_bound):
        half = torch.exp(A_log / 2)
        return -half * (half * self.softplus(x + dt_bias))


@pytest.mark.parametrize("id", ["softplus_against_rate", "softplus_overflow"])
def test_a_rate_past_the_largest_number_shows_an_order_of_multiplications_that_others_hide(id):
    def verdicts(kernel):
        bench = Bench(kernel, kernel.capabilities(), CONTRACT)
        ids = ("front.softplus_against_rate", "front_gradients.softplus_high_rate", f"front_gradients.{id}")
        return [check_by_id(one)(bench) for one in ids]

    *rest, overflow = verdicts(InTheChainRulesOrder())
    assert [verdict.status for verdict in rest] == ["pass", "pass"]
    assert overflow.failed
    assert "dg is" in overflow.reason
    assert [verdict.status for verdict in verdicts(Correct())] == ["pass"] * 3


class LosesAHead(Correct):
    """dA_log of the second value head is lost."""

    def host_gradients(self, grads, call):
        if "dA_log" in grads:
            grads["dA_log"][1] = 0.0
        return grads


def test_the_head_of_a_wrong_parameter_is_named_and_the_failure_is_explained():
    kernel = LosesAHead()
    bench = Bench(kernel, kernel.capabilities(), CONTRACT)
    verdict = check_by_id("front_gradients.whole")(bench)
    assert verdict.failed
    assert str(verdict.place) == "first bad row of dA_log: head 1"
    assert (verdict.place.rows, verdict.place.bad_rows, verdict.place.spread) == (2, 1, ("head 1 alone",))
    told = explain_one(verdict, bench, "kernel.py", seconds=0.0)
    assert told.first_wrong.name == "dA_log"
    assert told.ratio_map is None
    report = run_suite(kernel, only=["front_gradients.whole"])
    assert "first bad row of dA_log: head 1" in text(report, kernel, "kernel.py", False, [told])


def test_a_kernel_that_forgets_a_parameters_gradient_fails_with_the_name():
    class Forgets(Correct):
        def host_gradients(self, grads, call):
            return {name: x for name, x in grads.items() if name != "ddt_bias"}

    verdict = check_by_id("front_gradients.softplus")(Bench(Forgets(), Forgets().capabilities(), CONTRACT))
    assert verdict.failed
    assert "must return a tensor 'ddt_bias'" in verdict.reason


def test_autograd_gives_every_gradient_also_where_there_is_none():
    (problem, *_) = problems("front_gradients.whole", state="none", T=3)
    kernel = Emulated(CONTRACT)

    def without_queries(call):
        o, S = kernel.forward(replace(call, q=call.q.detach()))
        return {"o": o, "final_state": S}

    grads = gradients_of(problem.call, without_queries)
    assert grads.keys() == wanted(problem)
    assert grads["dh0"].abs().max() > 0
    assert not grads["dq"].any()
    assert grads["dk"].dtype == problem.call.k.dtype


def test_an_export_asks_for_the_parameters_gradients(tmp_path):
    done = export(tmp_path / "calls", Correct().capabilities(), only=["front_gradients.softplus"])
    (entry,) = json.loads((tmp_path / "calls" / "manifest.json").read_text())["calls"]
    assert done.calls == 1
    assert entry["outputs"]["dA_log"] == {"dtype": "float32", "shape": [2]}
    assert entry["outputs"]["ddt_bias"] == {"dtype": "float32", "shape": [2, 20]}


@pytest.mark.parametrize("name", ["naive", "chunked", "transformers_torch"])
@pytest.mark.filterwarnings("ignore")
def test_shipped_adapters_have_a_backward_through_their_front_end(name):
    adapter = load_adapter(f"kimi_linear.conformance.adapters.{name}")
    caps = adapter.capabilities()
    bench = Bench(adapter, caps, caps.contracts[-1])
    (problem, *_) = problems_of(by_id("front_gradients.l2norm"), caps, bench.contract)
    assert wanted(problem) <= guarded_run(adapter, problem, caps).keys()
    for id in ("front_gradients.l2norm_tiny", "limit.front_gradients"):
        verdict = check_by_id(id)(bench)
        assert verdict.status == "pass", f"{id}: {verdict.reason}"
