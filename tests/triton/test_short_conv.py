"""The short convolution against its plain form, with the states that prefill leaves and decoding shifts."""

import pytest
import torch
from triton_inputs import DEVICE, inside_poison

from kimi_linear.triton_kernels.short_conv import causal_conv1d, causal_conv1d_ref
from kimi_linear.triton_kernels.short_conv_update import causal_conv1d_update, causal_conv1d_update_ref

D, W = 20, 4
PACKED = [0, 0, 1, 3, 3, 40, 45]  # segments of 0, 1, 2, 0, 37 and 5 tokens: some shorter than W - 1


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def in_fp64(*tensors):
    return [None if x is None else x.cpu().double() for x in tensors]


def assert_rounded_only(got, exact):
    """W products and sums in fp32 and one rounding to the output's dtype; 4 more in the activation."""
    eps = (W + 4) * torch.finfo(torch.float32).eps + (torch.finfo(got.dtype).eps if got.dtype != torch.float32 else 0)
    assert exact.abs().max() > 0
    assert (got.cpu().double() - exact).abs().max() <= eps * exact.abs().max()


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_conv_agrees_with_its_plain_form(activation, dtype):
    x, weight = normal(2, 37, D, dtype=dtype), normal(D, W, seed=1)
    y, ht = causal_conv1d(x, weight, activation=activation, output_final_state=True)
    exact, state = causal_conv1d_ref(*in_fp64(x, weight), activation=activation, output_final_state=True)
    assert_rounded_only(y, exact)
    assert torch.equal(ht.cpu().double(), state)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_packed_segments_start_from_their_states_and_leave_the_last_inputs(index_dtype):
    x, weight, bias, h0 = normal(1, 50, D), normal(D, W, seed=1), normal(D, seed=2), normal(6, D, W - 1, seed=3)
    cu_seqlens = torch.tensor(PACKED, dtype=index_dtype, device=DEVICE)
    y, ht = causal_conv1d(x, weight, bias=bias, initial_state=h0, output_final_state=True, cu_seqlens=cu_seqlens)
    x64, weight64, bias64, h064 = in_fp64(x, weight, bias, h0)
    exact, state = causal_conv1d_ref(
        x64, weight64, bias=bias64, initial_state=h064, output_final_state=True, cu_seqlens=cu_seqlens
    )
    assert_rounded_only(y[:, :45], exact[:, :45])
    assert torch.equal(ht.cpu().double(), state)
    assert torch.equal(ht[0], h0[0]), "an empty segment passes its state through"
    assert torch.equal(ht[1], torch.cat([h0[1][:, 1:], x[0, :1].T], dim=1)), "one token, two old inputs"
    assert torch.equal(y[:, 45:], torch.zeros_like(y[:, 45:]))


def test_a_segment_does_not_see_nan_in_its_neighbours():
    x, weight, h0 = normal(1, 50, D), normal(D, W, seed=1), normal(6, D, W - 1, seed=3)
    cu_seqlens = torch.tensor(PACKED, device=DEVICE)
    clean, _ = causal_conv1d(x, weight, initial_state=h0, cu_seqlens=cu_seqlens)
    x[:, 3:40] = h0[4] = x[:, 45:] = float("nan")
    dirty, ht = causal_conv1d(x, weight, initial_state=h0, cu_seqlens=cu_seqlens, output_final_state=True)
    others = [*range(3), *range(40, 50)]
    assert torch.equal(dirty[:, others], clean[:, others])
    assert ht[[0, 1, 2, 3, 5]].isfinite().all()
    assert ht[4].isnan().all()


@pytest.mark.parametrize("transposed", [False, True])
def test_strides_and_memory_around_do_not_matter(transposed):
    x, weight, bias, h0 = normal(2, 9, D), normal(D, W, seed=1), normal(D, seed=2), normal(2, D, W - 1, seed=3)
    clean = causal_conv1d(x, weight, bias=bias, initial_state=h0, output_final_state=True)
    sliced = [inside_poison(tensor, float("nan"), transposed=transposed) for tensor in (x, weight, h0)]
    around = causal_conv1d(*sliced[:2], bias=bias, initial_state=sliced[2], output_final_state=True)
    assert torch.equal(around[0], clean[0])
    assert torch.equal(around[1], clean[1])
    assert torch.equal(sliced[0], x)


def test_prefill_in_two_pieces_is_prefill_in_one():
    x, weight = normal(1, 12, D), normal(D, W, seed=1)
    whole, ht = causal_conv1d(x, weight, output_final_state=True)
    for cut in (1, 2, 7):
        first, state = causal_conv1d(x[:, :cut], weight, output_final_state=True)
        second, last = causal_conv1d(x[:, cut:], weight, initial_state=state, output_final_state=True)
        assert torch.equal(torch.cat([first, second], dim=1), whole)
        assert torch.equal(last, ht)


