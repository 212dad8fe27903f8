"""flash-linear-attention's `chunk_kda` in both gate modes, on a GPU: `fla_chunk.py:any_gate` and `:safe_gate`.

The second is for gates from -5 up, and Triton 3.6 does not compile it for K = 8: a product inside sums over K,
rounded up to a power of two, and 8 is too few. Backward by autograd. Needs fla-core and flash-linear-attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract, FrontForm, package
from kimi_linear.conformance.by_autograd import gradients_of
from kimi_linear.conformance.on_device import run_on


@dataclass
class Chunk:
    safe: bool
    device: str = "cuda"

    def capabilities(self) -> Capabilities:
        if self.device == "cuda" and not torch.cuda.is_available():
            raise RuntimeError("fla's chunk_kda needs a GPU: Triton's interpreter does not run it as it is")
        package("fla.ops.kda", "fla-core and flash-linear-attention")
        contracts = tuple(Contract(io=io, operand=io, chunk_size=C) for io in ("bf16", "fp16") for C in (64, 32))
        front, lowest, K = FrontForm(gate="softplus", beta="sigmoid"), None, None
        if self.safe:
            front, lowest, K = FrontForm(gate="bounded", beta="double_sigmoid"), -5.0, tuple(range(9, 257))
        return Capabilities(("chunk", "backward"), contracts, K, front_ends=(front,), lowest_gate=lowest)

    def identity(self) -> str:
        where = torch.cuda.get_device_name() if self.device == "cuda" else self.device
        return f"fla {version('fla-core')}, chunk_kda safe_gate={self.safe}, {where}"

    def run(self, call: Call, want: frozenset[str]) -> dict[str, Tensor]:
        kernel = self.forward if call.do is None else partial(gradients_of, forward=self.forward)
        return run_on(self.device, call, kernel)

    def forward(self, call: Call) -> dict[str, Tensor]:
        from fla.ops.kda import chunk_kda

        options: dict[str, Any] = {"initial_state": call.initial_state, "cu_seqlens": call.cu_seqlens}
        options |= {"scale": call.scale, "safe_gate": self.safe, "chunk_size": call.contract.chunk_size}
        if call.front is not None:
            bias = None if call.dt_bias is None else call.dt_bias.flatten()  # its backward returns [HV K]
            options |= {"use_qk_l2norm_in_kernel": True, "A_log": call.A_log, "dt_bias": bias}
            options |= {"use_gate_in_kernel": True, "lower_bound": -5.0 if self.safe else None}
            options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": self.safe}
        o, state = chunk_kda(*call.inputs(), **options, output_final_state=True)
        return {"o": o, "final_state": state}


any_gate, safe_gate = Chunk(safe=False), Chunk(safe=True)
