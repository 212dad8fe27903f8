"""The exact tier's truth: the recurrence on dyadic numbers, by overwriting the rows of a table.

With keys that are signed unit vectors, gates that keep or clear, and beta in {0, 1/2, 1, 2}, every intermediate
is a small multiple of a small power of 1/2: exact in every format. A kernel has to give these very bits.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .gold import Results
from .problem import Problem


def integer_truth(problem: Problem) -> Results:
    """o and final_state: an opinion of its own, written against a table of rows, not against matrices."""
    x = problem.judge
    B, T, HV, V = x.v.shape
    group, keep = HV // x.q.shape[2], (x.g == 0).double()
    S = torch.zeros(len(_segments(problem)), HV, x.q.shape[-1], V).double() if x.h0 is None else x.h0.clone()
    o = torch.zeros(B, T, HV, V).double()
    for n, (b, start, end) in enumerate(_segments(problem)):
        for t in range(start, end):
            S[n] = S[n] * keep[b, t][..., None]
            for head in range(HV):
                _write(S[n, head], x.k[b, t, head // group], x.v[b, t, head], x.beta[b, t, head])
            queries = x.q[b, t].repeat_interleave(group, 0)
            o[b, t] = x.scale * (queries[..., None] * S[n]).sum(1)
    return {"o": o, "final_state": S}


def _write(table: Tensor, key: Tensor, value: Tensor, beta: Tensor) -> None:
    """The row that the key names moves towards the value, all the way where beta is 1."""
    slot = int(key.abs().argmax())
    table[slot] = (1 - beta) * table[slot] + beta * key[slot] * value


def _segments(problem: Problem) -> list[tuple[int, int, int]]:
    B, T = problem.judge.q.shape[:2]
    if problem.judge.offsets is None:
        return [(b, 0, T) for b in range(B)]
    return [(0, start, end) for start, end in pairwise(problem.judge.offsets)]
