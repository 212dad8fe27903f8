"""The reference's recurrence as an adapter: whole sequences, decoding from a pool of states, and its backward.

The adjoint by hand takes what a front end makes; where a call goes through one, autograd goes with it.
"""

from __future__ import annotations

from torch import Tensor

from kimi_linear.conformance.adapter import REFUSALS, Call, Capabilities, Contract, FrontForm
from kimi_linear.conformance.by_autograd import gradients_of
from kimi_linear.conformance.reference_pool import POOL, decode
from kimi_linear.reference.naive import recurrent_kda, recurrent_kda_backward

FRONT_ENDS = (
    FrontForm(gate="softplus", beta="sigmoid"),
    FrontForm(gate="bounded", beta="double_sigmoid"),
    FrontForm(),
)
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
    if call.do is None:
        return forward(call)
    if call.front is not None:
        return gradients_of(call, forward)
    return recurrent_kda_backward(*call.inputs(), call.do, call.dht, **call.forward_options())._asdict()


def forward(call: Call) -> dict[str, Tensor]:
    o, final_state = recurrent_kda(*call.inputs(), **call.forward_options(), output_final_state=True)
    assert final_state is not None
    return {"o": o, "final_state": final_state}
