"""Bad input that a kernel declares to refuse: it has to raise an error, and the error has to name the argument.

A kernel that computes on with a wrong shape reads a neighbour's memory; one that says "invalid argument" sends its
user through the source. Nothing is asked here that is not declared: an unguarded kernel may take the process along.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import torch

from .adapter import Call
from .arrays import as_asked
from .bench import Bench, RelationBroken
from .guard import raw_run, time_limit
from .pool_session import decoding_problem, pool_of, session
from .relation import RELATIONS, Relation

Spoil = Callable[[Call], Call]

NAMES = {  # what an error may call an argument
    "k": ("k", "key", "keys"),
    "v": ("v", "value", "values", "HV", "num_heads", "heads"),
    "g": ("g", "gate", "gk", "decay"),
    "beta": ("beta",),
    "initial_state": ("initial_state", "h0", "state"),
    "cu_seqlens": ("cu_seqlens", "offsets", "seqlens"),
    "slot_indices": ("slot_indices", "state_indices", "ssm_state_indices", "indices", "slots"),
}


def refusal(
    id: str, argument: str, declared: str, catches: str, links: tuple[str, ...] = ()
) -> Callable[[Spoil], Spoil]:
    """Add a way to spoil a call to RELATIONS."""

    def add(spoil: Spoil) -> Spoil:
        def check(bench: Bench) -> None:
            if declared.startswith("slot"):
                must_refuse_step(bench, spoil, argument)
            else:
                must_refuse(bench, good_call(bench, declared), spoil, argument)

        check.__doc__ = spoil.__doc__
        needs = ("decode" if declared.startswith("slot") else "sequences", f"refuses {declared}")
        RELATIONS.append(Relation(f"refusal.{id}", catches, check, needs, "refusals", links))
        return spoil

    return add


def good_call(bench: Bench, declared: str) -> Call:
    """A call that is right, to be spoiled."""
    packed = {"B": 1, "lengths": (5, 4, 3)} if declared.startswith("packed") else {}
    return bench.problem(bench.case(T=12, **packed)).call


def must_refuse(bench: Bench, call: Call, spoil: Spoil, argument: str) -> None:
    """The call runs, and the spoiled call raises an error with the argument's name in it."""
    raw_run(bench.adapter, call, bench.caps, frozenset(("o", "final_state")), bench.seconds)
    refused(bench, spoil(call), argument, frozenset(("o", "final_state")))


def must_refuse_step(bench: Bench, spoil: Spoil, argument: str) -> None:
    """The same for a decoding step."""
    dtype = pool_of(bench).dtypes[0]
    problem = decoding_problem(bench, dtype, T=1)
    run = session(bench, problem, dtype)
    run.step(0)
    step = replace(problem.call, initial_state=None, operation="decode", state_pool=run.pool, slot_indices=run.slots)
    refused(bench, spoil(step), argument, frozenset(("o",)))


def refused(bench: Bench, call: Call, argument: str, want: frozenset[str]) -> None:
    """Pass where the call raises an error that names the argument; RelationBroken with what came instead."""
    try:
        with time_limit(bench.seconds):
            bench.adapter.run(as_asked(call, bench.caps), want)
    except Exception as error:
        if not re.search(rf"\b({'|'.join(NAMES[argument])})\b", str(error)):
            kind = type(error).__name__
            raise RelationBroken(f"the error does not name {argument}: {kind}: {str(error)[:200]}") from error
        return
    raise RelationBroken(f"computes on; it declares an error that names {argument}")


@refusal("key_channels", "k", "shapes", "keys read past their end")
def key_channels(call: Call) -> Call:
    """k with one channel less than q."""
    return replace(call, k=call.k[..., :-1].contiguous())


@refusal("value_tokens", "v", "shapes", "values read past their end")
def value_tokens(call: Call) -> Call:
    """v with one token less than q."""
    return replace(call, v=call.v[:, :-1].contiguous())


