"""The reference's recurrence as an adapter: whole sequences, decoding from a pool of states, and its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import REFUSALS, Call, Capabilities, Contract, FrontForm, Pool
from kimi_linear.reference.naive import recurrent_kda, recurrent_kda_backward

SOFTPLUS = FrontForm(gate="softplus", beta="sigmoid")
BOUNDED = FrontForm(gate="bounded", beta="double_sigmoid")
FRONT_ENDS = (SOFTPLUS, BOUNDED, FrontForm())
POOL = Pool(dtypes=("fp32", "bf16"), index="int64", nobody=(-1,), drafts=2)
REFUSES = tuple(name for name in REFUSALS if not name.startswith("slot"))


def capabilities() -> Capabilities:
    return Capabilities(
        operations=("recurrent", "decode", "backward"),
        contracts=tuple(Contract(io=io, operand="fp32", chunk_size=None) for io in ("fp32", "bf16")),
        front_ends=FRONT_ENDS,
        pool=POOL,
        refuses=REFUSES,
    )


def identity() -> str:
    return "kimi_linear.reference.naive.recurrent_kda"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    if call.operation == "decode":
        return {"o": decode(call)}
    if call.do is not None:
        return recurrent_kda_backward(*call.inputs(), call.do, call.dht, **call.forward_options())._asdict()
    o, final_state = recurrent_kda(*call.inputs(), **call.forward_options(), output_final_state=True)
    assert final_state is not None
    return {"o": o, "final_state": final_state}


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
