"""A short convolution with its state: exact, causal, in pieces, packed, and step by step.

    y_t = silu(sum_j weight[:, j] x_{t - W + 1 + j})      each channel for itself; the last tap reads x_t
    state = the last W - 1 inputs, oldest first, as they came

Four taps and a shift leave little room for rounding and much for an index that is off by one, so most of these checks
compare bits. What has to agree between calls of different lengths is asked of integers: vector instructions may take
the activation of a row's tail in another way than that of its middle.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from .adapter import ConvCall
from .bench import Bench, RelationBroken, must_equal
from .capabilities import ShortConv
from .conv_gold import conv_bounds, conv_truth, gated, rectified
from .draws import Draw
from .envelope import error_ratio
from .gold import Results
from .guard import KernelFailure, raw_run, same_bits
from .limits import FORWARD_RATIO
from .precision import DTYPES
from .relation import RELATIONS, Add, Check, Relation
from .verdict import Verdict

D = 20  # channels, in no tile's size
T = 11
LENGTHS = (4, 0, 1, 2, 9)  # segments, some shorter than a state
VLLM_SHORT, VLLM_PIECE, FLASHINFER_WRAP = "vllm #20838", "vllm #56196", "flashinfer #5042"
EXACT_STEP = 128.0  # silu of its multiples is exact: 0 below, x above
SPARE_SLOTS = 3
RESULTS = frozenset(("y", "final_state"))


def conv_check(id: str, catches: str, *needs: str, links: tuple[str, ...] = (), tier: str = "relation") -> Add:
    """Add a check of a short convolution to RELATIONS."""

    def add(check: Check) -> Check:
        needed = ("short_conv", *needs)
        RELATIONS.append(Relation(f"short_conv.{id}", catches, check, needed, "short_conv", links, tier=tier))
        return check

    return add


def declared(bench: Bench) -> ShortConv:
    """What the adapter says about its convolution."""
    assert bench.caps.short_conv is not None
    return bench.caps.short_conv


def conv_call(bench: Bench, B: int = 2, tokens: int = T, lengths: tuple[int, ...] = ()) -> ConvCall:
    """Random inputs, and a state for every sequence or segment; packed where there are lengths."""
    W, dtype = min(declared(bench).taps, key=lambda taps: abs(taps - 4)), DTYPES[bench.contract.io]
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(getattr(torch, bench.caps.packed_dtype))
    rows = (1, sum(lengths)) if lengths else (B, tokens)

    def normal(name: str, *shape: int) -> Tensor:
        return torch.from_numpy(Draw(len(lengths) + 1, name).normal(*shape)).to(dtype)

    state = normal("state", len(lengths) or B, W - 1, D)
    return ConvCall(
        normal("x", *rows, D), normal("weight", D, W), initial_state=in_layout(state, bench),
        cu_seqlens=offsets if lengths else None, contract=bench.contract,
    )  # fmt: skip


def integers_of(call: ConvCall) -> ConvCall:
    """Rounded inputs and taps times 128: sums are exact, and so is their silu, x above 0 and 0 below."""
    x, weight, state = (torch.round(y.float()).to(y.dtype) for y in (call.x, call.weight, _state(call)))
    return replace(call, x=x, weight=weight * EXACT_STEP, initial_state=state)


def _state(call: ConvCall) -> Tensor:
    assert call.initial_state is not None
    return call.initial_state


def in_layout(state: Tensor, bench: Bench) -> Tensor:
    """A state [.., W - 1, D] in the kernel's layout; also the way back."""
    return state if declared(bench).layout == "WD" else state.transpose(-1, -2).contiguous()


def convolved(bench: Bench, call: ConvCall) -> Results:
    """y, and the final state as [N, W - 1, D]; raises KernelFailure where a shape or a dtype is wrong."""
    got = raw_run(bench.adapter, call, bench.caps, RESULTS, bench.seconds)
    N = len(call.x) if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    shape = in_layout(call.x.new_zeros(N, call.weight.shape[1] - 1, call.x.shape[-1]), bench).shape
    _check("y", got["y"], call.x.shape, call.x.dtype)
    _check("final_state", got["final_state"], shape, call.x.dtype)
    return {"y": got["y"], "final_state": in_layout(got["final_state"], bench)}


