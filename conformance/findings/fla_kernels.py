"""fla's kernels for the scripts here: on a GPU, or in Triton's interpreter where there is none.

The interpreter runs `chunk_kda` once three things are taken out of its way (`AROUND`), and with a GPU's products
(`gpu_products`) it makes the errors of one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

INSTALL = "pip install fla-core==0.6.0 flash-linear-attention==0.6.0, in an environment of its own"
device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
    raise SystemExit(
        "fla's kernels need a GPU, and torch sees none; on a CPU set TRITON_INTERPRET=1 before Python starts"
    )
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns where it finds no GPU
        from fla.ops.common import chunk_delta_h
        from fla.ops.kda import chunk_intra, chunk_kda, fused_recurrent_kda
except ImportError as error:
    raise SystemExit(f"this needs fla 0.6.0, and `{error}`: {INSTALL}") from None

__all__ = ["chunk_kda", "device", "fused_recurrent_kda", "products", "recurrence", "variants"]


def variants(*also: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """What to try: the kernel as it is and, in the interpreter, with what each of `also` names left whole."""
    return ((),) if device == "cuda" else ((), *also)


@contextmanager
def products(*whole: str) -> Iterator[None]:
    """Inside, `chunk_kda` computes as on a GPU.

    `whole` names precisions ("tf32", "bf16x3"), kernels, or "inverse", the products that solve the triangular
    system: their operands of fp32 stay whole. On a GPU `whole` must be empty, and only the autotuner is changed: it
    takes the first configuration of each kernel, because it would search for minutes.
    """
    from triton.runtime.autotuner import Autotuner

    untuned = (Autotuner, "prune_configs", lambda self, *_, **__: self.configs[:1])
    if device == "cuda":
        assert not whole, "operands can be kept whole in the interpreter only"
        with patch.object(*untuned):
            yield
        return
    import triton.language as tl
    from gpu_products import gpu_products

    inverse = tl.constexpr("ieee" if "inverse" in whole else "tf32")
    around = (
        (chunk_intra, "SOLVE_TRIL_DOT_PRECISION", inverse),  # fla takes "tf32" where it sees a GPU that has it
        (chunk_intra, "IS_GATHER_SUPPORTED", False),  # its other way to the same row
        (chunk_delta_h, "range", _tensors),  # it asks a loop's index for its dtype
        untuned,
    )
    with ExitStack() as patches:
        patches.enter_context(gpu_products(*whole))
        for owner, name, instead in around:
            patches.enter_context(patch.object(owner, name, instead, create=name == "range"))
        yield


def _tensors(*bounds: Any) -> Iterator[Any]:
    import triton.language as tl

    for i in range(*map(int, bounds)):
        yield tl.full((), i, tl.int32)


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """KDA token by token, in the inputs' dtype: decay, predict, write, read. Starts from a state of zeros."""
    B, T, H, K = q.shape
    S, outputs = torch.zeros(B, H, K, v.shape[-1], dtype=q.dtype), []
    for t in range(T):
        S = g[:, t].exp()[..., None] * S
        u = beta[:, t, :, None] * (v[:, t] - (S * k[:, t, ..., None]).sum(-2))
        S = S + k[:, t, ..., None] * u[:, :, None]
        outputs.append((S * q[:, t, ..., None]).sum(-2) / K**0.5)
    return torch.stack(outputs, 1), S