def test_no_tokens_return_the_initial_state():
    h0 = normal(2, D, W - 1)
    y, ht = causal_conv1d(normal(2, 0, D), normal(D, W), initial_state=h0, output_final_state=True)
    assert y.shape == (2, 0, D)
    assert torch.equal(ht, h0)


@pytest.mark.parametrize("width", [1, 2, 4, 5])
def test_updates_in_place_continue_a_prefill(width):
    x, weight, bias = normal(2, 7, D), normal(D, width, seed=1), normal(D, seed=2)
    whole, last = causal_conv1d(x, weight, bias=bias, output_final_state=True)
    _, pool = causal_conv1d(x[:, :4], weight, bias=bias, output_final_state=True)
    for t in range(4, 7):
        y = causal_conv1d_update(x[:, t], pool, weight, bias=bias)
        assert_rounded_only(y, whole[:, t].cpu().double())
    assert torch.equal(pool, last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_update_agrees_with_its_plain_form_and_touches_its_slots_only(dtype):
    x, weight, bias = normal(5, D, dtype=dtype), normal(D, W, seed=1), normal(D, seed=2)
    pool = torch.full((7, D, W - 1), float("nan"), dtype=dtype, device=DEVICE)
    pool[[3, 0]] = normal(2, D, W - 1, dtype=dtype, seed=4)
    slots = torch.tensor([3, -1, 0, 9, -4], device=DEVICE)
    exact, after = causal_conv1d_update_ref(*in_fp64(x, pool, weight), bias=in_fp64(bias)[0], slot_indices=slots)
    y = causal_conv1d_update(x, pool, weight, bias=bias, slot_indices=slots)
    assert_rounded_only(y, exact)
    assert torch.equal(y[[1, 3, 4]], torch.zeros_like(y[[1, 3, 4]]))
    assert torch.equal(pool.cpu().double().nan_to_num(7.0), after.nan_to_num(7.0))
    assert pool[[1, 2, 4, 5, 6]].isnan().all()


def test_update_honours_strides_and_the_callers_padding_index():
    x, weight, pool = normal(2, D), normal(D, W, seed=1), normal(3, D, W - 1, seed=4)
    want_pool = pool.clone()
    want = causal_conv1d_update(x, want_pool, weight, slot_indices=torch.tensor([2, 0], device=DEVICE), pad_slot=0)
    pool = inside_poison(pool, float("nan"), transposed=True)
    slots = inside_poison(torch.tensor([2, 0], device=DEVICE), 1)
    y = causal_conv1d_update(
        inside_poison(x, float("nan"), transposed=True), pool, weight, slot_indices=slots, pad_slot=0
    )
    assert torch.equal(y, want)
    assert torch.equal(pool, want_pool)
    assert torch.equal(y[1], torch.zeros_like(y[1]))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(2, 3)}, ValueError, r"x must be \[B, T, D\]; got \[2, 3\]"),
        ({"x": torch.zeros(2, 3, D, dtype=torch.float64)}, TypeError, "x must be float16, bfloat16 or float32"),
        (
            {"weight": torch.zeros(W, D)},
            ValueError,
            r"weight must be \[D, W\] with D=20, 1 <= W <= 16; got \[4, 20\]",
        ),
        ({"activation": "gelu"}, ValueError, "activation must be one of 'silu', None; got 'gelu'"),
        ({"initial_state": torch.zeros(2, W - 1, D)}, ValueError, r"initial_state must be \[N, D, W - 1\]"),
        ({"cu_seqlens": torch.tensor([0, 3])}, ValueError, r"cu_seqlens must be \[N \+ 1\] offsets .* with B=2"),
    ],
)
def test_a_wrong_call_is_refused_by_name(changes, error, message):
    call = {"x": torch.zeros(2, 3, D), "weight": torch.zeros(D, W)} | changes
    call = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    with pytest.raises(error, match=message):
        causal_conv1d(call.pop("x"), call.pop("weight"), **call)


def test_a_slot_outside_the_pool_or_given_twice_is_refused_when_asked_for():
    x, pool, weight = normal(2, D), normal(3, D, W - 1), normal(D, W)
    for slots, message in (([0, 3], r"in \[0, 3\) or pad_slot=-1; got 3"), ([1, 1], "got 1 twice")):
        with pytest.raises(ValueError, match=message):
            causal_conv1d_update(x, pool, weight, slot_indices=torch.tensor(slots, device=DEVICE), check_indices=True)
