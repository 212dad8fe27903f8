"""The reference's chunk form as an adapter: three chunk sizes, its backward, and its stages."""

from __future__ import annotations

from torch import Tensor

from kimi_linear.conformance.adapter import STAGES, Call, Capabilities, Contract
from kimi_linear.conformance.adapters.naive import FRONT_ENDS, POOL, REFUSES, decode
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
    inputs = call.inputs()
    if call.operation == "decode":
        return {"o": decode(call)}
    C = call.contract.chunk_size
    assert C is not None
    if call.do is not None:
        return chunk_kda_backward(*inputs, call.do, call.dht, **call.forward_options(), chunk_size=C)._asdict()
    o, final_state = chunk_kda(*inputs, **call.forward_options(), output_final_state=True, chunk_size=C)
    assert final_state is not None
    results = {"o": o, "final_state": final_state}
    if want & set(STAGES):
        stages = chunk_stages(*inputs, **call.forward_options(), chunk_size=C)
        results |= {name: stages.by_token(name) for name in want & set(STAGES)}
    return results
