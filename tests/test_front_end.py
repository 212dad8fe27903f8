"""The front end: gates, l2norm and beta against formulas in 50 digits, at both ends, and as a part of a call."""

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_linear.reference import BoundedGate, FrontEnd, SoftplusGate, l2norm, softplus
from kimi_linear.reference.chunked import chunk_kda
from kimi_linear.reference.naive import recurrent_kda

B, T, H, HV, K, V = 2, 7, 2, 4, 3, 5
DIGITS = 50
LOWER_BOUND = -5.0
GATES = pytest.mark.parametrize("kind", [SoftplusGate, BoundedGate])
TIERS = pytest.mark.parametrize("tier", [recurrent_kda, chunk_kda])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def draw(seed, *shape, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)


def make_gate(kind, *, dtype=torch.float64, A_log=None, dt_bias=None):
    A_log = draw(1, HV, dtype=dtype) if A_log is None else A_log
    dt_bias = draw(2, HV, K, dtype=dtype) if dt_bias is None else dt_bias
    return kind(A_log, dt_bias)


def exactly(function, *tensors):
    """The function of each element in 50 digits, as an object array."""
    with mpmath.workdps(DIGITS):
        arrays = [np.vectorize(mpmath.mpf, otypes=[object])(x.detach().double().numpy()) for x in tensors]
        return np.vectorize(function, otypes=[object])(*arrays)


def largest_relative_error(x, exact):
    """In units of the eps of x's dtype."""
    with mpmath.workdps(DIGITS):
        errors = np.vectorize(lambda a, b: abs(mpmath.mpf(a) - b) / abs(b), otypes=[object])(
            x.detach().double().numpy(), exact
        )
        return float(np.max(errors)) / torch.finfo(x.dtype).eps


def exact_softplus(x):
    return mpmath.log1p(mpmath.exp(x))


def exact_sigmoid(x):
    return 1 / (1 + mpmath.exp(-x))


# softplus


@DTYPES
def test_softplus_is_right_to_rounding_over_its_whole_range(dtype):
    x = torch.linspace(-80, 60, 701, dtype=dtype)
    assert largest_relative_error(softplus(x), exactly(exact_softplus, x)) < 4


def test_softplus_of_a_very_negative_number_is_small_and_not_zero():
    """At -18 and below, 1 + exp(x) is 1 in fp32 and its logarithm is 0."""
    x = torch.tensor([-18.0, -20.0, -40.0, -80.0])
    as_written = torch.log(1 + torch.exp(x))
    assert torch.equal(as_written, torch.zeros(4))
    assert largest_relative_error(softplus(x), exactly(exact_softplus, x)) < 4


def test_softplus_in_fp64_has_its_last_digits_above_twenty():
    """torch's own softplus returns x itself above 20, which is off by 5e6 eps at 20.5."""
    x = torch.tensor([20.5], dtype=torch.float64)
    exact = exactly(exact_softplus, x)
    assert largest_relative_error(softplus(x), exact) < 1
    assert largest_relative_error(torch.nn.functional.softplus(x), exact) > 1e5


def test_a_decay_of_one_part_in_a_hundred_million_is_not_lost():
    """A slow channel over a million tokens forgets a percent; with g = 0 it forgets nothing."""
    gate = SoftplusGate(torch.zeros(1), torch.zeros(1, 1))
    g = gate(torch.full((1, 1_000_000, 1, 1), -18.5))
    forgotten = 1 - torch.exp(g.double().sum()).item()
    assert forgotten == pytest.approx(
        -np.expm1(-1e6 * np.log1p(np.exp(-18.5))), rel=8 * torch.finfo(torch.float32).eps
    )
    assert forgotten > 0.009


# l2norm


def rows_of_norm(norm, dtype):
    x = draw(3, 6, 7)
    return (norm * x / x.norm(dim=-1, keepdim=True)).to(dtype)


def exact_l2norm(x, eps, *, inside):
    with mpmath.workdps(DIGITS):
        rows = exactly(lambda a: a, x)
        squares = (rows * rows).sum(-1, keepdims=True)
        root = np.vectorize(mpmath.sqrt, otypes=[object])
        return rows / (root(squares + mpmath.mpf(eps)) if inside else root(squares) + mpmath.mpf(eps))


