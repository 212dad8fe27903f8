"""The KDA layer: projections, short convolutions, the operator, a gated norm, the output projection.

    q, k, v = conv(W x)                    each its own W and convolution, SiLU inside
    g       = gate(W_fb W_fa x)            raw; the front end makes it a log decay
    beta    = sigmoid(W_b x)               raw; the front end does the sigmoid
    o       = kda(l2norm(q), l2norm(k), v, g, beta)
    y       = W_o (rmsnorm(o) * sigmoid(W_gb W_ga x))       norm per head

Section 4 of arXiv:2510.26692. The full-rank output gate, W_g x, and the bounded gate are those of Kimi K3.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ..contract import compute_dtype
from ..front_end import FrontEnd
from ..gates import BoundedGate, SoftplusGate
from .cache import KDAState
from .config import KimiLinearConfig
from .convolution import ShortConvolution
from .parts import Linear, RMSNorm, Where, rms_norm
from .segments import Segments

KDAOperator = Callable[..., tuple[Tensor, Tensor | None]]  # the signature in `kimi_linear.reference.contract`


class KimiDeltaAttention(nn.Module):
    """The token mixer of three layers in four.

    `kda` runs on many tokens, `decode_kda` on calls with at most one token a sequence; any two operators
    with the contract's signature will do.
    """

    def __init__(
        self,
        config: KimiLinearConfig,
        kda: KDAOperator,
        decode_kda: KDAOperator,
        dtype: torch.dtype,
        device: Where = None,
    ) -> None:
        super().__init__()
        D, P, K, H = config.hidden_size, config.kda_width, config.kda_head_dim, config.kda_num_heads
        W, wide = config.short_conv_kernel_size, compute_dtype(dtype)
        self.kda, self.decode_kda = kda, decode_kda
        self.H, self.lower_bound = H, config.gate_lower_bound
        self.q_proj, self.k_proj, self.v_proj = (Linear(D, P, dtype, device) for _ in "qkv")
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConvolution(P, W, dtype, device) for _ in "qkv")
        self.A_log = nn.Parameter(torch.empty(1, 1, H, 1, dtype=wide, device=device))
        self.dt_bias = nn.Parameter(torch.empty(P, dtype=wide, device=device))
        self.f_a_proj, self.f_b_proj = Linear(D, K, dtype, device), Linear(K, P, dtype, device)
        self.b_proj = Linear(D, H, dtype, device)
        if config.use_full_rank_gate:
            self.g_proj = Linear(D, P, dtype, device)
        else:
            self.g_a_proj, self.g_b_proj = Linear(D, K, dtype, device), Linear(K, P, dtype, device)
        self.o_norm = RMSNorm(K, config.rms_norm_eps, dtype, device)
        self.o_proj = Linear(P, D, dtype, device)

    def forward(
        self, x: Float[Tensor, "B T D"], segments: Segments, state: KDAState
    ) -> tuple[Float[Tensor, "B T D"], KDAState]:
        """Mix the tokens of every sequence; return the output and the state after the last token."""
        q, conv_q = self.q_conv1d(self.q_proj(x), state.conv_q, segments)
        k, conv_k = self.k_conv1d(self.k_proj(x), state.conv_k, segments)
        v, conv_v = self.v_conv1d(self.v_proj(x), state.conv_v, segments)
        g = self.f_b_proj(self.f_a_proj(x))
        q, k, v, g = (self.to_heads(y) for y in (q, k, v, g))
        kda = self.kda if segments.longest > 1 else self.decode_kda
        o, S = kda(
            q,
            k,
            v,
            g,
            self.b_proj(x),
            front_end=self.front_end(),
            initial_state=state.S,
            output_final_state=True,
            cu_seqlens=segments.cu_seqlens(x.device),
        )
        if S is None:
            raise TypeError("kda must return a final state where output_final_state is true; got None")
        return self.output(o, x), KDAState(conv_q, conv_k, conv_v, S)

    def front_end(self) -> FrontEnd:
        """What the operator does to raw projections: l2norm of q and k, the gate, the sigmoid of beta."""
        if self.lower_bound is None:
            return FrontEnd(gate=SoftplusGate(self.A_log, self.dt_bias))
        return FrontEnd(gate=BoundedGate(self.A_log, self.dt_bias, self.lower_bound))

    def output(self, o: Float[Tensor, "B T H K"], x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """W_o (rmsnorm(o) * sigmoid(gate)), the norm over each head's channels, in fp32."""
        gate = self.to_heads(self.output_gate(x))
        normed = rms_norm(o, self.o_norm.weight, self.o_norm.eps)
        gated = normed * torch.sigmoid(gate.to(normed.dtype))
        return self.o_proj(rearrange(gated.to(x.dtype), "b t h k -> b t (h k)"))

    def output_gate(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T P"]:
        """The output gate before its sigmoid: full rank, or through K channels."""
        if hasattr(self, "g_proj"):
            return self.g_proj(x)
        return self.g_b_proj(self.g_a_proj(x))

    def to_heads(self, x: Float[Tensor, "B T P"]) -> Float[Tensor, "B T H K"]:
        """Channels of all heads to heads and their channels."""
        return rearrange(x, "b t (h k) -> b t h k", h=self.H)
