"""The reference evaluator of ONNX for `LinearAttention` with update_rule "gated_delta", which is KDA.

A decay of H * K values a token makes it KDA; heads lie flat in the last dimension. One token after the other in
fp32, whatever the inputs are. Not declared: value heads in groups (the operator groups query heads over one key
and value head instead), and packed segments. All inputs have one type there, so fp16 has no fp32 gate.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, from_numpy

from kimi_linear.conformance.adapter import Call, Capabilities, Contract

INPUTS = ("query", "key", "value", "past_state", "decay", "beta")


def capabilities() -> Capabilities:
    contract = Contract(io="fp32", operand="fp32", chunk_size=None)
    return Capabilities(operations=("recurrent",), contracts=(contract,), groups=False, packed=False)


def identity() -> str:
    import onnx

    return f"onnx {onnx.__version__}, ReferenceEvaluator, LinearAttention gated_delta"


def run(call: Call, want: frozenset[str]) -> dict[str, Tensor]:
    from onnx.helper import make_node
    from onnx.reference import ReferenceEvaluator

    H = call.q.shape[2]
    names = [name if name != "past_state" or call.initial_state is not None else "" for name in INPUTS]
    options: dict[str, Any] = {"update_rule": "gated_delta", "q_num_heads": H, "kv_num_heads": H, "scale": call.scale}
    node = make_node("LinearAttention", names, ["output", "present_state"], **options)
    tensors = {"query": call.q, "key": call.k, "value": call.v, "decay": call.g}
    feeds = {name: x.flatten(2).numpy() for name, x in tensors.items()} | {"beta": call.beta.numpy()}
    if call.initial_state is not None:
        feeds["past_state"] = call.initial_state.numpy()
    o, state = ReferenceEvaluator(node).run(None, feeds)
    return {"o": from_numpy(o).view(call.v.shape), "final_state": from_numpy(state)}