@DTYPES
@pytest.mark.parametrize("norm", [1e-3, 1.0, 1e3])
def test_l2norm_adds_eps_inside_the_root(dtype, norm):
    x = rows_of_norm(norm, dtype)
    assert largest_relative_error(l2norm(x, 1e-6), exact_l2norm(x, 1e-6, inside=True)) < 8


def test_eps_outside_the_root_would_show():
    """At a norm of 1e-3 the two readings of 1e-6 differ by a factor of 1.41."""
    x = rows_of_norm(1e-3, torch.float64)
    ratio = exact_l2norm(x, 1e-6, inside=False) / exact_l2norm(x, 1e-6, inside=True)
    assert float(ratio.min()) == pytest.approx(2**0.5, rel=2e-3)
    assert largest_relative_error(l2norm(x, 1e-6), exact_l2norm(x, 1e-6, inside=False)) > 1e10


@DTYPES
def test_l2norm_leaves_a_zero_row_at_zero_with_a_finite_gradient(dtype):
    x = torch.zeros(2, 3, dtype=dtype, requires_grad=True)
    y = l2norm(x, 1e-6)
    y.sum().backward()
    assert torch.equal(y.detach(), torch.zeros(2, 3, dtype=dtype))
    assert x.grad.flatten().tolist() == pytest.approx([1e3] * 6, rel=8 * torch.finfo(dtype).eps)


def test_l2norm_normalises_each_head_of_each_token_alone():
    x = draw(4, B, T, H, K)
    changed = x.clone()
    changed[1, 2, 1] = 100 * changed[1, 2, 1]
    different = (l2norm(x) != l2norm(changed)).any(-1)
    assert different.nonzero().tolist() == [[1, 2, 1]]
    assert not torch.equal(x, l2norm(x))


# gates


def exact_gate(kind, x, A_log, dt_bias):
    def softplus_gate(x, A_log, dt_bias):
        return -mpmath.exp(A_log) * exact_softplus(x + dt_bias)

    def bounded_gate(x, A_log, dt_bias):
        return LOWER_BOUND * exact_sigmoid(mpmath.exp(A_log) * (x + dt_bias))

    return exactly({SoftplusGate: softplus_gate, BoundedGate: bounded_gate}[kind], x, A_log[:, None], dt_bias)


@GATES
def test_a_gate_is_its_formula(kind):
    """An argument of 20 carries 20 times its own rounding through exp, hence more than a few eps."""
    x = 8 * draw(5, B, T, HV, K)
    gate = make_gate(kind)
    exact = exact_gate(kind, x, gate.A_log, gate.dt_bias)
    assert largest_relative_error(gate(x), exact) < 32
    assert largest_relative_error(gate(x + 1e-12), exact) > 32


@GATES
def test_the_two_gates_are_not_each_other(kind):
    """Same parameters, other function: a bounded gate is no clamp of the softplus gate."""
    x = draw(6, B, T, HV, K)
    bounded = make_gate(BoundedGate)(x)
    clamped = make_gate(SoftplusGate)(x).clamp(min=LOWER_BOUND)
    assert (bounded - clamped).abs().min() > 1e-3
    assert not torch.equal(make_gate(kind)(x), clamped)
    assert bounded.min() >= LOWER_BOUND
    assert bounded.max() <= 0


@GATES
@DTYPES
def test_both_layouts_of_the_parameters_give_the_same_bits(kind, dtype):
    x = draw(7, B, T, HV, K, dtype=dtype)
    A_log, dt_bias = draw(1, HV, dtype=dtype), draw(2, HV, K, dtype=dtype)
    wanted = kind(A_log, dt_bias)(x)
    assert len(wanted.unique()) == x.numel()
    for rate in (A_log, A_log.reshape(1, 1, HV, 1)):
        for bias in (dt_bias, dt_bias.flatten()):
            assert torch.equal(kind(rate, bias)(x), wanted)


