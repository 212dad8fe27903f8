"""The reference's recurrence as an adapter: the smallest there is."""

from __future__ import annotations

from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract, FrontForm
from kimi_linear.reference.naive import recurrent_kda, recurrent_kda_backward

FRONT_ENDS = (
    FrontForm(gate="softplus", beta="sigmoid"),
    FrontForm(gate="bounded", beta="double_sigmoid"),
    FrontForm(),
)


def capabilities() -> Capabilities:
    formats = [Contract(io=io, operand="fp32", chunk_size=None) for io in ("fp32", "bf16")]
    return Capabilities(operations=("recurrent", "backward"), contracts=tuple(formats), front_ends=FRONT_ENDS)


def identity() -> str:
    return "kimi_linear.reference.naive.recurrent_kda"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    inputs = call.inputs()
    if call.do is not None:
        grads = recurrent_kda_backward(*inputs, call.do, call.dht, **call.forward_options())
        return grads._asdict()
    o, final_state = recurrent_kda(*inputs, **call.forward_options(), output_final_state=True)
    assert final_state is not None
    return {"o": o, "final_state": final_state}
