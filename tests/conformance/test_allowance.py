"""How far off a kernel may be: formats, roundings, and the envelope made of them, by numbers worked out by hand."""

import dataclasses

import pytest
import torch

from kimi_linear.conformance.adapter import STAGES, Capabilities, Contract, FrontForm
from kimi_linear.conformance.cases import Case, tensors_of
from kimi_linear.conformance.gold import (
    ContractRounding,
    envelopes_of,
    given_to,
    rounded_chunks,
    rounded_inputs,
    rounded_recurrence,
    rounded_stages,
    row_envelope,
    rows_of,
    stage_truth,
    substitution,
    truth_of,
)
from kimi_linear.conformance.limits import FLOOR, FORWARD_RATIO, NOISE_RATIO, SAMPLES, SMALLEST, WRONG_RATIO, word_for
from kimi_linear.conformance.precision import LARGEST, MANTISSA, moved_grid, roundoff, to_format
from kimi_linear.conformance.problem import problem_of
from kimi_linear.reference.chunked.forward import run_all_stages
from kimi_linear.reference.naive import recurrent_kda
from kimi_linear.reference.operands import prepare

CAPS = Capabilities(operations=("chunk", "recurrent", "backward"))
CONTRACT = Contract(chunk_size=16)
CASE = Case("small", "small", "two chunks and a tail", T=37, K=6, V=5)


def of(contract=CONTRACT, x=None, **knobs):
    return problem_of(dataclasses.replace(CASE, **knobs), CAPS, contract, x)


# Formats


@pytest.mark.parametrize(
    ("name", "x", "want"),
    [
        ("bf16", 1 + 2.0**-7, 1 + 2.0**-7),
        ("bf16", 1 + 2.0**-8, 1.0),  # a tie, to even
        ("bf16", 1 + 3 * 2.0**-8, 1 + 2.0**-6),
        ("tf32", 1 + 2.0**-10, 1 + 2.0**-10),
        ("tf32", 1 + 2.0**-11, 1.0),
        ("tf32", -3 - 3 * 2.0**-10, -3 - 4 * 2.0**-10),
        ("tf32", 2.0**100, 2.0**100),
        ("tf32", torch.inf, torch.inf),
        ("fp16", 65520.0, torch.inf),
        ("fp32", 1 + 2.0**-24, 1.0),
        ("fp64", 1 + 2.0**-52, 1 + 2.0**-52),
    ],
)
def test_rounding_to_a_format_is_to_nearest_even(name, x, want):
    got = to_format(torch.tensor([x], dtype=torch.float64), name)
    assert got.dtype == torch.float64
    assert got.item() == want


def test_a_format_has_its_roundoff_and_its_largest_number():
    for name in MANTISSA:
        u = roundoff(name)
        one = torch.ones(1).double()
        assert to_format(one * (1 + 0.99 * u), name).item() == 1
        assert to_format(one * (1 + 2 * u), name).item() == 1 + 2 * u
        assert to_format(one * LARGEST[name], name).isfinite()


def test_gradients_pass_a_rounding_and_are_rounded_like_it():
    x = torch.tensor([1.01], requires_grad=True)
    to_format(x, "tf32").backward(torch.tensor([1 / 3]))
    assert x.grad.item() == pytest.approx(1 / 3, rel=1e-7)


def test_a_moved_grid_rounds_equal_numbers_equally_and_by_at_most_a_roundoff():
    x = torch.full((9,), 1 / 3).double()
    moved = moved_grid(x, "bf16", 1.37)
    assert moved.unique().numel() == 1
    assert moved[0] == to_format(x * 1.37, "bf16")[0] / 1.37
    assert 0 < (moved[0] - x[0]).abs() <= x[0] * roundoff("bf16")


# Roundings of a contract


def test_products_round_their_operands_and_sums_do_not():
    contract = Contract(io="fp32", operand="bf16", accumulate="fp32")
    x = torch.full((1, 3, 3), 1 / 3).double()
    rounding = ContractRounding(contract, seed=0)
    with rounding:
        product, total = x @ torch.eye(3).double(), x + 0
    assert roundoff("fp32") < (product - x).abs().max() * 3 <= 3 * roundoff("bf16")
    assert 0 < (total - x).abs().max() * 3 <= roundoff("fp32")


