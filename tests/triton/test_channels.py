"""Inputs whose channels do not lie side by side: the kernels get a copy, and so the same launch and the same bits."""

import pytest
import torch
from triton_inputs import make_call

from judge import assert_same_bits
from kimi_linear.triton_kernels import chunk_kda, chunk_launch, fused_recurrent_kda, recurrent, replay, support


def spread(x):
    """Every second element of a buffer of NaN."""
    buffer = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype, device=x.device)
    buffer[..., ::2] = x
    return buffer[..., ::2]


@pytest.fixture
def told(monkeypatch):
    """What each launched kernel is told beside tensors, strides with it."""
    seen = []
    run = replay.run_launch

    def recorded(launch, device):
        arguments = launch.arguments.items()
        seen.append({name: value for name, value in arguments if not isinstance(value, torch.Tensor)})
        return run(launch, device)

    monkeypatch.setattr(replay, "run_launch", recorded)
    return seen


@pytest.mark.parametrize("op", [chunk_kda, fused_recurrent_kda])
def test_a_spread_input_is_launched_as_a_dense_one(op, told):
    call = make_call(B=1, T=20, K=20, V=12)
    o, _ = op(**call)
    dense, told[:] = list(told), []
    views = {name: spread(call[name]) for name in ("q", "k", "v", "g", "initial_state")}
    assert not any(x.is_contiguous() for x in views.values())
    for calls in (chunk_launch.CALLS, recurrent.CALLS):
        calls.known.clear()  # on a GPU the same call is replayed, and nothing told
    got, _ = op(**call | views)
    assert_same_bits(got, o)
    assert dense
    assert told == dense


def test_tensors_that_need_no_copy_are_passed_on():
    x = torch.zeros(2, 3, 4)
    assert support.adjacent_channels(x)[0] is x
    view = x.transpose(0, 1)
    assert support.adjacent_channels(view)[0] is view
    assert_same_bits(support.adjacent_channels(spread(x))[0], x)


@pytest.mark.parametrize("first", ["dense", "spread"])
def test_dense_and_spread_inputs_take_turns(first):
    """A call is known by strides too: what was prepared for the one is never run on the other."""
    calls = {"dense": [], "spread": []}
    for turn in range(2):
        call = make_call(B=1, T=20, K=20, V=12, seed=turn)
        views = {name: spread(call[name]) for name in ("q", "k", "v", "g")}
        turns = {"dense": call, "spread": call | views}
        for name in sorted(turns, reverse=first == "spread"):
            calls[name].append(chunk_kda(**turns[name])[0])
    for dense, other in zip(*calls.values(), strict=True):
        assert_same_bits(other, dense)


def test_calls_have_the_same_number_only_if_they_launch_alike():
    x = torch.zeros(2, 3, 4)
    assert support.number_of(x, None) == support.number_of(torch.ones(2, 3, 4), None)
    others = [(x,), (x, x), (None, x), (x.half(), None), (x.transpose(0, 1), None), (x[:1], None), (spread(x), None)]
    numbers = {support.number_of(*tensors) for tensors in [(x, None), *others]}
    assert len(numbers) == len(others) + 1
