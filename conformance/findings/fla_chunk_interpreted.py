"""`chunk_kda` of fla as an adapter where there is no GPU: interpreted, with the products of a GPU.

    TRITON_INTERPRET=1 kimi-linear conformance run fla_chunk_interpreted.py:safe_gate --full --every --only gate.bound

KDA_WHOLE names what keeps fp32 operands whole (`fla_kernels.products`), such as KDA_WHOLE=inverse,bf16x3: a failure
that goes with it comes from there. A check takes 10 to 60 s.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from torch import Tensor

from kimi_linear.conformance.adapter import Call
from kimi_linear.conformance.adapters.fla_chunk import Chunk

sys.path.insert(0, str(Path(__file__).parent))
from fla_kernels import products

WHOLE = tuple(filter(None, os.environ.get("KDA_WHOLE", "").split(",")))


class Interpreted(Chunk):
    def identity(self) -> str:
        return f"{super().identity()}, interpreter with a GPU's products, whole operands in {WHOLE or 'none'}"

    def run(self, call: Call, want: frozenset[str]) -> dict[str, Tensor]:
        with products(*WHOLE):
            return super().run(call, want)


any_gate, safe_gate = Interpreted(False, "cpu"), Interpreted(True, "cpu")
