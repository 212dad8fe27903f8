"""The conventions of the kernels that there are can be said, and each gets its call in its own."""

from dataclasses import replace

import pytest
import torch

from kimi_linear.conformance.adapter import Capabilities, Contract, FrontForm, Pool
from kimi_linear.conformance.bench import Bench
from kimi_linear.conformance.catalogue import by_id
from kimi_linear.conformance.contradictions import contradictions
from kimi_linear.conformance.pool_session import decoding_problem, session
from kimi_linear.conformance.problem import problem_of

SOFTPLUS, BOUNDED = FrontForm(gate="softplus", beta="sigmoid"), FrontForm(gate="bounded", beta="sigmoid")
CHUNKS, TOKENS = Contract(), Contract(operand="fp32", chunk_size=None)

FIELD = {
    "flash-linear-attention": Capabilities(
        operations=("chunk", "recurrent", "backward"),
        contracts=(CHUNKS, replace(CHUNKS, chunk_size=32), TOKENS),
        front_ends=(SOFTPLUS, BOUNDED, FrontForm(), replace(BOUNDED, beta="double_sigmoid")),
        refuses=("shapes", "groups", "state", "packed_batch"),
    ),
    "FlashKDA": Capabilities(
        contracts=(Contract(chunk_size=16, state="bf16", activation="tf32"),),
        K=(128,), V=(128,), square=True, groups=False, beta_above_one=False, gate_dtype="io", state_layout="VK",
        packed_dtype="int64", alignment=16, plain=False, front_ends=(BOUNDED,),
    ),
    "vLLM": Capabilities(
        operations=("chunk", "decode"), state_layout="VK", overwrites=("v",), front_ends=(SOFTPLUS, BOUNDED),
        pool=Pool(dtypes=("fp32", "bf16"), nobody=(0, -1), drafts=7),
    ),
    "SGLang": Capabilities(
        operations=("chunk", "decode"), state_layout="VK", overwrites=("v",), beta="logit", beta_above_one=False,
        pool=Pool(nobody=(-1,), zero_rows=False),
    ),
    "flashinfer": Capabilities(
        operations=("decode",), contracts=(TOKENS,), state_layout="VK", pool=Pool(drafts=3),
        front_ends=(BOUNDED,), plain=False, beta_above_one=False,
    ),
    "ONNX LinearAttention": Capabilities(
        operations=("recurrent",), contracts=(Contract(io="fp32", operand="fp32", chunk_size=None),), packed=False,
    ),
    "transformers": Capabilities(
        contracts=(Contract(io="fp32", operand="fp32"),), groups=False, free_scale=False, packed=False,
        front_ends=(FrontForm(),),
    ),
    "log2 gates": Capabilities(log_base="2", groups=False),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELD)
def test_the_conventions_of_known_kernels_contradict_nothing(name):
    assert contradictions(FIELD[name]) == []


def test_a_fused_kernel_gets_raw_projections_in_its_formats():
    caps = FIELD["FlashKDA"]
    call = problem_of(by_id("front.whole_packed"), caps, caps.contracts[0]).call
    assert call.front is caps.front_ends[0]
    assert {x.dtype for x in (call.q, call.g, call.beta)} == {torch.bfloat16}
    assert {x.dtype for x in (call.A_log, call.dt_bias)} == {torch.float32}
    assert call.cu_seqlens.dtype == torch.int64
    assert call.A_log.shape == (call.v.shape[2],)
    assert call.dt_bias.shape == (call.v.shape[2], 128)
    plain = problem_of(by_id("gate.slow"), caps, caps.contracts[0])
    assert plain.call.front is caps.front_ends[0]
    assert -5 < plain.judge.g.min() < plain.judge.g.max() < 0


def test_a_serving_kernel_gets_slots_that_no_padding_index_names():
    bench = Bench(None, FIELD["vLLM"], FIELD["vLLM"].contracts[0])
    run = session(bench, decoding_problem(bench, "bf16"), "bf16", columns=8)
    assert run.slots.shape == (3, 8)
    assert run.slots.dtype == torch.int32
    assert run.slots.min() > 0
    assert run.slots.unique().numel() == run.slots.numel()
    assert run.pool.dtype == torch.bfloat16
    assert run.call(0).state_pool.shape[-2:] == (12, 16)  # V, K
