"""The pooled decode step: the same numbers as the definition, in the right slots and nowhere else."""

import pytest
import torch
from triton_inputs import DEVICE, GATES, assert_rounded_only, inside_poison, make_call, poisoned, reference

from kimi_linear.triton_kernels.decode import decode_step
from kimi_linear.triton_kernels.recurrent import fused_recurrent_kda

POISON = [float("nan"), 1e30]
SIZES = [(3, 1, 2, 4, 12, 20), (3, 1, 1, 1, 60, 33), (3, 1, 1, 1, 100, 20), (3, 2, 1, 1, 256, 20)]


def make_pool(call, slots, into, poison=float("nan"), dtype=torch.float32):
    """A pool of poison in which the call's initial states lie at the slots `into`; takes them out of the call."""
    h0 = call.pop("initial_state")
    pool = torch.full((slots, *h0.shape[1:]), poison, dtype=dtype, device=DEVICE)
    pool[into] = h0.to(dtype)
    return pool


def indices(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def bits(x):
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_decode_agrees_with_the_definition(gate, sizes):
    call = make_call(*sizes, gate=gate)
    exact_o, exact_ht = reference(**call)
    pool = make_pool(call, 6, [4, 0, 3])
    o = decode_step(**call, state_pool=pool, slot_indices=indices(4, 0, 3), check_indices=True)
    assert_rounded_only(o, exact_o, tokens=sizes[1])
    assert_rounded_only(pool[[4, 0, 3]], exact_ht, tokens=sizes[1])


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_that_no_sequence_has_keep_their_bits(poison, dtype):
    call = make_call(B=3, T=1)
    pool = make_pool(call, 6, [4, 0, 3], poison, dtype)
    before = pool.clone()
    o = decode_step(**call, state_pool=pool, slot_indices=indices(4, 0, 3))
    assert torch.equal(bits(pool[[1, 2, 5]]), bits(before[[1, 2, 5]]))
    assert not torch.equal(pool[[4, 0, 3]], before[[4, 0, 3]])
    assert o.isfinite().all()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("nobody", [-1, -7, 6, 2**31 - 1])
def test_an_index_that_is_padding_or_outside_the_pool_touches_nothing(nobody, index_dtype):
    call = make_call(B=3, T=2)
    pool = make_pool(call, 6, [4, 0, 3])
    before = pool.clone()
    clean = decode_step(**call, state_pool=before.clone(), slot_indices=indices(4, 0, 3))
    o = decode_step(**call, state_pool=pool, slot_indices=indices(4, nobody, 3, dtype=index_dtype))
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert torch.equal(o[[0, 2]], clean[[0, 2]])
    untouched = [0, 1, 2, 5]
    assert torch.equal(bits(pool[untouched]), bits(before[untouched]))


def test_the_padding_index_is_the_callers_to_choose():
    call = make_call(B=3, T=1)
    pool = make_pool(call, 6, [4, 0, 3])
    before = pool.clone()
    o = decode_step(**call, state_pool=pool, slot_indices=indices(4, 0, 3), pad_slot=0, check_indices=True)
    assert torch.equal(bits(pool[[0, 1, 2, 5]]), bits(before[[0, 1, 2, 5]]))
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert o[0].abs().max() > 0


def test_nan_in_a_padded_row_stays_there():
    call = make_call(B=3, T=1)
    pool = make_pool(call, 6, [4, 0, 3])
    for name in ("q", "k", "v", "g", "beta"):
        call[name][1] = float("nan")
    o = decode_step(**call, state_pool=pool, slot_indices=indices(4, -1, 3))
    assert torch.equal(o[1], torch.zeros_like(o[1]))
    assert o.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_inputs_and_a_bf16_pool_are_computed_with_in_fp32(dtype):
    call = make_call(B=2, T=1, dtype=dtype)
    call["initial_state"] = call["initial_state"].bfloat16().float()
    exact_o, exact_ht = reference(**call)
    pool = make_pool(call, 4, [2, 1], dtype=torch.bfloat16)
    o = decode_step(**call, state_pool=pool, slot_indices=indices(2, 1))
    assert_rounded_only(o, exact_o, tokens=1)
    assert_rounded_only(pool[[2, 1]], exact_ht, tokens=1)


def test_drafts_leave_a_state_for_every_token_and_start_from_the_last_accepted():
    call = make_call(B=2, T=3)
    pool = make_pool(call, 12, [5, 9])  # the second slot of sequence 0, the third of sequence 1
    states = pool[[5, 9]].clone()
    before = pool.clone()
    slots = indices([4, 5, 6, 1], [7, 8, 9, 2])
    o = decode_step(
        **call, state_pool=pool, slot_indices=slots, num_accepted_tokens=indices(2, 3), check_indices=True
    )
    for t in range(3):
        prefix = call | {name: call[name][:, : t + 1] for name in ("q", "k", "v", "g", "beta")}
        o_t, state_t = fused_recurrent_kda(**prefix, initial_state=states, output_final_state=True)
        assert_rounded_only(o[:, : t + 1], o_t.cpu().double(), tokens=t + 1)
        assert_rounded_only(pool[slots[:, t].long()], state_t.cpu().double(), tokens=t + 1)
    untouched = [0, 1, 2, 3, 10, 11]
    assert torch.equal(bits(pool[untouched]), bits(before[untouched]))


def test_rejecting_every_draft_is_to_start_from_the_first_slot_again():
    call = make_call(B=1, T=2)
    pool = make_pool(call, 4, [0])
    slots = indices([0, 3])
    decode_step(**call, state_pool=pool, slot_indices=slots)
    kept = pool[0].clone()
    o = decode_step(**call, state_pool=pool, slot_indices=slots, num_accepted_tokens=indices(1))
    want, _ = fused_recurrent_kda(**call, initial_state=kept[None])
    assert_rounded_only(o, want.cpu().double(), tokens=2)


def test_a_draft_without_a_slot_is_computed_and_not_stored():
    call = make_call(B=1, T=2)
    pool = make_pool(call, 4, [0])
    before = pool.clone()
    o = decode_step(**call, state_pool=pool, slot_indices=indices([0, -1]))
    assert o.isfinite().all()
    assert o[:, 1].abs().max() > 0
    assert torch.equal(bits(pool[1:]), bits(before[1:]))


def test_a_count_outside_the_slots_touches_nothing():
    call = make_call(B=2, T=2)
    pool = make_pool(call, 4, [0, 1])
    before = pool.clone()
    slots = indices([0, 2], [1, 3])
    o = decode_step(**call, state_pool=pool, slot_indices=slots, num_accepted_tokens=indices(0, 3))
    assert torch.equal(bits(pool), bits(before))
    assert torch.equal(o, torch.zeros_like(o))


def test_packed_sequences_of_different_lengths_decode_as_if_alone():
    offsets = [0, 2, 2, 3]
    call = make_call(B=1, T=5, N=3)
    pool = make_pool(call, 6, [4, 0, 3])
    before = pool.clone()
    o = decode_step(**call, state_pool=pool, slot_indices=indices(4, 0, 3), cu_seqlens=indices(*offsets))
    for n, slot in enumerate([4, 0, 3]):
        tokens = slice(offsets[n], offsets[n + 1])
        alone = call | {name: call[name][:, tokens] for name in ("q", "k", "v", "g", "beta")}
        want, state = fused_recurrent_kda(**alone, initial_state=before[slot : slot + 1], output_final_state=True)
        if tokens.stop > tokens.start:
            assert_rounded_only(o[:, tokens], want.cpu().double(), tokens=2)
        assert_rounded_only(pool[slot], state[0].cpu().double(), tokens=2)
    assert torch.equal(bits(pool[[0, 1, 2, 5]]), bits(before[[0, 1, 2, 5]])), "slot 0 is of the empty sequence"
    assert torch.equal(o[:, 3:], torch.zeros_like(o[:, 3:]))


@pytest.mark.parametrize("transposed", [False, True])
def test_strides_of_inputs_pool_and_indices_are_honoured(transposed):
    call = make_call(B=2, T=2)
    pool = make_pool(call, 5, [3, 1])
    want_pool = pool.clone()
    want = decode_step(**call, state_pool=want_pool, slot_indices=indices([3, 0], [1, 2]))
    pool = inside_poison(pool, 1e30, transposed=transposed)
    slots = inside_poison(indices([3, 0], [1, 2]), -5, transposed=transposed)
    sliced = poisoned(call, float("nan"), transposed=transposed)
    o = decode_step(**sliced, state_pool=pool, slot_indices=slots)
    assert not pool.is_contiguous()
    assert_rounded_only(o, want.cpu().double(), tokens=2)
    assert_rounded_only(pool[:4], want_pool[:4].cpu().double(), tokens=2)
    assert torch.equal(bits(pool[4].contiguous()), bits(want_pool[4]))
    if DEVICE == "cpu":  # a GPU gives each thread what it can load at once, and sums in that order
        assert torch.equal(o, want)
        assert torch.equal(bits(pool.contiguous()), bits(want_pool))
    for name in ("q", "k", "v", "g", "beta"):
        assert torch.equal(sliced[name], call[name])


def test_a_sequence_gives_the_same_bits_in_any_batch():
    call = make_call(B=3, T=1)
    pool = make_pool(call, 6, [4, 0, 3])
    together = pool.clone()
    o = decode_step(**call, state_pool=together, slot_indices=indices(4, 0, 3))
    for n, slot in enumerate([4, 0, 3]):
        alone = call | {name: call[name][n : n + 1] for name in ("q", "k", "v", "g", "beta")}
        assert torch.equal(decode_step(**alone, state_pool=pool, slot_indices=indices(slot)), o[n : n + 1])
    assert torch.equal(bits(pool), bits(together))


def test_an_empty_sequence_leaves_its_bf16_state_as_it_is():
    call = make_call(B=1, T=1, N=2)
    pool = make_pool(call, 3, [0, 1], dtype=torch.bfloat16)
    pool[1] = float("nan")
    before = pool.clone()
    decode_step(**call, state_pool=pool, slot_indices=indices(0, 1), cu_seqlens=indices(0, 1, 1))
    assert torch.equal(bits(pool[1:]), bits(before[1:]))
    assert not torch.equal(pool[0], before[0])


def test_no_sequences_and_no_tokens_are_fine():
    call = make_call(B=2, T=0)
    pool = make_pool(call, 3, [0, 1])
    before = pool.clone()
    assert decode_step(**call, state_pool=pool, slot_indices=indices(0, 1)).shape == (2, 0, 2, 20)
    assert torch.equal(bits(pool), bits(before))


@pytest.mark.parametrize(
    ("slots", "accepted", "message"),
    [
        ([[0, 1], [2, 9]], None, r"slot_indices must be in \[0, 5\) or pad_slot=-1; got 9"),
        ([[0, 1], [1, 3]], None, "a slot once: two states would race for it; got 1 twice"),
        ([[0, 1], [2, 3]], [1, 0], r"num_accepted_tokens must be in \[1, M=2\]; got 0"),
        ([0, 1, 2], None, r"slot_indices must be \[N\] or \[N, M\] with N=2; got \[3\]"),
        ([[0], [1]], None, r"slot_indices must be \[N, M\] with M >= T=2; got \[2, 1\]"),
        ([0, 1], [1, 1], r"num_accepted_tokens must be None unless slot_indices is \[N, M\]"),
    ],
)
def test_wrong_indices_are_refused_by_name(slots, accepted, message):
    call = make_call(B=2, T=2)
    pool = make_pool(call, 5, [0, 1])
    before = pool.clone()
    accepted = None if accepted is None else indices(*accepted)
    with pytest.raises(ValueError, match=message):
        decode_step(
            **call,
            state_pool=pool,
            slot_indices=indices(*slots),
            num_accepted_tokens=accepted,
            check_indices=True,
        )
    assert torch.equal(bits(pool), bits(before))


def test_a_pool_of_another_shape_or_dtype_is_refused_by_name():
    call = make_call(B=2, T=1)
    pool = make_pool(call, 3, [0, 1])
    with pytest.raises(ValueError, match=r"state_pool must be \[slots, HV, K, V\], that is \[slots, 2, 12, 20\]"):
        decode_step(**call, state_pool=pool.transpose(2, 3), slot_indices=indices(0, 1))
    with pytest.raises(TypeError, match=r"state_pool must be float32 or bfloat16; got torch.float16"):
        decode_step(**call, state_pool=pool.half(), slot_indices=indices(0, 1))
    with pytest.raises(TypeError, match=r"slot_indices must be int32 or int64; got torch.float32"):
        decode_step(**call, state_pool=pool, slot_indices=indices(0, 1).float())
