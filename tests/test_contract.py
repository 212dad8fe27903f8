"""What a caller may pass and what the refusal says: the same words from every public function.

Each refusal is compared in full, type and text, and the same call without the mistake is made first, so that
it is the mistake that is refused.
"""

import pytest
import torch

from kimi_linear.reference import BoundedGate, FrontEnd, SoftplusGate
from kimi_linear.reference.chunked import chunk_kda, chunk_kda_backward, chunk_stages
from kimi_linear.reference.naive import recurrent_kda, recurrent_kda_backward

B, T, H, HV, K, V = 2, 5, 2, 6, 3, 4
OFFSETS = [0, 2, 2, 4]  # an empty segment in the middle, and a row past the last offset
NOT_A_NUMBER, INFINITY = float("nan"), float("inf")
META = torch.device("meta")

FORWARD = [recurrent_kda, chunk_kda, chunk_stages]
BACKWARD = [recurrent_kda_backward, chunk_kda_backward]
CHUNKED = [chunk_kda, chunk_stages, chunk_kda_backward]


def each(functions):
    return pytest.mark.parametrize("op", functions, ids=lambda op: op.__name__)


every_function, every_forward, every_backward = each(FORWARD + BACKWARD), each(FORWARD), each(BACKWARD)


def offsets(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def arguments(op, *, batch=B, length=T, dtype=torch.float32):
    """A valid call: grouped heads, K != V, an odd length."""
    rng = torch.Generator().manual_seed(7)

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    call = {
        "q": draw(batch, length, H, K),
        "k": draw(batch, length, H, K),
        "v": draw(batch, length, HV, V),
        "g": -draw(batch, length, HV, K).abs(),
        "beta": draw(batch, length, HV).sigmoid(),
    }
    return call | ({"do": draw(batch, length, HV, V)} if op in BACKWARD else {})


def packed(op):
    return arguments(op, batch=1) | {"cu_seqlens": offsets(*OFFSETS)}


def softplus_gate(**changes):
    return SoftplusGate(**({"A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV, K)} | changes))


def bounded_gate(**changes):
    return BoundedGate(**({"A_log": torch.zeros(HV), "dt_bias": torch.zeros(HV, K)} | changes))


def assert_refused(error, message, call, valid, **mistake):
    call(**valid)
    with pytest.raises(error) as refusal:
        call(**(valid | mistake))
    assert type(refusal.value) is error
    assert str(refusal.value) == message


# Tensors: rank, shape, dtype, device


@every_function
@pytest.mark.parametrize(
    ("name", "x", "message"),
    [
        ("q", torch.zeros(T, H, K), "q must be [B, T, H, K]; got 3 dimensions: [5, 2, 3]"),
        ("q", torch.zeros(()), "q must be [B, T, H, K]; got 0 dimensions: []"),
        ("k", torch.zeros(T, H, K), "k must be [B, T, H, K] like q, that is [2, 5, 2, 3]; got [5, 2, 3]"),
        ("v", torch.zeros(1, B, T, HV, V), "v must be [B, T, HV, V]; got 5 dimensions: [1, 2, 5, 6, 4]"),
        ("beta", torch.zeros(B, T, HV, 1), "beta must be [B, T, HV], that is [2, 5, 6]; got [2, 5, 6, 1]"),
    ],
)
def test_a_wrong_rank_is_refused(op, name, x, message):
    assert_refused(ValueError, message, op, arguments(op), **{name: x})


@every_function
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("k", (B, T, H, K + 1), "k must be [B, T, H, K] like q, that is [2, 5, 2, 3]; got [2, 5, 2, 4]"),
        ("k", (B, T, HV, K), "k must be [B, T, H, K] like q, that is [2, 5, 2, 3]; got [2, 5, 6, 3]"),
        ("v", (B, T + 1, HV, V), "v must be [B, T, HV, V] with B and T of q, that is [2, 5, 6, 4]; got [2, 6, 6, 4]"),
        ("v", (1, T, HV, V), "v must be [B, T, HV, V] with B and T of q, that is [2, 5, 6, 4]; got [1, 5, 6, 4]"),
        (
            "g",
            (B, T, H, K),
            "g must be [B, T, HV, K], one gate a key channel, that is [2, 5, 6, 3]; got [2, 5, 2, 3]",
        ),
        ("g", (B, T, HV), "g must be [B, T, HV, K], one gate a key channel, that is [2, 5, 6, 3]; got [2, 5, 6]"),
        (
            "g",
            (B, T, HV, V),
            "g must be [B, T, HV, K], one gate a key channel, that is [2, 5, 6, 3]; got [2, 5, 6, 4]",
        ),
        ("beta", (B, T, H), "beta must be [B, T, HV], that is [2, 5, 6]; got [2, 5, 2]"),
        ("beta", (B, HV, T), "beta must be [B, T, HV], that is [2, 5, 6]; got [2, 6, 5]"),
    ],
)
def test_a_wrong_shape_is_refused_with_the_shape_that_was_wanted(op, name, shape, message):
    assert_refused(ValueError, message, op, arguments(op), **{name: torch.zeros(shape)})


@every_function
@pytest.mark.parametrize("heads", [1, 3, 7])
def test_value_heads_that_are_no_multiple_of_the_key_heads_are_refused(op, heads):
    message = f"v must be [B, T, HV, V] with HV a multiple of H=2; got HV={heads}"
    assert_refused(ValueError, message, op, arguments(op), v=torch.zeros(B, T, heads, V))


@every_function
@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({"q": (B, T, 0, K), "k": (B, T, 0, K)}, "H=0, K=3, HV=6, V=4"),
        ({"q": (B, T, H, 0), "k": (B, T, H, 0), "g": (B, T, HV, 0)}, "H=2, K=0, HV=6, V=4"),
        ({"v": (B, T, 0, V)}, "H=2, K=3, HV=0, V=4"),
        ({"v": (B, T, HV, 0)}, "H=2, K=3, HV=6, V=0"),
    ],
)
def test_no_heads_or_no_channels_are_refused(op, changes, sizes):
    message = f"q and v must be at least one head and one channel; got {sizes}"
    empty = {name: torch.zeros(shape) for name, shape in changes.items()}
    assert_refused(ValueError, message, op, arguments(op), **empty)


