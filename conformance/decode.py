"""Decoding from a pool of states: steps equal a prefill, slots and padding are kept apart, drafts can be rejected."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .adapter import Call
from .bench import Bench, RelationBroken, changed, must_equal
from .cases import Tensors
from .guard import same_bits
from .pool_session import Session, decoding, decoding_problem, pool_of, session
from .problem import Problem, problem_of
from .relation import RELATIONS, Add, Check, Relation
from .verdict import Verdict, judge_by_ratio

VLLM_SPLIT = "vllm #52909"
SGLANG_DRAFTS = "sglang #29472"
SGLANG_SIGMOID = "sglang #17508"
SGLANG_UNWRITTEN = "sglang #31474"
FLASHINFER_WRAP = "flashinfer #5042"
FILLERS = (float("nan"), 1e30)
ROUNDS = 3  # of drafts, each with other numbers of accepted tokens


def decoding_check(
    id: str, catches: str, *needs: str, links: tuple[str, ...] = (), tier: str = "relation", quick: bool = True
) -> Add:
    """Add a check of decoding to RELATIONS."""

    def add(check: Check) -> Check:
        needed = ("decode", *needs)
        RELATIONS.append(Relation(f"decode.{id}", catches, check, needed, "decode", links, quick, tier))
        return check

    return add


def worst(verdicts: list[Verdict]) -> Verdict:
    """The verdict that decides: a failure if there is one, then the largest ratio."""
    return max(verdicts, key=lambda verdict: (verdict.failed, verdict.worst))


def first_call(bench: Bench) -> Call:
    """A step as any other, to see what runs."""
    dtype = pool_of(bench).dtypes[0]
    return session(bench, decoding_problem(bench, dtype), dtype).call(0)


def as_prefill(run: Session, id: str) -> Verdict:
    """Steps of one token against the recurrence over all of them."""
    count = run.problem.call.q.shape[1]
    o = run.tokens(count)
    return judge_by_ratio({"o": o, "final_state": run.states()}, run.problem, id, "ratio")


@decoding_check(
    "prefill", "a state that is lost or stale between steps", tier="ratio", links=(VLLM_SPLIT, SGLANG_UNWRITTEN)
)
def prefill(bench: Bench) -> Verdict:
    """Steps of one token, states in a pool, are the recurrence over all tokens; for each format of the pool."""
    found = []
    for dtype in pool_of(bench).dtypes:
        problem = decoding_problem(bench, dtype)
        found.append(as_prefill(session(bench, problem, dtype), "decode.prefill"))
    return worst(found)


@decoding_check("front", "a step that decoding takes twice, or not", "front", tier="ratio", links=(SGLANG_SIGMOID,))
def front(bench: Bench) -> Verdict:
    """Decoding from raw projections, through each front end that is declared."""
    found = []
    dtype = pool_of(bench).dtypes[0]
    for form in bench.caps.front_ends:
        problem = decoding_problem(bench, dtype, form, queries="raw", keys="raw", T=3)
        found.append(as_prefill(session(bench, problem, dtype), "decode.front"))
    return worst(found)


@decoding_check("slots", "an index that is taken for another: of another width, stride or sequence")
def slots(bench: Bench) -> None:
    """Which slots hold the states, in a table of any stride, changes no bit of what a sequence gets."""
    for dtype in pool_of(bench).dtypes:
        problem = decoding_problem(bench, dtype)
        first, second = session(bench, problem, dtype), session(bench, problem, dtype, order=3, filler=-3.0)
        table = torch.full((len(second.slots), 3), 1, dtype=second.slots.dtype)
        table[:, 1] = second.slots
        second.slots = table[:, 1]
        for t in range(2):
            must_equal(second.step(t), first.step(t), f"o of step {t} with the states in other slots")
        must_equal(second.states(), first.states(), "states in other slots")


@decoding_check("alone", "a sequence that depends on who else is decoded")
def alone(bench: Bench) -> None:
    """A sequence that is decoded alone gets the bits that it gets in company."""
    dtype = pool_of(bench).dtypes[0]
    problem = decoding_problem(bench, dtype)
    together, apart = session(bench, problem, dtype), session(bench, problem, dtype)
    rows = {name: getattr(problem.call, name)[1:2] for name in ("q", "k", "v", "g", "beta")}
    apart.problem = replace(problem, call=replace(problem.call, **rows))
    apart.slots = apart.slots[1:2]
    for t in range(2):
        must_equal(apart.step(t), together.step(t)[1:2], f"o of step {t} of a sequence alone")
    must_equal(apart.states(), together.states()[1:2], "the state of a sequence alone")


@decoding_check("untouched", "a write to a slot that nobody named", links=(FLASHINFER_WRAP,))
def untouched(bench: Bench) -> None:
    """Slots that a step does not name keep every bit, whatever they hold, and change no result."""
    for dtype in pool_of(bench).dtypes:
        problem = decoding_problem(bench, dtype)
        plain = session(bench, problem, dtype)
        want = plain.tokens(2)
        for filler in FILLERS:
            run = session(bench, problem, dtype, filler=filler)
            before = run.pool.clone()
            must_equal(run.tokens(2), want, f"o with {filler:g} in the other slots")
            must_equal(run.states(), plain.states(), f"states with {filler:g} in the other slots")
            _others_kept(run, before, f"a slot of {filler:g} that no step named")


def _others_kept(run: Session, before: Tensor, what: str) -> None:
    others = torch.ones(len(before), dtype=torch.bool)
    others[run.used] = False
    for slot in others.nonzero().flatten().tolist():
        if not same_bits(run.pool[slot], before[slot]):
            raise RelationBroken(f"{what} changed: slot {slot} of {len(before)}")


@decoding_check("in_place", "a state that advances in a copy")
def in_place(bench: Bench) -> None:
    """The pool that is passed advances, or stays as it is where a new one is declared to come back."""
    dtype = pool_of(bench).dtypes[0]
    run = session(bench, decoding_problem(bench, dtype), dtype)
    given, before = run.pool, run.pool.clone()
    run.step(0)
    used = run.used
    advanced = [not same_bits(given[slot], before[slot]) for slot in used.tolist()]
    if pool_of(bench).in_place and not all(advanced):
        raise RelationBroken(f"the pool that was passed did not advance in slot {used[advanced.index(False)].item()}")
    if not pool_of(bench).in_place and any(advanced):
        raise RelationBroken("the pool that was passed advanced, though a new one is declared to come back")


@decoding_check("strided_pool", "a pool that is taken for one block")
def strided_pool(bench: Bench) -> None:
    """Slots that lie further apart than a state is large give the same bits, and what is between them stays."""
    dtype = pool_of(bench).dtypes[0]
    problem = decoding_problem(bench, dtype)
    plain, run = session(bench, problem, dtype), session(bench, problem, dtype)
    buffer = torch.full((len(run.pool), 2, *run.pool.shape[1:]), torch.nan, dtype=run.pool.dtype)
    buffer[:, 1] = run.pool
    between, run.pool = buffer[:, 0].clone(), buffer[:, 1]
    must_equal(run.tokens(2), plain.tokens(2), "o with a pool of strides")
    must_equal(run.states(), plain.states(), "states in a pool of strides")
    if not same_bits(buffer[:, 0], between):
        raise RelationBroken("memory between the slots of a pool changed")


@decoding_check("padding", "padding that is taken for a slot", "padding", links=(FLASHINFER_WRAP,))
def padding(bench: Bench) -> None:
    """Padding between sequences reads and writes nothing, whatever its rows hold."""
    dtype = pool_of(bench).dtypes[0]
    problem = decoding_problem(bench, dtype, B=5)
    seated = torch.tensor([0, 2, 3])
    plain = session(bench, problem, dtype)
    want = plain.step(0)
    for nobody in pool_of(bench).nobody:
        run = session(bench, _padded(problem, seated), dtype)
        run.slots = torch.full_like(run.slots, nobody).index_copy(0, seated, plain.slots[seated])
        run.pool[plain.slots[[1, 4]].long()] = torch.nan
        before = run.pool.clone()
        o = run.step(0)
        must_equal(o[seated], want[seated], f"o beside padding of index {nobody}")
        for slot in run.used.tolist():
            must_equal(run.pool[slot], plain.pool[slot], f"the state in slot {slot} beside padding of index {nobody}")
        _others_kept(run, before, f"beside padding of index {nobody}, a slot that no step named")
        if pool_of(bench).zero_rows and (o[[1, 4]] != 0).any():
            raise RelationBroken(f"o of padding of index {nobody} is not 0")


def _padded(problem: Problem, seated: Tensor) -> Problem:
    """Rows of padding hold NaN, as memory that was never written may."""
    spoiled: dict[str, Tensor] = {}
    for name in ("q", "k", "v", "g", "beta"):
        x = torch.full_like(getattr(problem.call, name), torch.nan)
        spoiled[name] = x.index_copy(0, seated, getattr(problem.call, name)[seated])
    return replace(problem, call=replace(problem.call, **spoiled))  # type: ignore[arg-type]


@decoding_check("drafts", "a state that keeps rejected tokens", "drafts", tier="ratio", links=(SGLANG_DRAFTS,))
def drafts(bench: Bench) -> Verdict:
    """Steps of several draft tokens, of which some hold: what follows is what follows the tokens that held."""
    dtype, M = pool_of(bench).dtypes[0], 1 + pool_of(bench).drafts
    problem = decoding_problem(bench, dtype, T=ROUNDS * M)
    run = session(bench, problem, dtype, columns=M)
    kept = [[1 + (n + round) % M for n in range(len(run.slots))] for round in range(ROUNDS)]
    outputs, accepted = [], None
    for round in range(ROUNDS):
        outputs.append(run.step(round * M, M, accepted))
        accepted = torch.tensor(kept[round], dtype=torch.int32)
    last = run.states(M - 1)
    found = []
    for n in range(len(run.slots)):
        held = [round * M + t for round in range(ROUNDS - 1) for t in range(kept[round][n])]
        tail = list(range((ROUNDS - 1) * M, ROUNDS * M))
        found.append(_as_if_alone(bench, problem, n, [*held, *tail], torch.cat(outputs, 1), last, dtype))
    return worst(found)


def _as_if_alone(
    bench: Bench, problem: Problem, n: int, kept: list[int], o: Tensor, last: Tensor, dtype: str
) -> Verdict:
    """Sequence n by the tokens that held, against the recurrence over these tokens alone."""
    caps, contract = decoding(bench, dtype)
    rows = {name: getattr(problem.judge, name)[n : n + 1, kept] for name in ("q", "k", "v", "g", "beta")}
    assert problem.judge.h0 is not None
    x: Tensors = changed(problem.judge, **rows, h0=problem.judge.h0[n : n + 1])
    case = replace(problem.case, B=1, T=len(kept))
    alone = replace(problem_of(case, replace(caps, plain=True, front_ends=()), contract, x), judge=x)
    results = {"o": o[n : n + 1, kept], "final_state": last[n : n + 1]}
    return judge_by_ratio(results, alone, "decode.drafts", "ratio")
