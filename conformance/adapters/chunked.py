"""The reference's chunk form as an adapter: three chunk sizes, its backward, and its stages."""

from __future__ import annotations

from torch import Tensor

from kimi_linear.conformance.adapter import STAGES, Call, Capabilities, Contract
from kimi_linear.conformance.adapters.naive import FRONT_ENDS, REFUSES
from kimi_linear.conformance.by_autograd import gradients_of
from kimi_linear.conformance.reference_pool import POOL, decode
from kimi_linear.reference.chunked import chunk_kda, chunk_kda_backward, chunk_stages


def capabilities() -> Capabilities:
    formats = [Contract(io="fp32", operand="fp32", chunk_size=C, decay="sums") for C in (64, 32, 16)]
    return Capabilities(
        operations=("chunk", "decode", "backward"),
        contracts=tuple(formats),
        stages=STAGES,
        front_ends=FRONT_ENDS,
        pool=POOL,
        refuses=REFUSES,
    )


def identity() -> str:
    return "kimi_linear.reference.chunked.chunk_kda"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    if call.operation == "decode":
        return {"o": decode(call)}
    if call.do is not None and call.front is not None:
        return gradients_of(call, forward)
    options = {**call.forward_options(), "chunk_size": call.contract.chunk_size}
    if call.do is not None:
        return chunk_kda_backward(*call.inputs(), call.do, call.dht, **options)._asdict()
    results = forward(call)
    if want & set(STAGES):
        stages = chunk_stages(*call.inputs(), **options)
        results |= {name: stages.by_token(name) for name in want & set(STAGES)}
    return results


def forward(call: Call) -> dict[str, Tensor]:
    options = {**call.forward_options(), "chunk_size": call.contract.chunk_size}
    o, final_state = chunk_kda(*call.inputs(), **options, output_final_state=True)
    assert final_state is not None
    return {"o": o, "final_state": final_state}