@every_function
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_anything_but_a_tensor_is_refused_by_its_type(op, name):
    message = f"{name} must be a torch.Tensor; got list"
    assert_refused(TypeError, message, op, arguments(op), **{name: [[0.0]]})


@every_function
def test_integer_queries_are_refused(op):
    message = "q must be float16, bfloat16, float32 or float64; got torch.int64"
    assert_refused(TypeError, message, op, arguments(op), q=torch.zeros(B, T, H, K, dtype=torch.int64))


@every_function
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32])
def test_keys_and_values_of_another_dtype_than_the_queries_are_refused(op, name, dtype):
    valid = arguments(op)
    message = f"{name} must be the dtype of q, torch.float32; got {dtype}"
    assert_refused(TypeError, message, op, valid, **{name: valid[name].to(dtype)})


@every_function
@pytest.mark.parametrize("name", ["g", "beta"])
@pytest.mark.parametrize(
    ("of_q", "of_x", "wanted"),
    [
        (torch.bfloat16, torch.float16, "torch.bfloat16 or torch.float32"),
        (torch.float16, torch.float64, "torch.float16 or torch.float32"),
        (torch.float32, torch.bfloat16, "torch.float32"),
        (torch.float64, torch.float32, "torch.float64"),
        (torch.float32, torch.int64, "torch.float32"),
    ],
)
def test_a_gate_or_write_strength_of_a_dtype_that_hides_rounding_is_refused(op, name, of_q, of_x, wanted):
    valid = arguments(op, dtype=of_q)
    message = f"{name} must be {wanted}; got {of_x}"
    assert_refused(TypeError, message, op, valid, **{name: valid[name].to(of_x)})


@every_function
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_may_come_with_fp32_gates_and_write_strengths(op, dtype):
    half = arguments(op, dtype=dtype)
    op(**(half | {"g": half["g"].float(), "beta": half["beta"].float()}))


@every_function
@pytest.mark.parametrize("name", ["k", "v", "g", "beta"])
def test_a_tensor_on_another_device_than_the_queries_is_refused(op, name):
    valid = arguments(op)
    message = f"{name} must be on the device of q, cpu; got meta"
    assert_refused(ValueError, message, op, valid, **{name: valid[name].to(META)})