def _check(name: str, x: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype:
        raise KernelFailure(f"{name} of a convolution must be {list(shape)}, {dtype}; got {list(x.shape)}, {x.dtype}")


def truth_of_call(bench: Bench, call: ConvCall) -> Results:
    """y and the state in fp64."""
    state = None if call.initial_state is None else in_layout(call.initial_state, bench)
    return conv_truth(call, state, gated)


@conv_check("exact", "a wrong tap, a wrong token, an activation that is missing", tier="exact")
def exact(bench: Bench) -> None:
    """Integers, whose silu is x above 0 and 0 below to the last bit."""
    call = integers_of(conv_call(bench))
    want, got = conv_truth(call, in_layout(_state(call), bench), rectified), convolved(bench, call)
    must_equal(got["y"].double(), want["y"], "y of integers")
    must_equal(got["final_state"].double(), want["final_state"], "the state after integers")


@conv_check("envelope", "an error of more than roundings", tier="ratio")
def envelope(bench: Bench) -> Verdict:
    """y against fp64, each token over the envelope of its roundings."""
    call = conv_call(bench, B=3, tokens=29)
    state = in_layout(_state(call), bench)
    return judged("envelope", bench, convolved(bench, call)["y"], call, state)


def judged(id: str, bench: Bench, y: Tensor, call: ConvCall, state: Tensor) -> Verdict:
    """The verdict of y by ratio."""
    want, bounds = conv_truth(call, state, gated)["y"], conv_bounds(call, state, bench.contract)
    ratio = error_ratio(y.double(), want, bounds)
    worst = ratio.max().item()
    verdict = Verdict(f"short_conv.{id}", "ratio", "pass", ratios={"y": worst}, limit=FORWARD_RATIO)
    verdict.contract = bench.contract
    if not worst <= FORWARD_RATIO:
        at = (~(ratio <= FORWARD_RATIO)).nonzero()[0].tolist()
        verdict.status, verdict.reason = "fail", f"y is off by {worst:.3g} roundings, first at {at}"
    return verdict


@conv_check("state", "a state that is shifted, rounded, or not raw", links=(VLLM_SHORT,))
def state(bench: Bench) -> None:
    """The state is the last inputs, bit for bit; older ones stay where there are fewer tokens than it holds."""
    for tokens in (T, 2, 1, 0):
        call = conv_call(bench, tokens=tokens)
        want = truth_of_call(bench, call)["final_state"].to(call.x.dtype)
        must_equal(convolved(bench, call)["final_state"], want, f"the state after {tokens} tokens")


@conv_check("no_state", "memory that is read where there is no state")
def no_state(bench: Bench) -> None:
    """No initial state is one of zeros."""
    call = conv_call(bench)
    zeros = convolved(bench, replace(call, initial_state=torch.zeros_like(_state(call))))
    for name, want in zeros.items():
        must_equal(convolved(bench, replace(call, initial_state=None))[name], want, f"{name} without a state")


@conv_check("causality", "a tap that reads ahead")
def causality(bench: Bench) -> None:
    """What comes after a token changes no bit up to it."""
    call = conv_call(bench)
    before = convolved(bench, call)["y"]
    for t in (1, 3, T - 1):
        later = call.x.clone()
        later[:, t:] = torch.nan
        got = convolved(bench, replace(call, x=later))["y"]
        must_equal(got[:, :t], before[:, :t], f"y before token {t} with other tokens from there on")


@conv_check("split", "a state that is lost between pieces", links=(VLLM_PIECE,))
def split(bench: Bench) -> None:
    """Two pieces joined by the state are the whole, to the last bit, wherever the cut; a piece may be short."""
    call = integers_of(conv_call(bench))
    whole = convolved(bench, call)
    for cut in (1, 2, 3, 4, T - 1):
        first = convolved(bench, replace(call, x=call.x[:, :cut].contiguous()))
        left = in_layout(first["final_state"], bench)
        second = convolved(bench, replace(call, x=call.x[:, cut:].contiguous(), initial_state=left))
        must_equal(torch.cat([first["y"], second["y"]], 1), whole["y"], f"y in two pieces, cut at {cut}")
        must_equal(second["final_state"], whole["final_state"], f"the state after two pieces, cut at {cut}")


@conv_check("packed", "a neighbour's inputs in a window", "packed_conv", links=(VLLM_SHORT,))
def packed(bench: Bench) -> None:
    """Packed segments get the bits that each gets alone; a neighbour of NaN changes nothing."""
    call = integers_of(conv_call(bench, lengths=LENGTHS))
    got, ends = convolved(bench, call), _ends(call)
    for n, (start, end) in enumerate(pairwise(ends)):
        rows = call.x[:, start:end].contiguous()
        alone = convolved(bench, replace(call, x=rows, initial_state=_state(call)[n : n + 1], cu_seqlens=None))
        must_equal(got["y"][:, start:end], alone["y"], f"y of segment {n}")
        must_equal(got["final_state"][n : n + 1], alone["final_state"], f"the state of segment {n}")
    spoiled = call.x.clone()
    spoiled[:, ends[-2] :] = torch.nan
    again = convolved(bench, replace(call, x=spoiled))
    must_equal(again["y"][:, : ends[-2]], got["y"][:, : ends[-2]], "y beside a segment of NaN")
    must_equal(again["final_state"][:-1], got["final_state"][:-1], "states beside a segment of NaN")


def _ends(call: ConvCall) -> list[int]:
    assert call.cu_seqlens is not None
    return [int(end) for end in call.cu_seqlens]


@conv_check("update", "a step that differs from a prefill", "conv_update", tier="ratio")
def update(bench: Bench) -> Verdict:
    """Steps of one token, states in a pool, are the convolution over all tokens; the states have its very bits."""
    call = conv_call(bench, B=3, tokens=5)
    pool, slots = pool_for(call, bench)
    y = torch.stack([stepped(bench, call, t, pool, slots) for t in range(5)], 1)
    want = truth_of_call(bench, call)["final_state"].to(call.x.dtype)
    must_equal(in_layout(pool[slots.long()], bench), want, "states after steps of one token")
    return judged("update", bench, y, call, in_layout(_state(call), bench))


def pool_for(call: ConvCall, bench: Bench) -> tuple[Tensor, Tensor]:
    """A pool of NaN that holds the call's states in slots out of order, and the indices of these."""
    states = _state(call)
    slots = torch.arange(len(states), dtype=torch.int32).flip(0) + 1
    pool = torch.full((len(states) + SPARE_SLOTS, *states.shape[1:]), torch.nan, dtype=states.dtype)
    pool[slots.long()] = states
    return pool, slots


def stepped(bench: Bench, call: ConvCall, t: int, pool: Tensor, slots: Tensor) -> Tensor:
    """y of token t; the pool advances."""
    one = ConvCall(call.x[:, t].contiguous(), call.weight, state_pool=pool, slot_indices=slots)
    one = replace(one, operation="short_conv_update", contract=bench.contract)
    caps = replace(bench.caps, overwrites=(*bench.caps.overwrites, "state_pool"))
    y = raw_run(bench.adapter, one, caps, frozenset(("y",)), bench.seconds, copy=False)["y"]
    _check("y", y, one.x.shape, one.x.dtype)
    return y


@conv_check(
    "update_slots",
    "padding that is taken for a slot, a write to a slot that nobody named",
    "conv_update",
    links=(FLASHINFER_WRAP,),
)
def update_slots(bench: Bench) -> None:
    """A step writes the slots that it names and no other; padding beside them changes no bit."""
    call = integers_of(conv_call(bench, B=3))
    plain, slots = pool_for(call, bench)
    want = stepped(bench, call, 0, plain, slots)
    for nobody in declared(bench).nobody:
        pool, _ = pool_for(call, bench)
        before, padded = pool.clone(), slots.clone()
        padded[1] = nobody
        got = stepped(bench, call, 0, pool, padded)
        must_equal(got[[0, 2]], want[[0, 2]], f"y beside padding of index {nobody}")
        for slot in range(len(pool)):
            named = slot in padded.tolist()
            if not same_bits(pool[slot], (plain if named else before)[slot]):
                raise RelationBroken(f"slot {slot}, {'named' if named else 'which no step named'}, holds other bits")
