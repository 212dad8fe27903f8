"""A decoding session: sequences that advance step by step, their states in a pool, as a server keeps them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .adapter import Call
from .bench import Bench
from .capabilities import Capabilities, Contract, FrontForm, Pool
from .guard import KernelFailure, raw_run
from .precision import DTYPES
from .problem import Problem, in_layout, problem_of

SPARE_SLOTS = 4  # of a pool, which nobody uses
SEQUENCES = 3
PER_TOKEN = ("q", "k", "v", "g", "beta")


def pool_of(bench: Bench) -> Pool:
    """The pool that the adapter declares; only decoders have one."""
    assert bench.caps.pool is not None
    return bench.caps.pool


def decoding(bench: Bench, dtype: str) -> tuple[Capabilities, Contract]:
    """The kernel as a decoder with states in `dtype`: token by token, each state rounded to the pool."""
    forms = (bench.contract, *bench.caps.contracts)
    found = next((c for c in forms if c.chunk_size is None and c.io == bench.contract.io), None)
    contract = found or replace(bench.contract, chunk_size=None)
    return replace(bench.caps, state_dtype=dtype), replace(contract, state=dtype)


def decoding_problem(bench: Bench, dtype: str, front: FrontForm | None = None, **knobs: object) -> Problem:
    """A problem of SEQUENCES sequences for a decoder."""
    caps, contract = decoding(bench, dtype)
    case = bench.case(**{"B": SEQUENCES, "T": 5, "keys": "random", "front": "whole" if front else None, **knobs})
    return problem_of(case, caps, contract, front=front)


@dataclass
class Session:
    """A pool with the problem's initial states in some of its slots, and the calls that advance it."""

    bench: Bench
    problem: Problem
    pool: Tensor
    slots: Tensor  # [N], or [N, M] with drafts

    @property
    def used(self) -> Tensor:
        """Slots that belong to a sequence."""
        flat = self.slots.flatten()
        return flat[~torch.isin(flat, torch.tensor(pool_of(self.bench).nobody or (-1,)))].long()

    def call(self, start: int, count: int = 1, accepted: Tensor | None = None) -> Call:
        """The call for `count` tokens from `start` on."""
        given = self.problem.call
        rows = {name: getattr(given, name)[:, start : start + count].contiguous() for name in PER_TOKEN}
        changes = {"initial_state": None, "operation": "decode", "state_pool": self.pool, "slot_indices": self.slots}
        return Call(**{**vars(given), **rows, **changes, "accepted": accepted})

    def step(self, start: int, count: int = 1, accepted: Tensor | None = None) -> Tensor:
        """o of the next `count` tokens from `start` on, with M slots a sequence or one."""
        declared, call = pool_of(self.bench), self.call(start, count, accepted)
        want = frozenset(("o",) if declared.in_place else ("o", "state_pool"))
        caps = replace(self.bench.caps, overwrites=(*self.bench.caps.overwrites, "state_pool"))
        if not declared.in_place:
            caps = self.bench.caps
        results = raw_run(self.bench.adapter, call, caps, want, self.bench.seconds, copy=False)
        if not declared.in_place:
            self.pool = results["state_pool"]
        self.check(results["o"], call.v)
        return results["o"]

    def check(self, o: Tensor, v: Tensor) -> None:
        if o.shape != v.shape or o.dtype != v.dtype:
            wanted, got = f"{list(v.shape)}, {v.dtype}", f"{list(o.shape)}, {o.dtype}"
            raise KernelFailure(f"o of a decoding step must be {wanted}; got {got}")

    def tokens(self, count: int) -> Tensor:
        """o of `count` tokens, one step each."""
        return torch.cat([self.step(t) for t in range(count)], 1)

    def states(self, column: int | None = None) -> Tensor:
        """The sequences' states, K x V: in their only slots, or in the slots of one column."""
        slots = self.slots if column is None else self.slots[:, column]
        return in_layout(self.pool[slots.long()], self.bench.caps)


def session(
    bench: Bench,
    problem: Problem,
    dtype: str,
    columns: int = 0,
    filler: float = 7.0,
    order: int = 0,
) -> Session:
    """A pool filled with `filler`, initial states in slots out of order; another `order`, other slots."""
    declared = pool_of(bench)
    N = problem.call.q.shape[0]
    wanted = N * max(columns, 1)
    free = [slot for slot in range(wanted + SPARE_SLOTS + len(declared.nobody)) if slot not in declared.nobody]
    chosen = free[order:][::-1][:wanted] if order % 2 else [*free[1::2], *free[0::2]][:wanted]
    h0 = problem.call.initial_state
    assert h0 is not None
    pool = torch.full((max(free) + 1, *h0.shape[1:]), filler, dtype=DTYPES[dtype])
    slots = torch.tensor(chosen, dtype=getattr(torch, declared.index))
    slots = slots.view(N, columns) if columns else slots
    pool[(slots[:, 0] if columns else slots).long()] = h0.to(pool.dtype)
    return Session(bench, problem, pool, slots)