# Packed segments


@every_function
@pytest.mark.parametrize(
    ("cu_seqlens", "error", "message"),
    [
        (offsets(0.0, 2.0, dtype=torch.float32), TypeError, "int32 or int64; got torch.float32"),
        (offsets(0, 1, dtype=torch.bool), TypeError, "int32 or int64; got torch.bool"),
        ([0, 2], TypeError, "a torch.Tensor; got list"),
        (offsets([0, 2]), ValueError, "[N + 1] offsets of N >= 1 segments; got [1, 2]"),
        (torch.tensor(0), ValueError, "[N + 1] offsets of N >= 1 segments; got []"),
        (offsets(0), ValueError, "[N + 1] offsets of N >= 1 segments; got [1]"),
        (offsets(), ValueError, "[N + 1] offsets of N >= 1 segments; got [0]"),
        (offsets(1, 3, 5), ValueError, "offsets that start at 0; got 1"),
        (offsets(-1, 5), ValueError, "offsets that start at 0; got -1"),
        (offsets(0, 4, 3, 5), ValueError, "offsets that never decrease; got 4 then 3 at index 2"),
        (offsets(0, 2, 6), ValueError, "offsets of at most T=5; got 6"),
    ],
)
def test_malformed_offsets_are_refused(op, cu_seqlens, error, message):
    assert_refused(error, f"cu_seqlens must be {message}", op, packed(op), cu_seqlens=cu_seqlens)


@every_function
@pytest.mark.parametrize("batch", [0, 2])
def test_packed_segments_in_more_or_less_than_one_row_are_refused(op, batch):
    message = f"cu_seqlens must be None unless B = 1: packed segments lie end to end in one row; got B={batch}"
    assert_refused(ValueError, message, op, arguments(op, batch=batch), cu_seqlens=offsets(0, T))


@every_function
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("values", [(0, 5), (0, 0), (0, 0, 3, 3), (0, 1, 2, 3, 4, 5)])
def test_offsets_may_repeat_and_may_end_early(op, values, dtype):
    op(**(arguments(op, batch=1) | {"cu_seqlens": offsets(*values, dtype=dtype)}))


# The contents of the gate


@every_function
@pytest.mark.parametrize(("value", "shown"), [(0.5, "0.5"), (INFINITY, "inf")])
def test_a_positive_gate_is_refused_with_a_hint_at_raw_gates(op, value, shown):
    valid = arguments(op)
    g = valid["g"].clone()
    g[1, T - 1, HV - 1, K - 1] = value
    message = (
        "g must be a log decay, <= 0 and not NaN; a raw gate needs front_end=FrontEnd(gate=...); "
        f"got a highest value of {shown}"
    )
    assert_refused(ValueError, message, op, valid, g=g)


@every_function
def test_a_nan_gate_is_refused_even_beside_a_positive_one(op):
    valid = arguments(op)
    g = valid["g"].clone()
    g[0, 0, 0, 0], g[1, 2, 3, 1] = 0.5, NOT_A_NUMBER
    message = "g must be a log decay, <= 0 and not NaN; got a highest value of nan"
    assert_refused(ValueError, message, op, valid, g=g)


@every_function
def test_gates_of_zero_and_minus_infinity_are_log_decays(op):
    valid = arguments(op)
    for value in (0.0, -0.0, -INFINITY):
        op(**(valid | {"g": torch.full_like(valid["g"], value)}))


@every_function
@pytest.mark.parametrize("value", [0.5, NOT_A_NUMBER, INFINITY])
def test_a_gate_past_the_last_offset_is_never_looked_at(op, value):
    valid = packed(op)
    last, g = OFFSETS[-1], valid["g"].clone()
    g[:, last:] = value
    op(**(valid | {"g": g}))
    g[:, last - 1] = value  # the last row that counts
    with pytest.raises(ValueError, match=r"^g must be a log decay, <= 0 and not NaN.*; got a highest value of"):
        op(**(valid | {"g": g}))