@GATES
def test_dt_bias_belongs_to_a_channel_and_A_log_to_a_head(kind):
    x = draw(8, B, T, HV, K)
    gate = make_gate(kind)
    h, c = 2, 1
    one_channel = torch.zeros(HV, K, dtype=torch.bool)
    one_channel[h, c] = True
    one_head = torch.zeros(HV, K, dtype=torch.bool)
    one_head[h] = True
    other_bias = make_gate(kind, dt_bias=gate.dt_bias + one_channel)(x)
    other_rate = make_gate(kind, A_log=gate.A_log + one_head[:, 0])(x)
    assert torch.equal(other_bias != gate(x), one_channel.expand_as(x))
    assert torch.equal(other_rate != gate(x), one_head.expand_as(x))


@GATES
@DTYPES
@given(raw=st.floats(-1e4, 1e4, width=32), rate=st.floats(-20, 90, width=32), bias=st.floats(-1e4, 1e4, width=32))
def test_no_raw_input_gives_a_positive_or_nan_gate(kind, dtype, raw, rate, bias):
    gate = kind(torch.tensor([rate], dtype=dtype), torch.tensor([[bias]], dtype=dtype))
    g = gate(torch.full((1, 1, 1, 1), raw, dtype=dtype)).item()
    assert g <= 0
    if kind is BoundedGate:
        assert g >= LOWER_BOUND


@GATES
@pytest.mark.parametrize("raw", [-1e4, 1e4])
def test_the_ends_of_the_range_are_no_forgetting_and_all_of_it(kind, raw):
    g = kind(torch.zeros(1), torch.zeros(1, 1))(torch.full((1, 1, 1, 1), raw)).item()
    assert g == {(SoftplusGate, -1e4): 0, (SoftplusGate, 1e4): -1e4, (BoundedGate, -1e4): 0}.get(
        (kind, raw), LOWER_BOUND
    )


HUGE_RATE = 90.0  # exp(90) is inf in fp32, and inf * 0 is NaN


def gate_of_huge_rate(kind):
    return kind(torch.full((HV,), HUGE_RATE, requires_grad=True), torch.zeros(HV, K, requires_grad=True))


@pytest.mark.parametrize(
    ("kind", "raw", "wanted"),
    [
        (SoftplusGate, -200.0, 0.0),
        (SoftplusGate, 200.0, -float("inf")),
        (BoundedGate, -1.0, 0.0),
        (BoundedGate, 0.0, LOWER_BOUND / 2),
        (BoundedGate, 1.0, LOWER_BOUND),
    ],
)
def test_a_rate_past_the_largest_fp32_number_gives_the_limit(kind, raw, wanted):
    rate = torch.exp(torch.tensor(HUGE_RATE))
    assert (rate * torch.nn.functional.softplus(torch.tensor(-200.0))).isnan()  # the formula as written
    assert (rate * torch.tensor(0.0)).isnan()
    g = gate_of_huge_rate(kind)(torch.full((B, T, HV, K), raw))
    assert torch.equal(g.detach(), torch.full_like(g, wanted))


@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (SoftplusGate, -200.0),
        (SoftplusGate, 200.0),
        (BoundedGate, -1.0),
        (BoundedGate, 0.0),
        (BoundedGate, 1.0),
    ],
)
def test_a_rate_past_the_largest_fp32_number_gives_no_nan_in_the_gradients_of_the_decay(kind, raw):
    gate = gate_of_huge_rate(kind)
    x = torch.full((B, T, HV, K), raw, requires_grad=True)
    for gradient in torch.autograd.grad(torch.exp(gate(x)).sum(), [x, gate.A_log, gate.dt_bias]):
        assert not gradient.isnan().any()


@TIERS
@pytest.mark.parametrize(
    ("kind", "raw"),
    [
        (SoftplusGate, -200.0),
        (SoftplusGate, 200.0),
        (BoundedGate, -1.0),
        (BoundedGate, 1.0),
    ],
)
def test_a_call_through_a_gate_of_huge_rate_is_finite_with_finite_gradients(tier, kind, raw):
    gate, inputs = gate_of_huge_rate(kind), raw_inputs(torch.float32)
    g = torch.full_like(inputs["g"], raw).requires_grad_()
    o, _ = tier(**(inputs | {"g": g}), front_end=FrontEnd(gate))
    for x in (o, *torch.autograd.grad(o.square().sum(), [g, gate.A_log, gate.dt_bias])):
        assert x.isfinite().all()


