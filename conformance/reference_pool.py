"""Decoding from a pool of states with the reference's recurrence: what the adapters of both its tiers share."""

from __future__ import annotations

import torch
from torch import Tensor

from ..reference.naive import recurrent_kda
from .adapter import Call, Pool

POOL = Pool(dtypes=("fp32", "bf16"), index="int64", nobody=(-1,), drafts=2)


def decode(call: Call) -> Tensor:
    """One step: states from their slots, the recurrence token by token, each state to its slot."""
    pool, slots, kept = call.state_pool, call.slot_indices, call.accepted
    assert pool is not None
    assert slots is not None
    table = slots if slots.dim() == 2 else slots[:, None]
    first = table[:, 0] if kept is None else table.gather(1, kept.long()[:, None] - 1).squeeze(1)
    seated = (first >= 0).nonzero().flatten()
    rows, table = [x[seated] for x in call.inputs()], table[seated]
    S, o = pool[first[seated]].float(), torch.zeros_like(call.v)
    for t in range(call.v.shape[1]):
        token = [x[:, t : t + 1] for x in rows]
        options = {**call.forward_options(), "initial_state": S, "output_final_state": True}
        o[seated, t : t + 1], left = recurrent_kda(*token, **options)
        assert left is not None
        S = left
        pool[table[:, min(t, table.shape[1] - 1)]] = S.to(pool.dtype)
    return o