@every_forward
@pytest.mark.parametrize("gate", [softplus_gate(), bounded_gate()], ids=["softplus", "bounded"])
def test_a_raw_gate_may_have_any_sign_where_the_front_end_has_a_gate(op, gate):
    raw = arguments(op)
    raw["g"] = -raw["g"]
    assert raw["g"].max() > 0
    op(**raw, front_end=FrontEnd(gate=gate))
    with pytest.raises(ValueError, match=r"^g must be a log decay.*; a raw gate needs front_end=FrontEnd\(gate="):
        op(**raw, front_end=FrontEnd(gate=None))


# Options


@every_function
@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        ("1", TypeError, "a number, or None for K ** -0.5; got '1', a str"),
        (True, TypeError, "a number, or None for K ** -0.5; got True, a bool"),
        (torch.tensor(0.5), TypeError, "a number, or None for K ** -0.5; got tensor(0.5000), a Tensor"),
        (NOT_A_NUMBER, ValueError, "a finite number; got nan"),
        (-INFINITY, ValueError, "a finite number; got -inf"),
    ],
)
def test_a_scale_that_is_no_finite_number_is_refused(op, scale, error, message):
    assert_refused(error, f"scale must be {message}", op, arguments(op) | {"scale": 2}, scale=scale)


@each(CHUNKED)
@pytest.mark.parametrize(
    ("chunk_size", "error", "got"),
    [
        (0, ValueError, "0"),
        (-16, ValueError, "-16"),
        (48, ValueError, "48"),
        (256, ValueError, "256"),
        (True, TypeError, "True, a bool"),
        (64.0, TypeError, "64.0, a float"),
        (None, TypeError, "None, a NoneType"),
    ],
)
def test_a_chunk_size_that_no_kernel_has_is_refused(op, chunk_size, error, got):
    message = f"chunk_size must be one of (16, 32, 64, 128); got {got}"
    for allowed in (16, 32, 64, 128):
        assert_refused(error, message, op, arguments(op) | {"chunk_size": allowed}, chunk_size=chunk_size)


@every_function
@pytest.mark.parametrize("name", ["head_first", "use_qk_l2norm_in_kernel", "decay"])
def test_an_unknown_keyword_is_refused_by_name(op, name):
    op(**arguments(op))
    with pytest.raises(TypeError, match=rf"{op.__name__}\(\) got an unexpected keyword argument '{name}'"):
        op(**arguments(op), **{name: True})


@every_backward
def test_an_adjoint_takes_no_front_end(op):
    op(**arguments(op))
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'front_end'"):
        op(**arguments(op), front_end=FrontEnd())


# States and cotangents


STATE_MISTAKES = [
    ((HV, K, V), "[N, HV, K, V], that is [{N}, 6, 3, 4]; got [6, 3, 4]"),
    ((1, HV, V, K), "[N, HV, K, V], that is [{N}, 6, 3, 4]; got [1, 6, 4, 3]"),
    ((2, H, K, V), "[N, HV, K, V], that is [{N}, 6, 3, 4]; got [2, 2, 3, 4]"),
]


@every_function
@pytest.mark.parametrize(("shape", "message"), STATE_MISTAKES)
@pytest.mark.parametrize(("call", "N"), [(arguments, B), (packed, len(OFFSETS) - 1)], ids=["batch", "packed"])
def test_an_initial_state_of_the_wrong_shape_is_refused(op, call, N, shape, message):
    valid = call(op) | {"initial_state": torch.zeros(N, HV, K, V)}
    message = "initial_state must be " + message.format(N=N)
    assert_refused(ValueError, message, op, valid, initial_state=torch.zeros(shape))


@every_function
def test_a_packed_call_has_one_initial_state_a_segment(op):
    """One state for the row is what a batch of one wants; the offsets make it three."""
    one, three = torch.zeros(1, HV, K, V), torch.zeros(3, HV, K, V)
    op(**arguments(op, batch=1), initial_state=one)
    message = "initial_state must be [N, HV, K, V], that is [3, 6, 3, 4]; got [1, 6, 3, 4]"
    assert_refused(ValueError, message, op, packed(op) | {"initial_state": three}, initial_state=one)