def exact_slope(kind, y, A_log):
    """d g / d x at y = x + dt_bias."""
    if kind is SoftplusGate:
        return -mpmath.exp(A_log) * exact_sigmoid(y)
    z = mpmath.exp(A_log) * y
    return LOWER_BOUND * mpmath.exp(A_log) * exact_sigmoid(z) * exact_sigmoid(-z)


def exact_rate_slope(kind, y, A_log):
    """d g / d A_log at y = x + dt_bias."""
    return -mpmath.exp(A_log) * exact_softplus(y) if kind is SoftplusGate else y * exact_slope(kind, y, A_log)


# a rate; raw gates, where that rate has a gate and derivatives of a size that fp32 has
EXTREMES = [
    (SoftplusGate, 90.0, [-115.0, -103.0, -95.0, -90.0, -88.0, -86.0, -81.0, -60.0, -20.0, -8.0]),
    (SoftplusGate, 88.0, [-115.0, -95.0, -87.5, -87.0, -50.0, -1.0]),
    (SoftplusGate, 150.0, [-190.0, -150.0, -100.0, -88.0, -70.0]),
    (SoftplusGate, 0.0, [-80.0, -20.0, 0.0, 20.0, 1e4]),
    (SoftplusGate, -80.0, [-4.0, 0.0, 4.0, 1e4, 1e30]),
    (BoundedGate, 90.0, [-6e-38, -3e-38, 2e-38, 6e-38]),
    (BoundedGate, 80.0, [-1e-33, -1e-35, 0.0, 1e-35, 4e-34, 1e-33]),
    (BoundedGate, 0.0, [-80.0, -18.0, 0.0, 18.0, 80.0]),
    (BoundedGate, -60.0, [-1e20, 1.0, 1e20, 1e27]),
]


@pytest.mark.parametrize(("kind", "rate", "raw"), EXTREMES)
def test_a_gate_of_extreme_rate_has_the_value_and_the_derivatives_of_its_formula(kind, rate, raw):
    """No part of a product that fp32 can hold may overflow or vanish on the way; exp(y) carries y roundings."""
    x = torch.tensor(raw).reshape(1, -1, 1, 1).requires_grad_()
    A_log, dt_bias = torch.full((len(raw),), rate, requires_grad=True), torch.zeros(len(raw), 1, requires_grad=True)
    g = kind(A_log, dt_bias)(x.transpose(1, 2))  # a head for each, so that no sum over tokens hides one
    derivatives = torch.autograd.grad(g.sum(), [x, dt_bias, A_log])
    y, rates = x.detach().flatten(), torch.full((len(raw),), rate)
    slope = exactly(lambda *at: exact_slope(kind, *at), y, rates)
    of_rate = exactly(lambda *at: exact_rate_slope(kind, *at), y, rates)
    value = exact_gate(kind, y[:, None], rates, torch.zeros(1, 1)).flatten()
    for found, wanted in zip((g, *derivatives), (value, slope, slope, of_rate), strict=True):
        assert relative_errors(found.flatten(), wanted) < 96


def relative_errors(x, exact):
    """The largest, in units of eps, of what fp32 holds in full; what is 0 or has few digits there is one unit off."""
    few = np.array([abs(value) < torch.finfo(x.dtype).smallest_normal for value in exact])
    unit = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    assert all(abs(float(a) - float(b)) <= 2 * unit for a, b in zip(x[few].tolist(), exact[few], strict=True))
    full = torch.tensor(~few)
    return largest_relative_error(x[full], exact[~few])


