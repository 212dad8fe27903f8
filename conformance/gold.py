"""The truth of a problem, and how far from it a kernel that keeps its contract may be.

Truth: the fp64 recurrence. Envelope: the contract's form, recurrence or chunks, run a few times in fp64 with the
roundings that the contract allows on moving grids (`kimi_linear.conformance.envelope`):

    operands of every matrix product     contract.operand
    sums, products, the inverse          contract.accumulate
    the state between chunks or tokens   contract.state
    o                                    contract.io

The triangular inverse is computed in `accumulate`: on keys that nearly repeat, half precision there is an
error, not a rounding. Where the contract's decays are differences of a cumulative gate, that gate is rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..reference.chunked.forward import ChunkStages, cut_inputs, run_all_stages
from ..reference.chunked.halving import cumulative_gate, decayed_products, invert_unit_lower
from ..reference.chunked.layout import ChunkLayout, chunk_layout
from ..reference.chunked.stages import chunk_output, key_products, state_pass, wy_vectors
from ..reference.naive import kda_step, recurrent_kda, recurrent_kda_backward
from ..reference.naive.recurrent import segments
from ..reference.operands import Operands, prepare, zero_rows_after
from .adapter import GRADIENTS, PARAMETER_GRADIENTS, STAGES, Contract
from .envelope import Rounding, rms
from .front_gradients import errors_of_tokens_added, through_front_end
from .limits import FLOOR, PRICE_SAMPLES, SAMPLES, SMALLEST
from .precision import DTYPES, moved_grid, roundoff, to_format
from .problem import Inputs, Problem

Results = dict[str, Tensor]

_aten = torch.ops.aten
PRODUCTS = {_aten.bmm, _aten.mm}


class ContractRounding(Rounding):
    """Inside this context fp64 arithmetic is rounded as the contract allows; copies and views are exact."""

    def __init__(self, contract: Contract, seed: int) -> None:
        super().__init__(DTYPES[contract.accumulate], seed)
        self.operand = contract.operand
        self.by_rows = seed % 2 == 1  # which order of sums inverts: kernels use either

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in PRODUCTS:
            args = [self.to(x, self.operand) for x in args]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def to(self, x: Tensor, format: str) -> Tensor:
        """x rounded to a format on a fresh grid."""
        return moved_grid(x, format, self.fresh())

    def stored(self, x: Tensor, format: str) -> Tensor:
        """x in a format; every other sample with errors of full size, since a short sum has few to be large."""
        if not self.by_rows:
            return self.to(x, format)
        signs = torch.randint(2, x.shape, generator=self.generator) * 2 - 1
        return x * (1 + roundoff(format) * signs)


@dataclass(frozen=True)
class _ByKey:
    """A problem that caches take as equal to another of the same case, contract and numbers."""

    key: tuple[Any, ...]
    it: Problem = field(compare=False)


@functools.lru_cache(maxsize=512)
def _truth(problem: _ByKey) -> Results:
    x = problem.it
    with torch.no_grad():
        o, S = recurrent_kda(*x.inputs(), **x.options(), output_final_state=True)
        results: Results = {"o": o, "final_state": S} if S is not None else {}
        if x.judge.do is not None:
            grads = recurrent_kda_backward(*x.inputs(), do=x.judge.do, dht=x.judge.dht, **x.options())
            results |= through_front_end(x.raw, dict(zip(GRADIENTS, grads, strict=True)))
    return results


@functools.lru_cache(maxsize=512)
def _envelopes(problem: _ByKey, recurrence_alone: bool) -> Results:
    x, truth = problem.it, truth_of(problem.it)
    form = rounded_recurrence if recurrence_alone or x.contract.chunk_size is None else rounded_chunks
    runs = [form(x, seed) for seed in range(PRICE_SAMPLES if recurrence_alone else SAMPLES)]
    bounds = {name: row_envelope(truth[name], [run[name] for run in runs], name, x.contract) for name in truth}
    if x.raw is not None and "dA_log" in truth:
        added = errors_of_tokens_added(x.raw, torch.stack([run["dg"] - truth["dg"] for run in runs]))
        bounds |= {name: torch.maximum(bounds[name], most) for name, most in added.items()}
    return bounds


def truth_of(problem: Problem) -> Results:
    """o, final_state and, for a case with cotangents, the gradients, in fp64."""
    return _truth(_by_key(problem))


def envelopes_of(problem: Problem, recurrence_alone: bool = False) -> Results:
    """Allowed error of each row of each result; of the token-by-token form alone, to price an algorithm."""
    return _envelopes(_by_key(problem), recurrence_alone)


def row_envelope(exact: Tensor, samples: list[Tensor], name: str, contract: Contract) -> Tensor:
    """Spread of the samples, one rounding of the result, and two floors, for each row of a result."""
    exact, *samples = (rows_of(x, name) for x in (exact, *samples))
    if exact.numel() == 0:
        return exact.new_zeros(exact.shape[:-1])
    spread = torch.stack([rms(sample - exact) for sample in samples]).amax(0)
    if name == "dbeta":
        spread = _over_neighbours(spread)
    in_sums = ("final_state", "dh0", "dg", "dbeta", *PARAMETER_GRADIENTS)
    u = roundoff(contract.accumulate if name in in_sums else contract.io)
    return spread + u * rms(exact) + FLOOR * exact.abs().amax() + SMALLEST


def rows_of(x: Tensor, name: str) -> Tensor:
    """A result as rows of channels: dbeta and dA_log have one number a row."""
    return x[..., None] if name in ("dbeta", "dA_log") else x


def _over_neighbours(spread: Tensor) -> Tensor:
    """The largest of a token and the two beside it: a few samples of one number may all be small by chance."""
    return torch.nn.functional.max_pool1d(spread.transpose(1, 2), 3, stride=1, padding=1).transpose(1, 2)


def rounded_recurrence(x: Problem, seed: int) -> Results:
    """The recurrence with the contract's roundings, and its gradients by autograd under them.

    One sample stores the state on the format's own grid: there a slow decay may round back to where it was.
    """
    rounding = ContractRounding(replace(x.contract, operand=x.contract.accumulate), seed)

    def forward(y: Operands) -> tuple[Tensor, Tensor]:
        outputs, states = [], []
        for tokens, rows in segments(y):
            S = y.h0[rows]
            for t in range(tokens.start, tokens.stop):
                o_t, S = kda_step(S, y.q[:, t], y.k[:, t], y.v[:, t], y.g[:, t], y.beta[:, t], y.scale)
                S = to_format(S, x.contract.state) if seed == 0 else rounding.to(S, x.contract.state)
                outputs.append(o_t)
            states.append(S)
        o = torch.stack(outputs, 1) if outputs else y.v[:, :0]
        return rounding.to(zero_rows_after(o, y.dims.T), x.contract.io), torch.cat(states)

    return _run(x, rounding, forward)


def rounded_chunks(x: Problem, seed: int) -> Results:
    """The chunk form with the contract's roundings, and its gradients by autograd under them."""
    rounding = ContractRounding(x.contract, seed)

    def forward(y: Operands) -> tuple[Tensor, Tensor]:
        stages = rounded_stages(y, x.contract, rounding)
        return rounding.to(stages.by_token("o"), x.contract.io), stages.final_state

    return _run(x, rounding, forward)