@every_function
@pytest.mark.parametrize(
    ("of_q", "of_state", "wanted"),
    [
        (torch.float32, torch.float64, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_an_initial_state_of_another_dtype_than_the_computation_is_refused(op, of_q, of_state, wanted):
    valid = arguments(op, dtype=of_q) | {"initial_state": torch.zeros(B, HV, K, V, dtype=wanted)}
    message = f"initial_state must be {wanted} for {of_q} inputs; got {of_state}"
    assert_refused(TypeError, message, op, valid, initial_state=valid["initial_state"].to(of_state))


@every_function
def test_an_initial_state_that_is_no_tensor_or_lies_elsewhere_is_refused(op):
    valid = arguments(op) | {"initial_state": torch.zeros(B, HV, K, V)}
    message = "initial_state must be a torch.Tensor; got list"
    assert_refused(TypeError, message, op, valid, initial_state=[0.0])
    message = "initial_state must be on the device of q, cpu; got meta"
    assert_refused(ValueError, message, op, valid, initial_state=torch.zeros(B, HV, K, V, device=META))


@every_backward
@pytest.mark.parametrize(
    ("do", "error", "message"),
    [
        (torch.zeros(B, T, HV, K), ValueError, "[B, T, HV, V], that is [2, 5, 6, 4]; got [2, 5, 6, 3]"),
        (torch.zeros(B, T, HV * V), ValueError, "[B, T, HV, V], that is [2, 5, 6, 4]; got [2, 5, 24]"),
        (torch.zeros(B, T, HV, V, dtype=torch.int32), TypeError, "a floating point dtype; got torch.int32"),
        (torch.zeros(B, T, HV, V, device=META), ValueError, "on the device of q, cpu; got meta"),
        (None, TypeError, "a torch.Tensor; got NoneType"),
    ],
)
def test_an_output_gradient_unlike_the_output_is_refused(op, do, error, message):
    assert_refused(error, f"do must be {message}", op, arguments(op), do=do)


@every_backward
@pytest.mark.parametrize(
    ("dht", "error", "message"),
    [
        (torch.zeros(B, HV, V, K), ValueError, "[N, HV, K, V], that is [2, 6, 3, 4]; got [2, 6, 4, 3]"),
        (torch.zeros(1, HV, K, V), ValueError, "[N, HV, K, V], that is [2, 6, 3, 4]; got [1, 6, 3, 4]"),
        (
            torch.zeros(B, HV, K, V, dtype=torch.bfloat16),
            TypeError,
            "torch.float32 for torch.float32 inputs; got torch.bfloat16",
        ),
        (torch.zeros(B, HV, K, V, device=META), ValueError, "on the device of q, cpu; got meta"),
        (0.0, TypeError, "a torch.Tensor; got float"),
    ],
)
def test_a_state_gradient_unlike_the_final_state_is_refused(op, dht, error, message):
    valid = arguments(op) | {"dht": torch.zeros(B, HV, K, V)}
    assert_refused(error, f"dht must be {message}", op, valid, dht=dht)


@every_backward
def test_a_packed_adjoint_wants_one_state_gradient_a_segment(op):
    valid = packed(op) | {"dht": torch.zeros(3, HV, K, V)}
    message = "dht must be [N, HV, K, V], that is [3, 6, 3, 4]; got [1, 6, 3, 4]"
    assert_refused(ValueError, message, op, valid, dht=torch.zeros(1, HV, K, V))


# Gates and the front end: what their constructors refuse, and what a call does


GATES = pytest.mark.parametrize("gate", [softplus_gate, bounded_gate])


@GATES
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_a_gate_refuses_parameters_that_were_rounded(gate, name, dtype):
    parameter = torch.zeros({"A_log": (HV,), "dt_bias": (HV, K)}[name], dtype=dtype)
    message = (
        f"{name} must be float32 (float64 for float64 inputs); got {dtype}; "
        "load it without a cast: a rounded decay rate shows in the logits"
    )
    assert_refused(TypeError, message, gate, {name: parameter.double()}, **{name: parameter})


@GATES
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("A_log", (), "A_log must be [HV] or [1, 1, HV, 1]; got []"),
        ("A_log", (HV, K), "A_log must be [HV] or [1, 1, HV, 1]; got [6, 3]"),
        ("A_log", (1, HV, 1, 1), "A_log must be [HV] or [1, 1, HV, 1]; got [1, 6, 1, 1]"),
        ("dt_bias", (), "dt_bias must be [HV, K] or [HV * K]; got []"),
        ("dt_bias", (1, HV, K), "dt_bias must be [HV, K] or [HV * K]; got [1, 6, 3]"),
    ],
)
def test_a_gate_refuses_parameters_of_a_rank_that_no_checkpoint_has(gate, name, shape, message):
    assert_refused(ValueError, message, gate, {}, **{name: torch.zeros(shape)})


@GATES
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_a_gate_refuses_parameters_that_are_no_tensors(gate, name):
    assert_refused(TypeError, f"{name} must be a torch.Tensor; got float", gate, {}, **{name: 0.0})


@pytest.mark.parametrize(
    ("lower_bound", "error", "got"),
    [
        (0, ValueError, "0"),
        (5.0, ValueError, "5.0"),
        (-INFINITY, ValueError, "-inf"),
        (NOT_A_NUMBER, ValueError, "nan"),
        ("-5", TypeError, "'-5', a str"),
        (True, TypeError, "True, a bool"),
        (None, TypeError, "None, a NoneType"),
    ],
)
def test_a_lower_bound_that_is_no_finite_negative_number_is_refused(lower_bound, error, got):
    message = f"lower_bound must be a finite negative number; got {got}"
    assert_refused(error, message, bounded_gate, {"lower_bound": -5}, lower_bound=lower_bound)


@pytest.mark.parametrize("beta", ["tanh", "Sigmoid", True, 2.0])
def test_an_unknown_beta_activation_is_refused_with_those_that_exist(beta):
    message = f"beta must be one of 'sigmoid', 'double_sigmoid', None; got {beta!r}"
    for known in ("sigmoid", "double_sigmoid", None):
        assert_refused(ValueError, message, FrontEnd, {"beta": known}, beta=beta)


@pytest.mark.parametrize(
    ("eps", "error", "got"),
    [
        (0, ValueError, "0"),
        (-1e-6, ValueError, "-1e-06"),
        (INFINITY, ValueError, "inf"),
        (NOT_A_NUMBER, ValueError, "nan"),
        ("1e-6", TypeError, "'1e-6', a str"),
        (True, TypeError, "True, a bool"),
    ],
)
def test_an_l2norm_eps_that_is_no_positive_number_is_refused(eps, error, got):
    message = f"l2norm_eps must be a positive finite number; got {got}"
    for valid in (1e-6, 1, None):
        assert_refused(error, message, FrontEnd, {"l2norm_eps": valid}, l2norm_eps=eps)


@pytest.mark.parametrize("gate", ["softplus", torch.zeros(3), SoftplusGate])
def test_a_front_end_refuses_a_gate_of_another_type(gate):
    message = f"gate must be a SoftplusGate, a BoundedGate or None; got {type(gate).__name__}"
    assert_refused(TypeError, message, FrontEnd, {"gate": softplus_gate()}, gate=gate)


class LooksLikeAFrontEnd:
    gate = None


@every_forward
@pytest.mark.parametrize("front_end", [softplus_gate(), "softplus", FrontEnd, LooksLikeAFrontEnd()])
def test_a_front_end_of_another_type_is_refused_even_if_it_looks_alike(op, front_end):
    message = f"front_end must be a FrontEnd or None; got {type(front_end).__name__}"
    assert_refused(TypeError, message, op, arguments(op) | {"front_end": FrontEnd()}, front_end=front_end)


@every_forward
@GATES
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("A_log", (H,), "[HV] or [1, 1, HV, 1] with HV=6; got [2]"),
        ("A_log", (1, 1, H, 1), "[HV] or [1, 1, HV, 1] with HV=6; got [1, 1, 2, 1]"),
        ("dt_bias", (K, HV), "[HV, K] or flat with HV=6, K=3; got [3, 6]"),
        ("dt_bias", (HV,), "[HV, K] or flat with HV=6, K=3; got [6]"),
        ("dt_bias", (H, K), "[HV, K] or flat with HV=6, K=3; got [2, 3]"),
    ],
)
def test_gate_parameters_of_other_heads_or_channels_are_refused(op, gate, name, shape, message):
    valid = arguments(op) | {"front_end": FrontEnd(gate())}
    mistake = FrontEnd(gate(**{name: torch.zeros(shape)}))
    assert_refused(ValueError, f"{name} must be {message}", op, valid, front_end=mistake)


