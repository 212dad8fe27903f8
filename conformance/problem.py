"""A case as one kernel meets it: inputs in its formats and conventions, and the same inputs for the judge.

The kernel gets rounded numbers; the truth is computed from those same numbers in fp64, so that no error of the
kernel's inputs is held against it. A gate in log2 units or a beta as a logit is converted before rounding, and
back in fp64 after it. Where a kernel's front end does a step itself, it gets what that step starts from, and the
judge takes the step in fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .adapter import Call, front_end_of
from .capabilities import Capabilities, Contract, FrontForm
from .cases import Case, Raw, Tensors, tensors_of
from .fitting import fitted, suitable_fronts
from .precision import DTYPES

RAW_BOUND = 1e4  # a sigmoid of it is 1, of its negative 0, in every format; a softplus it or 0

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class RawInputs(NamedTuple):
    """What a front end gets, in fp64; called, it gives q, k, g, beta of the recurrence."""

    form: FrontForm
    q: Tensor
    k: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None

    def __call__(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return front_end_of(self.form, self.A_log, self.dt_bias)(self.q, self.k, self.g, self.beta)

    def by_gradient(self) -> dict[str, Tensor]:
        """Every tensor by the name of its gradient."""
        return {f"d{name}": x for name, x in self._asdict().items() if isinstance(x, Tensor)}

    def holding(self, given: dict[str, Tensor]) -> RawInputs:
        """The same with tensors replaced, by the names of their gradients."""
        fields = {name[1:]: x for name, x in given.items() if name in self.by_gradient()}
        return self._replace(**fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Problem:
    """What the kernel is called with, and what the judge computes with (fp64, natural log, K x V)."""

    case: Case
    contract: Contract
    call: Call
    judge: Tensors
    raw: RawInputs | None = None

    @property
    def key(self) -> tuple[Case, Contract, FrontForm | None]:
        return self.case, self.contract, self.call.front

    def options(self) -> dict[str, Any]:
        """Keyword arguments of the reference's operators, in fp64."""
        offsets = None if self.judge.offsets is None else torch.tensor(self.judge.offsets)
        return {"scale": self.judge.scale, "initial_state": self.judge.h0, "cu_seqlens": offsets}

    def inputs(self) -> Inputs:
        x = self.judge
        return x.q, x.k, x.v, x.g, x.beta


def problems_of(case: Case, caps: Capabilities, contract: Contract) -> list[Problem]:
    """A case once, or for every declared front end that has what it is about."""
    fronts: list[FrontForm | None] = [*suitable_fronts(case, caps)] or [None]
    return [problem_of(case, caps, contract, front=front) for front in fronts]


def problem_of(
    case: Case, caps: Capabilities, contract: Contract, x: Tensors | None = None, front: FrontForm | None = None
) -> Problem:
    """Fit a case to a kernel; `x` replaces the case's own tensors.

    The call goes through `front`, or through the first front end that suits a case about one, or through the one
    that every call of this kernel goes through.
    """
    case = fitted(case, caps, contract)
    x = tensors_of(case) if x is None else x
    front = front or (next(iter(suitable_fronts(case, caps)), None) if x.raw is not None else None)
    call, q, k, g, beta = _call_of(x, caps, contract, front or caps.forced_front)
    raw = None
    if call.front is not None:
        A_log, dt_bias = (None if y is None else y.double() for y in (call.A_log, call.dt_bias))
        raw = RawInputs(call.front, q, k, g, beta, A_log, dt_bias)
        q, k, g, beta = raw()
    wide = _wide(contract)
    judge = replace(
        x, q=q, k=k, v=call.v.double(), g=g, beta=beta, raw=None,
        h0=None if call.initial_state is None else in_layout(call.initial_state, caps).double(),
        do=None if x.do is None else x.do.to(call.q.dtype).double(),
        dht=None if x.dht is None else x.dht.to(wide).double(),
    )  # fmt: skip
    return Problem(case, contract, call, judge, raw)