def rounded_stages(x: Operands, contract: Contract, rounding: ContractRounding) -> ChunkStages:
    """`run_stages` of the reference, with the inverse in `accumulate` and stored tensors rounded."""
    assert contract.chunk_size is not None
    layout = chunk_layout(x.dims.B, x.dims.T, x.offsets, contract.chunk_size, x.q.device)
    y = cut_inputs(x, layout, slice(None))
    g = _rounded_differences(y.g, rounding) if contract.decay == "differences" else y.g
    decays = cumulative_gate(g)
    A = key_products(y.beta_k, y.k, decays)
    diagonal = (rounding.to(y.q, contract.operand) * rounding.to(y.k, contract.operand)).sum(-1)
    Aqk = decayed_products(y.q, y.k, decays, diagonal)
    rounding.operand = contract.accumulate
    T = substitution(A) if rounding.by_rows else invert_unit_lower(A)
    rounding.operand = contract.operand
    w, u = (rounding.to(z, contract.operand) for z in wy_vectors(T, y.beta_k, y.beta_v, decays))
    S, v_new, left = _rounded_pass(w, u, y.k, decays, layout, x.h0, rounding, contract.state)
    return ChunkStages(layout, y, decays, A, Aqk, T, w, u, S, v_new, left, *chunk_output(y.q, Aqk, S, v_new, decays))


def substitution(A: Tensor) -> Tensor:
    """(I + A)^-1 by elimination, column after column: every partial sum is rounded."""
    X = torch.eye(A.shape[-1], dtype=A.dtype).expand_as(A)
    for j in range(A.shape[-1] - 1):
        X = X - A[..., :, j, None] * X[..., j, None, :]
    return X


