"""KDA as it is defined: one step, then the loop. Eq. (1), arXiv:2510.26692.

    S   = diag(exp(g_t)) S              decay first
    u_t = beta_t (v_t - S^T k_t)        prediction error against the decayed state
    S   = S + k_t u_t^T                 delta-rule write
    o_t = scale * S^T q_t               read the updated state

S is K x V, one a value head: a table from keys to values that forgets per key channel and, before it
writes v_t at k_t, subtracts what it would have answered there.

Not here: speed. `kimi_linear.reference.chunked` computes the same function with matrix products.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..front_end import FrontEnd
from ..operands import Operands, prepare, zero_rows_after


def kda_step(
    S: Float[Tensor, "B HV K V"],
    q_t: Float[Tensor, "B HV K"],
    k_t: Float[Tensor, "B HV K"],
    v_t: Float[Tensor, "B HV V"],
    g_t: Float[Tensor, "B HV K"],
    beta_t: Float[Tensor, "B HV"],
    scale: float,
) -> tuple[Float[Tensor, "B HV V"], Float[Tensor, "B HV K V"]]:
    """One token: return (o_t, S). g_t is a log decay (natural log), beta_t a write strength.

    The second write to a key replaces the first:

    >>> k, beta = torch.ones(1, 1, 1), torch.ones(1, 1)
    >>> S = torch.zeros(1, 1, 1, 1)
    >>> for value in (3.0, 5.0):
    ...     o, S = kda_step(S, k, k, torch.full((1, 1, 1), value), torch.zeros(1, 1, 1), beta, scale=1.0)
    >>> o.item()
    5.0
    """
    decay = rearrange(torch.exp(g_t), "b h k -> b h k 1")
    S = decay * S
    pred = einsum(S, k_t, "b h k v, b h k -> b h v")  # S^T k
    u_t = rearrange(beta_t, "b h -> b h 1") * (v_t - pred)
    S = S + einsum(k_t, u_t, "b h k, b h v -> b h k v")  # Eq. (1)
    o_t = einsum(S, scale * q_t, "b h k v, b h k -> b h v")
    return o_t, S


def kda_scan(
    q: Float[Tensor, "B T HV K"],
    k: Float[Tensor, "B T HV K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    *,
    scale: float,
    S: Float[Tensor, "B HV K V"],
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "B HV K V"]]:
    """The loop over tokens: return o and the state after the last one (S itself where T = 0)."""
    outputs = []
    for t in range(q.shape[1]):
        o_t, S = kda_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], scale)
        outputs.append(o_t)
    o = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    return o, S


def recurrent_kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    *,
    front_end: FrontEnd | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"] | None]:
    """Kimi Delta Attention, token by token: the definition that every other tier is measured against.

    Shapes, dtypes and errors as in `kimi_linear.reference.contract`; g is in natural log. Computes in fp32,
    or in fp64 for fp64 inputs. o has the dtype of v; final_state is fp32 (fp64) and None unless asked for.

    T = 0 returns an empty o and the initial state. An empty packed segment passes its state through; rows
    past the last offset give 0. Works under autograd, to any order. Eq. (1), arXiv:2510.26692.
    """
    x = prepare(
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
    outputs, states = [], []
    for tokens, rows in segments(x):
        per_token = (y[:, tokens] for y in (x.q, x.k, x.v, x.g, x.beta))
        o, S = kda_scan(*per_token, scale=x.scale, S=x.h0[rows])
        outputs.append(o)
        states.append(S)
    o = zero_rows_after(torch.cat(outputs, dim=1), x.dims.T).to(v.dtype)
    return o, torch.cat(states) if output_final_state else None


def segments(x: Operands) -> Iterator[tuple[slice, slice]]:
    """Which tokens, and which rows of the state, belong together: all of a batch, or one packed segment."""
    if x.offsets is None:
        yield slice(0, x.dims.T), slice(0, x.dims.N)
        return
    for n in range(x.dims.N):
        yield slice(x.offsets[n], x.offsets[n + 1]), slice(n, n + 1)
