"""A case as one kernel meets it: inputs in its formats and conventions, and the same inputs for the judge.

The kernel gets rounded numbers; the truth is computed from those same numbers in fp64, so that no error of the
kernel's inputs is held against it. A gate in log2 units or a beta as a logit is converted before rounding, and
back in fp64 after it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .adapter import Call, Capabilities, Contract
from .cases import Case, Tensors, fitted, tensors_of
from .precision import DTYPES

LOGIT_BOUND = 1e4  # sigmoid of it is 1, of its negative 0, in every format


@dataclass(frozen=True)
class Problem:
    """What the kernel is called with, and what the judge computes with (fp64, natural log, K x V)."""

    case: Case
    contract: Contract
    call: Call
    judge: Tensors

    @property
    def key(self) -> tuple[Case, Contract]:
        return self.case, self.contract

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the reference's operators, in fp64."""
        offsets = None if self.judge.offsets is None else torch.tensor(self.judge.offsets)
        return {"scale": self.judge.scale, "initial_state": self.judge.h0, "cu_seqlens": offsets}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        x = self.judge
        return x.q, x.k, x.v, x.g, x.beta


def problem_of(case: Case, caps: Capabilities, contract: Contract, x: Tensors | None = None) -> Problem:
    """Fit a case to a kernel; `x` replaces the case's own tensors."""
    case = fitted(case, caps, contract)
    x = tensors_of(case) if x is None else x
    narrow, wide = DTYPES[contract.io], torch.float64 if contract.io == "fp64" else torch.float32
    q, k, v = (y.to(narrow) for y in (x.q, x.k, x.v))
    g, judged_g = _gate(x.g, wide, caps.log_base)
    beta, judged_beta = _strength(x.beta, wide, caps.beta)
    h0 = None if x.h0 is None else x.h0.to(wide if wide == torch.float64 else DTYPES[caps.state_dtype])
    judge = replace(
        x,
        q=q.double(),
        k=k.double(),
        v=v.double(),
        g=judged_g,
        beta=judged_beta,
        h0=None if h0 is None else h0.double(),
        do=None if x.do is None else x.do.to(narrow).double(),
        dht=None if x.dht is None else x.dht.to(wide).double(),
    )
    call = Call(
        q, k, v, g, beta,
        scale=x.scale,
        initial_state=None if h0 is None else in_layout(h0, caps),
        cu_seqlens=None if x.offsets is None else torch.tensor(x.offsets, dtype=torch.int32),
        do=None if x.do is None else x.do.to(narrow),
        dht=None if x.dht is None else in_layout(x.dht.to(wide), caps),
        operation="recurrent" if contract.chunk_size is None else "chunk",
        contract=contract,
    )  # fmt: skip
    return Problem(case, contract, call, judge)


def in_layout(state: Tensor, caps: Capabilities) -> Tensor:
    """A K x V state in the kernel's layout; also the way back."""
    return state if caps.state_layout == "KV" else state.transpose(-1, -2).contiguous()


def state_format(contract: Contract, caps: Capabilities) -> str:
    """The format in which the final state comes back."""
    return "fp64" if contract.io == "fp64" else caps.state_dtype


def result_shapes(problem: Problem, caps: Capabilities) -> dict[str, tuple[int, ...]]:
    """The shape of every result, in the kernel's layout."""
    x = problem.judge
    B, T, HV, V = x.v.shape
    K = x.q.shape[-1]
    N = B if x.offsets is None else len(x.offsets) - 1
    state = (N, HV, K, V) if caps.state_layout == "KV" else (N, HV, V, K)
    per_token = {"o": x.v.shape, "dq": x.q.shape, "dk": x.q.shape, "dv": x.v.shape, "dg": x.g.shape}
    return {**per_token, "dbeta": (B, T, HV), "final_state": state, "dh0": state}


def _gate(g: Tensor, dtype: torch.dtype, log_base: str) -> tuple[Tensor, Tensor]:
    if log_base == "e":
        given = g.to(dtype)
        return given, given.double()
    given = (g / math.log(2)).to(dtype)
    return given, given.double() * math.log(2)


def _strength(beta: Tensor, dtype: torch.dtype, form: str) -> tuple[Tensor, Tensor]:
    if form == "probability":
        given = beta.to(dtype)
        return given, given.double()
    logit = torch.logit(beta).clamp(-LOGIT_BOUND, LOGIT_BOUND).to(dtype)
    return logit, torch.sigmoid(logit.double())
