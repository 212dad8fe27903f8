"""The step between a checked call and the recurrence: one dtype, one head count, explicit segments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import reduce, repeat
from jaxtyping import Float
from torch import Tensor

from .contract import Dims, check_inputs, check_values, compute_dtype
from .front_end import FrontEnd


class Operands(NamedTuple):
    """What the recurrence reads: everything per value head, in the compute dtype, front end applied."""

    q: Float[Tensor, "B T HV K"]
    k: Float[Tensor, "B T HV K"]
    v: Float[Tensor, "B T HV V"]
    g: Float[Tensor, "B T HV K"]
    beta: Float[Tensor, "B T HV"]
    scale: float
    h0: Float[Tensor, "N HV K V"]
    offsets: list[int] | None  # of packed segments; None for a batch
    dims: Dims


class KDAGradients(NamedTuple):
    """Gradients of the operator's inputs (after the front end), each in the compute dtype."""

    dq: Float[Tensor, "B T H K"]
    dk: Float[Tensor, "B T H K"]
    dv: Float[Tensor, "B T HV V"]
    dg: Float[Tensor, "B T HV K"]
    dbeta: Float[Tensor, "B T HV"]
    dh0: Float[Tensor, "N HV K V"]


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    front_end: FrontEnd | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Operands:
    """Check a call and bring its inputs into the form that the tiers compute on."""
    dims = check_inputs(
        q,
        k,
        v,
        g,
        beta,
        front_end=front_end,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    offsets = None if cu_seqlens is None else cu_seqlens.tolist()
    check_values(g, offsets, front_end)
    q, k, v, g, beta = (x.to(compute_dtype(q.dtype)) for x in (q, k, v, g, beta))
    if front_end is not None:
        q, k, g, beta = front_end(q, k, g, beta)
    q, k = (repeat(x, "b t h k -> b t (h group) k", group=dims.HV // dims.H) for x in (q, k))
    if initial_state is None:
        initial_state = q.new_zeros(dims.N, dims.HV, dims.K, dims.V)
    if scale is None:
        scale = dims.K**-0.5
    return Operands(q, k, v, g, beta, scale, initial_state, offsets, dims)


def sum_over_group(dx: Float[Tensor, "B T HV K"], H: int) -> Float[Tensor, "B T H K"]:
    """Adjoint of repeating q/k heads: value heads that read one q/k head add their gradients."""
    return reduce(dx, "b t (h group) k -> b t h k", "sum", h=H)


def zero_rows_after(x: Tensor, T: int) -> Tensor:
    """Append zero rows along the tokens until there are T: what rows past the last segment get."""
    B, length, *rest = x.shape
    return torch.cat([x, x.new_zeros(B, T - length, *rest)], dim=1)