def test_the_chain_rule_alone_overflows_where_the_derivative_is_8103():
    """exp(90) is inf in fp32: as an activation times a rate, whose root is taken twice, its gradient is inf."""
    x, rate = torch.tensor(-81.0, requires_grad=True), torch.exp(torch.tensor(45.0))
    (as_written,) = torch.autograd.grad(-(rate * (rate * softplus(x))), x)
    gate = SoftplusGate(torch.full((1,), 90.0), torch.zeros(1, 1))
    (slope,) = torch.autograd.grad(gate(x.reshape(1, 1, 1, 1)).sum(), x)
    assert as_written == -float("inf")
    assert slope.item() == pytest.approx(-np.exp(9.0), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_softplus_gate_is_bit_for_bit_its_rates_root_taken_twice(dtype):
    """But where softplus(x) has lost digits, or is 0."""
    x = torch.linspace(-87, 200, 1001, dtype=dtype).reshape(1, -1, 1, 1)
    for rate in (-20.0, 0.7, 40.0, 90.0):
        root = torch.exp(torch.tensor(rate, dtype=dtype) / 2)
        gate = SoftplusGate(torch.tensor([rate], dtype=dtype), torch.zeros(1, 1, dtype=dtype))
        assert torch.equal(gate(x), -(root * (root * softplus(x))))


@pytest.mark.parametrize("raw", [-60.0, -20.0, 0.0, 20.0, 60.0])
def test_a_write_strength_has_a_slope_also_where_it_rounds_to_1(raw):
    b = torch.full((1, 1, 1), raw, requires_grad=True)
    x = torch.zeros(1, 1, 1, 1)
    *_, beta = FrontEnd(beta="double_sigmoid")(x, x, x, b)
    (slope,) = torch.autograd.grad(beta.sum(), b)
    exact = 2 * np.exp(-abs(np.float64(raw))) / (1 + np.exp(-abs(np.float64(raw)))) ** 2
    assert slope.item() == pytest.approx(exact, rel=1e-6)
    assert torch.equal(beta.detach(), 2 * torch.sigmoid(b.detach()))


@GATES
def test_second_derivatives_of_a_gate_are_finite_differences_of_its_first_also_where_nothing_flows_back(kind):
    x = 3 * draw(9, 1, 3, HV, K)
    x[0, 0] = torch.tensor([-750.0, -710.0, -700.0])  # of fp64, where softplus(x) has lost digits
    cotangent = draw(10, 1, 3, HV, K)
    cotangent[0, 1] = 0.0

    def of(x, A_log, dt_bias, cotangent):
        return torch.autograd.grad((kind(A_log, dt_bias)(x) * cotangent).sum(), leaves[:3], create_graph=True)

    leaves = [y.requires_grad_() for y in (x, draw(1, HV), draw(2, HV, K), cotangent)]
    assert torch.autograd.gradcheck(of, leaves)


@pytest.mark.parametrize("raw", [-20.0, 0.0, 20.0, 200.0, -100.0])
def test_softplus_in_fp32_has_finite_derivatives_of_every_order(raw):
    """0, 1/2, 1/4, 0 at the origin: the kinks of max(x, 0) and |x| cancel in value, not under autograd."""
    x = torch.tensor(raw, requires_grad=True)
    derivatives = [softplus(x)]
    for _ in range(3):
        derivatives += torch.autograd.grad(derivatives[-1], x, create_graph=True)
    s = 1 / (1 + np.exp(-np.float64(raw)))
    wanted = [np.logaddexp(0, raw), s, s * (1 - s), s * (1 - s) * (1 - 2 * s)]
    eps = torch.finfo(torch.float32).eps
    assert [d.item() for d in derivatives] == pytest.approx(wanted, rel=8 * eps, abs=eps)


# beta, and the front end as a whole


def raw_inputs(dtype, *, batch=B):
    return {
        "q": draw(10, batch, T, H, K, dtype=dtype),
        "k": draw(11, batch, T, H, K, dtype=dtype),
        "v": draw(12, batch, T, HV, V, dtype=dtype),
        "g": draw(13, batch, T, HV, K, dtype=dtype),
        "beta": draw(14, batch, T, HV, dtype=dtype),
    }


@pytest.mark.parametrize(("activation", "factor"), [("sigmoid", 1), ("double_sigmoid", 2)])
def test_beta_is_a_sigmoid_or_twice_one(activation, factor):
    raw = raw_inputs(torch.float64)
    *_, beta = FrontEnd(beta=activation)(raw["q"], raw["k"], raw["g"], raw["beta"])
    exact = exactly(lambda x: factor * exact_sigmoid(x), raw["beta"])
    assert largest_relative_error(beta, exact) < 4
    assert beta.min() < 0.5 * factor < beta.max() < factor


@pytest.mark.parametrize(("part", "changed"), [("gate", {"g"}), ("l2norm_eps", {"q", "k"}), ("beta", {"beta"})])
def test_each_part_changes_its_own_inputs_and_no_others(part, changed):
    raw = raw_inputs(torch.float32)
    raw.pop("v")
    nothing = {"gate": None, "l2norm_eps": None, "beta": None}
    value = {"gate": make_gate(SoftplusGate, dtype=torch.float32), "l2norm_eps": 1e-6, "beta": "sigmoid"}[part]
    done = dict(zip(("q", "k", "g", "beta"), FrontEnd(**(nothing | {part: value}))(**raw), strict=True))
    assert {name for name in raw if not torch.equal(raw[name], done[name])} == changed


@TIERS
@DTYPES
def test_a_front_end_of_nothing_is_the_identity(tier, dtype):
    inputs = raw_inputs(dtype)
    inputs["g"] = -inputs["g"].abs()
    plain, _ = tier(**inputs)
    through, _ = tier(**inputs, front_end=FrontEnd(gate=None, l2norm_eps=None, beta=None))
    default, _ = tier(**inputs, front_end=FrontEnd())
    assert torch.equal(plain, through)
    assert not torch.equal(plain, default)


@TIERS
@DTYPES
@GATES
@pytest.mark.parametrize("activation", ["sigmoid", "double_sigmoid"])
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_a_tier_given_a_front_end_equals_the_tier_given_its_outputs(tier, dtype, kind, activation, packed):
    raw = raw_inputs(dtype, batch=1 if packed else B)
    options = {"output_final_state": True, "cu_seqlens": torch.tensor([0, 3, 3, T - 1]) if packed else None}
    front_end = FrontEnd(make_gate(kind, dtype=dtype), beta=activation)
    q, k, g, beta = front_end(raw["q"], raw["k"], raw["g"], raw["beta"])
    through = tier(**raw, **options, front_end=front_end)
    outside = tier(q, k, raw["v"], g, beta, **options)
    for x, y in zip(through, outside, strict=True):
        assert torch.equal(x, y)
    assert through[0].abs().max() > 0.01


@TIERS
def test_half_precision_inputs_are_cast_before_the_front_end(tier):
    """A gate computed in bf16 has three digits, and a sum of a thousand of them has fewer."""
    raw = raw_inputs(torch.bfloat16)
    front_end = FrontEnd(make_gate(SoftplusGate, dtype=torch.float32))
    half, _ = tier(**raw, front_end=front_end)
    single, _ = tier(**{name: x.float() for name, x in raw.items()}, front_end=front_end)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, single.bfloat16())
    rounded = {name: x.bfloat16() for name, x in raw.items()}
    rounded["q"], rounded["k"], rounded["g"], rounded["beta"] = (
        x.bfloat16() for x in front_end(*(raw[name].float() for name in ("q", "k", "g", "beta")))
    )
    assert not torch.equal(half, tier(**rounded)[0])