@every_forward
@GATES
@pytest.mark.parametrize("name", ["A_log", "dt_bias"])
def test_gate_parameters_wider_than_the_computation_or_elsewhere_are_refused(op, gate, name):
    shape = {"A_log": (HV,), "dt_bias": (HV, K)}[name]
    double = FrontEnd(gate(**{name: torch.zeros(shape, dtype=torch.float64)}))
    op(**arguments(op, dtype=torch.float64), front_end=double)
    valid = arguments(op) | {"front_end": FrontEnd(gate())}
    message = f"{name} must be float32 for torch.float32 inputs; got torch.float64"
    assert_refused(TypeError, message, op, valid, front_end=double)
    elsewhere = FrontEnd(gate(**{name: torch.zeros(shape, device=META)}))
    message = f"{name} must be on the device of q, cpu; got meta"
    assert_refused(ValueError, message, op, valid, front_end=elsewhere)


# What a call leaves behind


SITUATIONS = ["batch", "packed", "no_tokens", "no_tokens_packed"]


def situation(op, name, *, dtype=torch.float32):
    """A call with every optional tensor given: initial state, gate parameters or cotangents, offsets."""
    length = 0 if name.startswith("no_tokens") else T
    is_packed = name.endswith("packed")
    call = arguments(op, batch=1 if is_packed else B, length=length, dtype=dtype)
    if is_packed:
        call["cu_seqlens"] = offsets(*OFFSETS) if length else offsets(0, 0, 0, 0)
    N, state = (3 if is_packed else B), torch.float64 if dtype == torch.float64 else torch.float32
    call["initial_state"] = torch.randn(N, HV, K, V, dtype=state, generator=torch.Generator().manual_seed(8))
    if op in BACKWARD:
        return call | {"dht": 2 * call["initial_state"]}
    if op is not chunk_stages:
        call["output_final_state"] = True
    return call | {"front_end": FrontEnd(softplus_gate())}