def test_samples_differ_by_seed_repeat_with_it_and_invert_by_either_order():
    draws = [[ContractRounding(CONTRACT, seed).fresh() for _ in range(2)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert all(1 <= s < 2 for row in draws for s in row)
    assert [ContractRounding(CONTRACT, seed).by_rows for seed in range(4)] == [False, True, False, True]


def test_every_other_sample_stores_with_errors_of_full_size_and_either_sign_that_repeat():
    x = 1 + torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first, again, other = (ContractRounding(CONTRACT, seed).stored(x, "bf16") / x - 1 for seed in (1, 1, 3))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert sorted(first.sign().unique().tolist()) == [-1, 1]
    torch.testing.assert_close(first.abs(), torch.full_like(x, roundoff("bf16")), rtol=1e-10, atol=0)
    on_grid = ContractRounding(CONTRACT, 0).stored(x, "bf16")
    assert torch.equal(on_grid, moved_grid(x, "bf16", ContractRounding(CONTRACT, 0).fresh()))


@pytest.mark.parametrize("C", [1, 8])
def test_substitution_inverts(C):
    A = torch.tril(torch.rand(2, C, C, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), -1)
    torch.testing.assert_close(substitution(A) @ (torch.eye(C) + A), torch.eye(C).double().expand(2, C, C))


def test_half_of_the_samples_invert_by_columns_and_half_by_blocks():
    x = of(keys="cosine_0.99")
    y = prepare(*x.inputs(), **x.options())

    def inverse(seed, by_rows):
        rounding = ContractRounding(CONTRACT, seed)
        rounding.by_rows = by_rows
        with rounding:
            return rounded_stages(y, CONTRACT, rounding).T

    for seed in (0, 1):
        one, other = (inverse(seed, by_rows) for by_rows in (False, True))
        assert 0 < (one - other).abs().max() < 1e-4


def test_stages_without_roundings_are_those_of_the_reference():
    exact = Contract("fp64", "fp64", "fp64", "fp64", 16, "sums", "fp64")
    x = of(exact, lengths=(20, 0, 16))
    y = prepare(*x.inputs(), **x.options())
    got, want = rounded_stages(y, exact, ContractRounding(exact, 1)), run_all_stages(y, 16)
    for name in ("G", "A", "Aqk", "T", "w", "u", "S", "v_new", "o_inter", "o_intra", "final_state"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-11, atol=1e-11)
    for ours, theirs in zip(got.inputs, want.inputs, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("form", [rounded_recurrence, rounded_chunks])
@pytest.mark.parametrize("flags", [(), ("gradients",)])
@pytest.mark.parametrize("knobs", [{"T": 0}, {"lengths": (0, 0), "past_end": 3}], ids=str)
def test_a_run_without_a_token_writes_zeros_and_leaves_the_state(form, knobs, flags):
    x = of(**knobs, flags=flags)
    found = form(x, 1)
    states = {"final_state": x.judge.h0} | ({"dh0": x.judge.dht} if flags else {})
    for name, want in states.items():
        torch.testing.assert_close(found.pop(name), want, rtol=1e-6, atol=0)
    assert found["o"].shape == x.judge.v.shape
    assert not any(y.any() for y in found.values())


@pytest.mark.parametrize("form", [rounded_recurrence, rounded_chunks])
def test_outputs_are_rounded_alike_with_gradients_and_without(form):
    front = FrontForm(gate="softplus", beta="sigmoid")
    caps = dataclasses.replace(CAPS, front_ends=(front,))
    cases = (dataclasses.replace(CASE, flags=flags) for flags in ((), ("gradients",)))
    plain, both = (form(problem_of(case, caps, CONTRACT, front=front), 1) for case in cases)
    assert plain.keys() == {"o", "final_state"}
    assert all(torch.equal(both[name], y) for name, y in plain.items())


@pytest.mark.parametrize("form", [rounded_recurrence, rounded_chunks])
@pytest.mark.parametrize("lengths", [None, (20, 0, 16)])
@pytest.mark.parametrize(
    "front", [None, FrontForm(gate="softplus", beta="sigmoid"), FrontForm(gate="bounded")], ids=str
)
def test_a_run_without_roundings_is_the_truth(form, lengths, front):
    exact = Contract("fp64", "fp64", "fp64", "fp64", 16, "sums", "fp64")
    case = dataclasses.replace(CASE, lengths=lengths, past_end=0 if lengths is None else 2, flags=("gradients",))
    x = problem_of(case, dataclasses.replace(CAPS, front_ends=(front,) if front else ()), exact, front=front)
    found, truth = form(x, 1), truth_of(x)
    assert set(found) == set(truth)
    assert len(truth) == (8 if front is None else 10)
    for name, got in found.items():
        torch.testing.assert_close(got, truth[name], rtol=1e-11, atol=1e-11)


def test_one_sample_of_a_short_state_is_on_that_formats_own_grid_and_the_next_is_not():
    contract = Contract("fp32", "fp32", "fp32", "bf16", None)
    x = of(contract)
    first, second = (rounded_recurrence(x, seed)["final_state"] for seed in (0, 1))
    assert torch.equal(to_format(first, "bf16"), first)
    assert not torch.equal(to_format(second, "bf16"), second)


def test_a_short_state_a_short_output_and_short_operands_each_widen_what_they_touch():
    fine = Contract("fp32", "fp32", "fp32", "fp32", 16)

    def widened(**formats):
        wide, narrow = (envelopes_of(of(dataclasses.replace(fine, **f))) for f in (formats, {}))
        return {name: (wide[name].mean() / narrow[name].mean()).item() for name in ("o", "final_state")}

    assert min(widened(operand="bf16").values()) > 1000
    assert min(widened(state="bf16").values()) > 100
    narrow = {name: x.to(torch.bfloat16).double() for name, x in vars(tensors_of(CASE)).items() if name in "qkv"}
    x = dataclasses.replace(tensors_of(CASE), **narrow)
    wide, exact = (envelopes_of(of(dataclasses.replace(fine, io=io), x)) for io in ("bf16", "fp32"))
    assert (wide["o"] / exact["o"]).min() > 1000
    assert (wide["final_state"] / exact["final_state"]).max() < 3


def test_differences_of_a_cumulative_gate_cost_more_than_sums_after_a_strong_gate():
    fine = Contract("fp32", "fp32", "fp32", "fp32", 16)
    by_form = [
        envelopes_of(of(dataclasses.replace(fine, decay=decay), gate="spikes"))["o"].mean()
        for decay in ("differences", "sums")
    ]
    assert by_form[0] > 2 * by_form[1]


@pytest.mark.parametrize(
    ("front", "rounded"),
    [
        (None, ()),
        (FrontForm(), "qk"),
        (FrontForm(l2norm_eps=None, gate="bounded"), "g"),
        (FrontForm(l2norm_eps=None, beta="sigmoid"), ("beta",)),
        (FrontForm(gate="softplus", beta="sigmoid"), ("q", "k", "g", "beta")),
    ],
    ids=str,
)
def test_what_a_front_end_inside_makes_is_rounded_and_what_is_given_is_not(front, rounded):
    contract = Contract("fp32", "bf16", "fp32", "fp32", 16, activation="tf32")
    x = problem_of(CASE, dataclasses.replace(CAPS, front_ends=(front,) if front else ()), contract, front=front)
    for seed in (0, 1):
        got = rounded_inputs(x, ContractRounding(contract, seed), given_to(x))
        for name, made, exact in zip(("q", "k", "v", "g", "beta"), got, x.inputs(), strict=True):
            error = (made / exact - 1).abs().max()
            u = roundoff("bf16" if name in "qk" else "tf32") if name in rounded else 0
            assert u / 4 <= error <= 1.001 * u, name


def test_what_a_kernel_with_a_backward_is_given_has_a_state_of_zeros_where_there_is_none():
    none = of(state="none", flags=("gradients",))
    assert torch.equal(given_to(none)["dh0"], torch.zeros(1, 2, 6, 5).double())
    assert torch.equal(given_to(of(flags=("gradients",)))["dh0"], of().judge.h0)
    assert "dh0" not in given_to(of(state="none"))
    assert set(rounded_chunks(none, 1)) == set(truth_of(none))


def test_the_recurrence_alone_has_no_matrix_products_to_round():
    coarse, fine = (of(dataclasses.replace(CONTRACT, operand=operand)) for operand in ("bf16", "fp32"))
    for name, got in rounded_recurrence(coarse, 1).items():
        assert torch.equal(got, rounded_recurrence(fine, 1)[name])


# The envelope


def test_an_envelope_is_the_widest_spread_and_one_rounding_and_a_floor():
    exact = torch.tensor([[[[3.0, 4.0]], [[0.0, 0.0]]]]).double()
    near, far = exact + 0.1, exact + torch.tensor([0.6, 0.8], dtype=torch.float64)
    rms = {"exact": 12.5**0.5, "far": 0.5**0.5}
    for name, format in (("o", "bf16"), ("dq", "bf16"), ("final_state", "fp32"), ("dh0", "fp32"), ("dg", "fp32")):
        got = row_envelope(exact, [near, far], name, CONTRACT).flatten().tolist()
        want = [rms["far"] + roundoff(format) * rms["exact"] + FLOOR * 4, rms["far"] + FLOOR * 4]
        assert got == pytest.approx(want, rel=1e-12)
    for name in ("dbeta", "dA_log"):
        numbers = torch.tensor([-3.0, 1.0]).double().reshape((1, 1, 2) if name == "dbeta" else (2,))
        got = row_envelope(numbers, [numbers], name, CONTRACT).flatten().tolist()
        assert got == pytest.approx([u * roundoff("fp32") + FLOOR * 3 for u in (3, 1)], rel=1e-12)


def test_the_spread_of_dbeta_is_that_of_a_token_and_the_two_beside_it():
    exact = torch.zeros(1, 6, 1).double()
    sample = torch.zeros(1, 6, 1).double()
    sample[0, 2, 0] = 0.5
    got = row_envelope(exact, [sample], "dbeta", CONTRACT) - SMALLEST
    assert got.flatten().tolist() == [0, 0.5, 0.5, 0.5, 0, 0]
    assert rows_of(exact, "dbeta").shape == (1, 6, 1, 1)
    assert rows_of(exact, "o").shape == exact.shape


def test_numbers_below_the_least_normal_one_may_be_taken_for_0():
    for size, flushed_passes in ((2.0**-127, True), (2.0**-122, False)):
        exact = torch.full((1, 1, 1, 4), size).double()
        bound = row_envelope(exact, [exact], "final_state", CONTRACT)
        assert bool(size <= FORWARD_RATIO * bound) == flushed_passes


def test_an_empty_result_has_an_empty_envelope():
    assert row_envelope(torch.zeros(2, 0, 3, 4), [], "o", CONTRACT).shape == (2, 0, 3)


def test_the_truth_is_the_recurrence_and_has_gradients_only_where_there_are_cotangents():
    x = of()
    o, S = recurrent_kda(*x.inputs(), **x.options(), output_final_state=True)
    assert set(truth_of(x)) == {"o", "final_state"} == set(envelopes_of(x))
    assert torch.equal(truth_of(x)["o"], o)
    assert torch.equal(truth_of(x)["final_state"], S)
    assert len(truth_of(of(flags=("gradients",)))) == len(envelopes_of(of(flags=("gradients",)))) == 8


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta", "h0"])
def test_what_is_kept_for_a_case_is_not_taken_for_other_inputs_of_it(name):
    own = tensors_of(CASE)
    other = dataclasses.replace(own, **{name: getattr(own, name) * 1.25})
    plain, changed = of(x=own), of(x=other)
    assert not torch.equal(truth_of(plain)["o"], truth_of(changed)["o"])
    assert not torch.equal(envelopes_of(plain)["o"], envelopes_of(changed)["o"])


def test_what_is_kept_for_a_case_is_not_taken_for_the_same_numbers_in_another_order():
    own = tensors_of(CASE)
    whole = dataclasses.replace(own, v=torch.arange(own.v.numel()).double().reshape(own.v.shape))
    turned = dataclasses.replace(whole, v=whole.v.flip(1))
    assert whole.v.sum() == turned.v.sum()
    assert not torch.equal(truth_of(of(x=whole))["o"], truth_of(of(x=turned))["o"])


def test_what_was_computed_once_is_kept():
    for once, again in ((of(), of()), (of(flags=("gradients",)), of(flags=("gradients",)))):
        assert truth_of(once) is truth_of(again)
        assert envelopes_of(once) is envelopes_of(again)
        assert envelopes_of(once, recurrence_alone=True) is not envelopes_of(again)


def test_what_is_kept_is_kept_apart_by_scale_by_cotangent_and_by_segments():
    own = tensors_of(dataclasses.replace(CASE, flags=("gradients",)))
    louder = dataclasses.replace(own, do=2 * own.do)
    plain, loud = (of(x=x, flags=("gradients",)) for x in (own, louder))
    assert torch.equal(truth_of(loud)["o"], truth_of(plain)["o"])
    assert not torch.equal(truth_of(loud)["dq"], truth_of(plain)["dq"])
    ended = of(x=dataclasses.replace(own, dht=2 * own.dht), flags=("gradients",))
    assert not torch.equal(truth_of(ended)["dk"], truth_of(plain)["dk"])
    packed = tensors_of(dataclasses.replace(CASE, lengths=(20, 16), state="none"))
    one = dataclasses.replace(packed, offsets=None)
    cut, joined = (truth_of(of(x=x, lengths=(20, 16), state="none")) for x in (packed, one))
    assert not torch.equal(cut["o"], joined["o"])
    scaled = of(x=dataclasses.replace(own, scale=1.0), flags=("gradients",))
    assert not torch.equal(truth_of(scaled)["o"], truth_of(plain)["o"])


def test_a_price_is_that_of_the_recurrence_whatever_the_contracts_form():
    chunks, tokens = of(), of(dataclasses.replace(CONTRACT, chunk_size=None))
    alone = envelopes_of(chunks, recurrence_alone=True)["o"]
    assert (alone / envelopes_of(chunks)["o"]).median() < 0.9
    assert 0.5 < (alone / envelopes_of(tokens)["o"]).median() < 1.5
    assert SAMPLES >= 4


def test_every_stage_has_a_truth_and_an_envelope_by_token():
    exact, bounds = stage_truth(of())
    assert set(exact) == set(bounds) == set(STAGES)
    for name in STAGES:
        assert exact[name].shape[:3] == bounds[name].shape == (1, 37, 2)
        assert exact[name].isfinite().all()
        assert (bounds[name] > 0).all()


@pytest.mark.parametrize("knobs", [{"lengths": (20, 0, 16)}, {"gate": "minus_infinity"}], ids=str)
def test_the_truth_of_stages_is_that_of_the_reference_however_coarse_the_contract(knobs):
    x = of(Contract("bf16", "bf16", "bf16", "bf16", 16, "differences"), scale=0.3, **knobs)
    stages = run_all_stages(prepare(*x.inputs(), **x.options()), 16)
    for name, got in stage_truth(x)[0].items():
        torch.testing.assert_close(got, stages.by_token(name), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("ratio", "word"),
    [
        (NOISE_RATIO, "at the noise"),
        (1.01, "pass"),
        (4.0, "pass"),
        (4.01, "explain"),
        (WRONG_RATIO, "explain"),
        (16.1, "wrong"),
    ],
)
def test_a_ratio_in_words(ratio, word):
    assert word_for(ratio, 4.0) == word