def differentiable_call(kind, tokens):
    """recurrent_kda as a function of everything that a layer has gradients for."""
    heads, value_heads, key, value = 1, 2, 2, 1
    shapes = [
        (1, tokens, heads, key),
        (1, tokens, heads, key),
        (1, tokens, value_heads, value),
        (1, tokens, value_heads, key),
        (1, tokens, value_heads),
        (value_heads,),
        (value_heads, key),
        (1, value_heads, key, value),
    ]

    def call(q, k, v, g, beta, A_log, dt_bias, h0):
        front_end = FrontEnd(kind(A_log, dt_bias), beta="double_sigmoid")
        return recurrent_kda(q, k, v, g, beta, front_end=front_end, initial_state=h0, output_final_state=True)

    return call, [draw(20 + n, *shape).requires_grad_() for n, shape in enumerate(shapes)]


@GATES
def test_gradients_through_the_front_end_are_those_of_finite_differences(kind):
    call, inputs = differentiable_call(kind, tokens=3)
    assert torch.autograd.gradcheck(call, inputs)


@GATES
def test_second_gradients_through_the_front_end_are_those_of_finite_differences(kind):
    call, inputs = differentiable_call(kind, tokens=2)
    assert torch.autograd.gradgradcheck(call, inputs)


@GATES
def test_every_input_of_the_front_end_has_a_gradient(kind):
    """The checks above would pass on a detached input, whose gradient is 0 by both counts."""
    call, inputs = differentiable_call(kind, tokens=3)
    o, state = call(*inputs)
    for gradient in torch.autograd.grad(o.square().sum() + state.square().sum(), inputs):
        assert gradient.abs().max() > 1e-4