@refusal("gate_channels", "g", "shapes", "a gate of one number a head that is read as one a channel")
def gate_channels(call: Call) -> Call:
    """g with one number a head, as Gated DeltaNet has it."""
    return replace(call, g=call.g[..., 0].contiguous())


@refusal("beta_heads", "beta", "shapes", "strengths of other heads")
def beta_heads(call: Call) -> Call:
    """beta with one head less than v."""
    return replace(call, beta=call.beta[:, :, :-1].contiguous())


@refusal("groups", "v", "groups", "value heads without a key head")
def groups(call: Call) -> Call:
    """A number of value heads that is no multiple of the key heads."""
    HV = call.q.shape[2] + 1
    spare = {name: torch.cat([getattr(call, name)] * 2, 2)[:, :, :HV] for name in ("v", "g", "beta")}
    h0 = None if call.initial_state is None else torch.cat([call.initial_state] * 2, 1)[:, :HV].contiguous()
    return replace(call, **spare, initial_state=h0)  # type: ignore[arg-type]


@refusal("key_dtype", "k", "dtypes", "bits of one format read as another's", ("cudnn-frontend #596",))
def key_dtype(call: Call) -> Call:
    """k in another format than q."""
    return replace(call, k=call.k.to(torch.float16 if call.k.dtype != torch.float16 else torch.bfloat16))


@refusal("state_rows", "initial_state", "state", "a state of somebody else, or of nobody")
def state_rows(call: Call) -> Call:
    """initial_state with a row too few."""
    assert call.initial_state is not None
    return replace(call, initial_state=call.initial_state[:-1].contiguous())


@refusal("positive_gate", "g", "positive_gate", "states that grow without bound")
def positive_gate(call: Call) -> Call:
    """A gate above 0: a memory that grows by itself."""
    return replace(call, g=call.g.abs() + 1)


@refusal("packed_batch", "cu_seqlens", "packed_batch", "all but the first batch item unwritten")
def packed_batch(call: Call) -> Call:
    """cu_seqlens beside a batch of two."""
    doubled = {name: torch.cat([getattr(call, name)] * 2) for name in ("q", "k", "v", "g", "beta")}
    return replace(call, **doubled)  # type: ignore[arg-type]


def with_offsets(call: Call, *offsets: int) -> Call:
    """The call with other segment offsets, in the dtype that it had."""
    assert call.cu_seqlens is not None
    return replace(call, cu_seqlens=torch.tensor(offsets, dtype=call.cu_seqlens.dtype))


@refusal("packed_start", "cu_seqlens", "packed_start", "first tokens that belong to nobody")
def packed_start(call: Call) -> Call:
    """cu_seqlens that begins at 1."""
    return with_offsets(call, 1, 5, 9, 12)


@refusal("packed_order", "cu_seqlens", "packed_order", "a segment of negative length")
def packed_order(call: Call) -> Call:
    """cu_seqlens that decreases."""
    return with_offsets(call, 0, 9, 5, 12)


@refusal("packed_end", "cu_seqlens", "packed_end", "a read past the last token")
def packed_end(call: Call) -> Call:
    """cu_seqlens that ends after T."""
    return with_offsets(call, 0, 5, 9, 13)


@refusal("slot_count", "slot_indices", "slots", "a sequence without a state, or with two")
def slot_count(call: Call) -> Call:
    """slot_indices with one entry less than there are sequences."""
    assert call.slot_indices is not None
    return replace(call, slot_indices=call.slot_indices[:-1])


@refusal("slot_range", "slot_indices", "slot_range", "a state written outside the pool")
def slot_range(call: Call) -> Call:
    """An index that lies outside the pool."""
    assert call.slot_indices is not None
    assert call.state_pool is not None
    outside = call.slot_indices.clone()
    outside[0] = len(call.state_pool)
    return replace(call, slot_indices=outside)
