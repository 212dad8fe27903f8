"""This repository's Triton kernels as adapters where there is no GPU: interpreted, and asked for what a GPU is.

    TRITON_INTERPRET=1 kimi-linear conformance run own_kernels.py:chunk --full --every --only limit.reflection

also `:recurrent` and `:decode`. KDA_WHOLE names precisions and kernels whose operands of fp32 stay whole
(`gpu_products`), KDA_PRECISION is asked of the chunk kernel's products of fp32 instead of its own choice. bf16 is
declared too. A check takes 1 to 20 s.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities
from kimi_linear.conformance.adapters import triton_chunk, triton_decode, triton_recurrent
from kimi_linear.triton_kernels import chunk_launch, chunk_plan, tuning

sys.path.insert(0, str(Path(__file__).parent))
from gpu_products import gpu_products

WHOLE = tuple(filter(None, os.environ.get("KDA_WHOLE", "").split(",")))
PRECISION = os.environ.get("KDA_PRECISION")


@contextmanager
def as_on_a_gpu(*whole: str, precision: str | None = None) -> Iterator[None]:
    """Inside, interpreted kernels are launched with a Hopper's plan, and multiply as a GPU does."""

    def planned(q: Tensor, *rest: Any) -> chunk_plan.Plan:
        chosen = chunk_plan.plan(torch.empty_like(q, device="meta"), *rest)  # no CPU, so the plan is a GPU's
        return chosen if precision is None else chosen._replace(precision=precision)

    with gpu_products(*whole), patch.object(chunk_launch, "plan", planned):
        forget_plans()
        try:
            yield
        finally:
            forget_plans()


def forget_plans() -> None:
    for forget in tuning.FORGET:
        forget()


class Interpreted:
    def __init__(self, kernel: ModuleType):
        self.kernel = kernel  # an adapter

    def capabilities(self) -> Capabilities:
        declared: Capabilities = self.kernel.capabilities()
        contract = declared.contracts[0]
        operand = "bf16" if contract.operand == contract.io else contract.operand
        return replace(declared, contracts=(replace(contract, io="bf16", operand=operand), *declared.contracts))

    def identity(self) -> str:
        asked = f"asked for {PRECISION or 'the precision of a GPU'}, whole operands in {WHOLE or 'none'}"
        return f"{self.kernel.identity()} with a GPU's products, {asked}"

    def run(self, call: Call, want: frozenset[str]) -> dict[str, Tensor]:
        with as_on_a_gpu(*WHOLE, precision=PRECISION):
            results: dict[str, Tensor] = self.kernel.run(call, want)
        return results


chunk, recurrent, decode = map(Interpreted, (triton_chunk, triton_recurrent, triton_decode))