def _call_of(
    x: Tensors, caps: Capabilities, contract: Contract, front: FrontForm | None
) -> tuple[Call, Tensor, Tensor, Tensor, Tensor]:
    """The call, and its q, k, g, beta in fp64 and natural log."""
    narrow, wide = DTYPES[contract.io], _wide(contract)
    gates = narrow if caps.gate_dtype == "io" else wide
    unit = x.raw is not None and (front is None or front.l2norm_eps is None)
    q, k = (unit_rows(y) if unit else y for y in (x.q, x.k))
    q, k, v = (y.to(narrow) for y in (q, k, x.v))
    g, judged_g, A_log, dt_bias = _gate(x, gates, caps, front)
    beta, judged_beta = _strength(x, gates, caps, front)
    h0 = None if x.h0 is None else x.h0.to(wide if wide == torch.float64 else DTYPES[caps.state_dtype])
    call = Call(
        q, k, v, g, beta,
        scale=x.scale,
        initial_state=None if h0 is None else in_layout(h0, caps),
        cu_seqlens=None if x.offsets is None else torch.tensor(x.offsets, dtype=getattr(torch, caps.packed_dtype)),
        do=None if x.do is None else x.do.to(narrow),
        dht=None if x.dht is None else in_layout(x.dht.to(wide), caps),
        operation="recurrent" if contract.chunk_size is None else "chunk",
        contract=contract,
        front=front,
        A_log=None if A_log is None else A_log.to(wide),
        dt_bias=None if dt_bias is None else dt_bias.to(wide),
    )  # fmt: skip
    return call, q.double(), k.double(), judged_g, judged_beta


def unit_rows(x: Tensor) -> Tensor:
    """Raw queries and keys for a kernel that takes them normalised; rows of 0 stay."""
    return x / x.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)


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
    states = {"final_state": state, "dh0": state}
    return {**per_token, "dbeta": (B, T, HV), **states, "dA_log": (HV,), "ddt_bias": (HV, K)}


def _wide(contract: Contract) -> torch.dtype:
    return torch.float64 if contract.io == "fp64" else torch.float32


def _gate(
    x: Tensors, dtype: torch.dtype, caps: Capabilities, front: FrontForm | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """g as it is given, the same in fp64 and natural log, and the parameters of a gate inside."""
    if front is not None and front.gate is not None:
        HV, K = x.g.shape[2:]
        raw = x.raw or Raw(raw_gate(x.g, front), torch.zeros(HV), torch.zeros(HV, K), x.beta)
        given = raw.gate.to(dtype)
        return given, given.double(), raw.A_log, raw.dt_bias
    if caps.log_base == "e":
        given = x.g.to(dtype)
        return given, given.double(), None, None
    given = (x.g / math.log(2)).to(dtype)
    return given, given.double() * math.log(2), None, None


def raw_gate(g: Tensor, front: FrontForm) -> Tensor:
    """What a gate with A_log = 0 and dt_bias = 0 makes g of; what a bounded gate cannot make, at its bound."""
    if front.gate == "bounded":
        return torch.logit((g / front.lower_bound).clamp(0, 1)).clamp(-RAW_BOUND, RAW_BOUND)
    return (torch.log(-torch.expm1(g)) - g).clamp(-RAW_BOUND, RAW_BOUND)


def _strength(x: Tensors, dtype: torch.dtype, caps: Capabilities, front: FrontForm | None) -> tuple[Tensor, Tensor]:
    """beta as it is given, and in fp64 what the front end or the recurrence starts from."""
    if front is not None and front.beta is not None:
        largest = 2 if front.beta == "double_sigmoid" else 1
        logit = x.raw.logits if x.raw else torch.logit((x.beta / largest).clamp(0, 1)).clamp(-RAW_BOUND, RAW_BOUND)
        given = logit.to(dtype)
        return given, given.double()
    if caps.beta == "probability":
        given = x.beta.to(dtype)
        return given, given.double()
    logit = torch.logit(x.beta).clamp(-RAW_BOUND, RAW_BOUND).to(dtype)
    return logit, torch.sigmoid(logit.double())
