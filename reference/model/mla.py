"""Multi-head latent attention without positions: the token mixer of every fourth layer.

A token leaves one latent behind, which all heads share:

    c, p      = W_kva x                    R latent channels, and P key channels as they are
    latent    = [rmsnorm(c), p]            what the cache keeps
    k_h, v_h  = W_kb,h c, W_vb,h c         each head's own key and value
    score_h   = (<q_h, k_h> + <q'_h, p>) / sqrt(channels of [q_h, q'_h])
    o_h       = sum softmax(score_h) v_h

There are no positions ("NoPE"): the P channels that other models rotate are used unrotated. KDA tells the
order of tokens (section 4, arXiv:2510.26692).

For one new token it is cheaper never to form k_h and v_h ("absorbed"): <q_h, W_kb,h c> = <W_kb,h^T q_h, c>,
and W_vb,h goes behind the sum. Both forms are here, and equal but for rounding.

Each sequence attends on its own, so that lengths may differ and a NaN stays where it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..contract import compute_dtype
from .cache import MLAState
from .config import LATENT_NORM_EPS, KimiLinearConfig
from .parts import Linear, RMSNorm, Where
from .segments import Segments


class Query(NamedTuple):
    """A query's two parts: against each head's own key, and against the channels that all heads share."""

    own: Float[Tensor, "t H N"]
    shared: Float[Tensor, "t H P"]


class UpProjection(NamedTuple):
    """kv_b_proj by heads: from a latent to each head's key and value."""

    key: Float[Tensor, "H N R"]
    value: Float[Tensor, "H V R"]


def attend(
    q: Query, up: UpProjection, c: Float[Tensor, "L R"], p: Float[Tensor, "L P"], scale: float
) -> Float[Tensor, "t H V"]:
    """The plain form: every latent becomes a key and a value for each head, then softmax attention.

    The t queries belong to the last t of the L tokens; each reads its own token and those before it.
    """
    k = einsum(c, up.key, "l r, h n r -> l h n")
    v = einsum(c, up.value, "l r, h v r -> l h v")
    score = einsum(q.own, k, "t h n, l h n -> h t l") + einsum(q.shared, p, "t h p, l p -> h t l")
    weight = causal_softmax(scale * score)
    return einsum(weight, v, "h t l, l h v -> t h v")


def attend_absorbed(
    q: Query, up: UpProjection, c: Float[Tensor, "L R"], p: Float[Tensor, "L P"], scale: float
) -> Float[Tensor, "t H V"]:
    """The absorbed form: queries move into the latent space, and the sum leaves it once. As `attend`."""
    q_latent = einsum(q.own, up.key, "t h n, h n r -> t h r")
    score = einsum(q_latent, c, "t h r, l r -> h t l") + einsum(q.shared, p, "t h p, l p -> h t l")
    weight = causal_softmax(scale * score)
    mixed = einsum(weight, c, "h t l, l r -> t h r")
    return einsum(mixed, up.value, "t h r, h v r -> t h v")


def causal_softmax(score: Float[Tensor, "H t L"]) -> Float[Tensor, "H t L"]:
    """Softmax over the tokens up to each query's own; the last query belongs to the last token."""
    t, L = score.shape[-2:]
    later = ~torch.ones(t, L, dtype=torch.bool, device=score.device).tril(diagonal=L - t)
    return torch.softmax(_without(score, later), dim=-1)


class MultiHeadLatentAttention(nn.Module):
    """MLA with the checkpoint's names; q_lora_rank chooses how queries are projected."""

    def __init__(self, config: KimiLinearConfig, dtype: torch.dtype, device: Where = None) -> None:
        super().__init__()
        D, H, R = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
        N, P, V, Q = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.q_lora_rank
        self.H, self.N, self.R = H, N, R
        self.scale = config.qk_head_dim**-0.5
        if Q is None:
            self.q_proj = Linear(D, H * (N + P), dtype, device)
        else:
            self.q_a_proj = Linear(D, Q, dtype, device)
            self.q_a_layernorm = RMSNorm(Q, LATENT_NORM_EPS, dtype, device)
            self.q_b_proj = Linear(Q, H * (N + P), dtype, device)
        self.kv_a_proj_with_mqa = Linear(D, R + P, dtype, device)
        self.kv_a_layernorm = RMSNorm(R, LATENT_NORM_EPS, dtype, device)
        self.kv_b_proj = Linear(R, H * (N + V), dtype, device)
        self.o_proj = Linear(H * V, D, dtype, device)

    def forward(
        self, x: Float[Tensor, "B T D"], segments: Segments, state: MLAState
    ) -> tuple[Float[Tensor, "B T D"], MLAState]:
        """Let every token attend to its sequence so far; return the output and the longer latents."""
        queries = segments.split(self.queries(x))
        new = segments.split(self.latent(x))
        latents = tuple(torch.cat(pair) for pair in zip(state.latents, new, strict=True))
        o = segments.join([self.attention(q, latent) for q, latent in zip(queries, latents, strict=True)])
        return self.o_proj(rearrange(o, "b t h v -> b t (h v)").to(x.dtype)), MLAState(latents)

    def queries(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H N_plus_P"]:
        """Queries by heads, both parts side by side."""
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return rearrange(q, "b t (h n) -> b t h n", h=self.H)

    def latent(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T R_plus_P"]:
        """What a token leaves in the cache: [rmsnorm(c), p]."""
        compressed = self.kv_a_proj_with_mqa(x)
        c, p = compressed[..., : self.R], compressed[..., self.R :]
        return torch.cat([self.kv_a_layernorm(c), p], dim=-1)

    def attention(
        self, q: Float[Tensor, "t H N_plus_P"], latent: Float[Tensor, "L R_plus_P"]
    ) -> Float[Tensor, "t H V"]:
        """One sequence, in fp32 (fp64): absorbed for a single new token, else in the plain form."""
        form = attend_absorbed if len(q) == 1 else attend
        wide = compute_dtype(q.dtype)
        q, latent = q.to(wide), latent.to(wide)
        query = Query(q[..., : self.N], q[..., self.N :])
        return form(query, self.up_projection(wide), latent[:, : self.R], latent[:, self.R :], self.scale)

    def up_projection(self, dtype: torch.dtype) -> UpProjection:
        """kv_b_proj's rows by heads: N for the key, then V for the value."""
        by_head = rearrange(self.kv_b_proj.weight.to(dtype), "(h nv) r -> h nv r", h=self.H)
        return UpProjection(by_head[:, : self.N], by_head[:, self.N :])


def _without(score: Float[Tensor, "H t L"], mask: Bool[Tensor, "t L"]) -> Float[Tensor, "H t L"]:
    return score.masked_fill(mask, -torch.inf)