def _rounded_pass(
    w: Tensor,
    u: Tensor,
    k: Tensor,
    decays: Any,
    layout: ChunkLayout,
    h0: Tensor,
    rounding: ContractRounding,
    state: str,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Stage 5 one step at a time, so that the state is stored between chunks."""
    S = layout.longest_first(h0)
    starts, writes, left = [S[:, :0]], [u[:, :0]], []
    for step in layout.steps:
        one = state_pass(w, u, k, decays, S, [step])
        ended, S = one.left
        S = rounding.to(S, state)
        left.append(ended)
        starts.append(one.S)
        writes.append(one.v_new)
    return torch.cat(starts, 1), torch.cat(writes, 1), [*left, S]


def _rounded_differences(g: Tensor, rounding: ContractRounding) -> Tensor:
    """Gates whose sums are rounded cumulative gates: what exp(G_i - G_j) makes of them."""
    G = rounding.round(torch.cumsum(g, -2))
    first, rest = G[..., :1, :], G[..., 1:, :] - G[..., :-1, :]
    return torch.cat([first, rest], -2)


def rounded_inputs(x: Problem, rounding: ContractRounding, given: Results) -> Inputs:
    """q, k, v, g, beta of what is given; where a front end inside makes them, with the roundings of its steps."""
    if x.raw is None:
        return given["dq"], given["dk"], given["dv"], given["dg"], given["dbeta"]
    form, (q, k, g, beta) = x.raw.form, x.raw.holding(given)()
    if form.l2norm_eps is not None:
        q, k = (rounding.stored(y, x.contract.operand) for y in (q, k))
    if form.gate is not None:
        g = rounding.to(g, x.contract.activation)
    if form.beta is not None:
        beta = rounding.to(beta, x.contract.activation)
    return q, k, given["dv"], g, beta


def given_to(x: Problem) -> Results:
    """What the kernel is given, in fp64, by the names of gradients; a state of zeros where there is none."""
    y = x.judge
    own = {"dq": y.q, "dk": y.k, "dv": y.v, "dg": y.g, "dbeta": y.beta}
    own |= {} if y.dht is None else {"dh0": torch.zeros_like(y.dht)}
    own |= {} if y.h0 is None else {"dh0": y.h0}
    return own if x.raw is None else {**own, **x.raw.by_gradient()}


def _run(x: Problem, rounding: ContractRounding, forward: Callable[[Operands], tuple[Tensor, Tensor]]) -> Results:
    if x.judge.do is None:
        with torch.no_grad(), rounding:
            o, S = forward(prepare(*rounded_inputs(x, rounding, given_to(x)), **x.options()))
        return {"o": o, "final_state": S}
    assert x.judge.dht is not None
    leaves = {name: y.clone().requires_grad_() for name, y in given_to(x).items()}
    with rounding:
        inputs = rounded_inputs(x, rounding, leaves)
        o, S = forward(prepare(*inputs, **{**x.options(), "initial_state": leaves["dh0"]}))
        found = torch.autograd.grad((o, S), [*leaves.values()], (x.judge.do, x.judge.dht), materialize_grads=True)
    return {"o": o.detach(), "final_state": S.detach(), **dict(zip(leaves, found, strict=True))}


def stage_truth(x: Problem) -> tuple[Results, Results]:
    """Every stage of a contract in chunks, in fp64 by token, and its envelope."""
    assert x.contract.chunk_size is not None
    y = prepare(*x.inputs(), **x.options())
    with torch.no_grad():
        exact = _by_token(run_all_stages(y, x.contract.chunk_size))
        runs = []
        for seed in range(SAMPLES):
            rounding = ContractRounding(x.contract, seed)
            with rounding:
                stages = rounded_stages(y, x.contract, rounding)
            runs.append(_by_token(stages))
    bounds = {name: row_envelope(exact[name], [run[name] for run in runs], name, x.contract) for name in STAGES}
    return exact, bounds


def _by_token(stages: ChunkStages) -> Results:
    return {name: stages.by_token(name) for name in STAGES}


def _by_key(x: Problem) -> _ByKey:
    raw = () if x.raw is None else x.raw.by_gradient().values()
    tensors = (*x.inputs(), x.judge.h0, x.judge.do, x.judge.dht, *raw)
    numbers = tuple(None if y is None else hash(y.numpy().tobytes()) for y in tensors)
    return _ByKey((*x.key, x.call.q.shape, numbers, str(x.judge.offsets), x.judge.scale), x)