def tensors_in(*values):
    """All tensors of a call or a result, however deep; numbers and flags are passed over."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
        elif isinstance(value, tuple):
            found += tensors_in(*value)
        elif isinstance(value, FrontEnd | SoftplusGate):
            found += tensors_in(vars(value))
    return found


def bits(x):
    return x.detach().clone().contiguous().flatten().view(torch.uint8)


@every_function
@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_no_function_writes_to_its_inputs(op, name, dtype):
    call = situation(op, name, dtype=dtype)
    if name == "packed":
        call["v"][:, OFFSETS[-1] :] = NOT_A_NUMBER  # bits to keep, too
    inputs = tensors_in(call)
    assert len(inputs) == len([x for x in call.values() if isinstance(x, torch.Tensor)]) + 2 * (op in FORWARD)
    before = [(bits(x), x._version) for x in inputs]
    op(**call)
    for x, (was, version) in zip(inputs, before, strict=True):
        assert torch.equal(bits(x), was)
        assert x._version == version


def shares_memory(x, y):
    if x.untyped_storage().nbytes() == 0 or y.untyped_storage().nbytes() == 0:
        return False
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


def test_the_memory_check_sees_a_view():
    x = torch.zeros(3, 2)
    assert shares_memory(x[1:].T, x)
    assert shares_memory(x.float(), x)
    assert not shares_memory(x.clone(), x)


@every_function
@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_output_is_fresh_memory(op, name, dtype):
    """A cast makes copies, so it is calls in the compute dtype that could hand an input back."""
    call = situation(op, name, dtype=dtype)
    result = op(**call)
    outputs = tensors_in((result.o, result.final_state) if op is chunk_stages else result)
    assert len(outputs) == (6 if op in BACKWARD else 2)
    for i, x in enumerate(outputs):
        assert not any(shares_memory(x, y) for y in tensors_in(call))
        assert not any(shares_memory(x, y) for y in outputs[:i])


@each([recurrent_kda, chunk_kda])
def test_a_state_that_passes_through_is_equal_and_not_the_same(op):
    call = situation(op, "no_tokens")
    _, final_state = op(**call)
    assert torch.equal(final_state, call["initial_state"])
    final_state.zero_()
    assert call["initial_state"].abs().min() > 0
