"""Kimi Linear from token ids to logits.

    x = embed(ids)
    x = x + mix(norm(x))                   KDA, or MLA without positions in every fourth layer
    x = x + mlp(norm(x))                   dense in the first layer, experts in the others
    logits = lm_head(norm(x))

Section 4 of arXiv:2510.26692. Parameters have the names of the released checkpoint (`names`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..chunked import chunk_kda
from ..contract import FLOAT_DTYPES, check_choice
from ..naive import recurrent_kda
from .cache import Cache, LayerState, empty_cache
from .config import KimiLinearConfig
from .kda import KDAOperator, KimiDeltaAttention
from .mla import MultiHeadLatentAttention
from .moe import RouterWeights, SparseMoE
from .parts import MLP, Linear, RMSNorm, Where
from .segments import Segments, check_tokens, segments_of


class Options(NamedTuple):
    """What a model is built with, beside its config."""

    kda: KDAOperator
    decode_kda: KDAOperator
    router_weights: RouterWeights
    dtype: torch.dtype
    device: Where


class Hidden(NamedTuple):
    """What the layers leave: the normalised state of every token, the cache, and the states on the way."""

    x: Float[Tensor, "B T D"]
    cache: Cache
    hidden_states: tuple[Float[Tensor, "B T D"], ...]  # the embedding, then the output of each layer


class Output(NamedTuple):
    """A call's result. `hidden_states` as in `Hidden`: where they first differ, two models part."""

    logits: Float[Tensor, "B T vocab"]
    cache: Cache
    hidden_states: tuple[Float[Tensor, "B T D"], ...]


class Embedding(nn.Module):
    """A row of the weight for each token id."""

    def __init__(self, vocab_size: int, channels: int, dtype: torch.dtype, device: Where = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, channels, dtype=dtype, device=device))

    def forward(self, input_ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Look the ids up."""
        return nn.functional.embedding(input_ids, self.weight)


class DecoderLayer(nn.Module):
    """One layer: a token mixer and an MLP, each behind a norm and beside a residual."""

    def __init__(self, config: KimiLinearConfig, layer: int, options: Options) -> None:
        super().__init__()
        D, eps = config.hidden_size, config.rms_norm_eps
        kda, decode_kda, router_weights, dtype, device = options
        self.input_layernorm = RMSNorm(D, eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(D, eps, dtype, device)
        self.self_attn: nn.Module = (
            MultiHeadLatentAttention(config, dtype, device)
            if config.is_mla(layer)
            else KimiDeltaAttention(config, kda, decode_kda, dtype, device)
        )
        if config.is_moe(layer):
            self.block_sparse_moe = SparseMoE(config, router_weights, dtype, device)
        else:
            self.mlp = MLP(D, config.intermediate_size, dtype, device)

    def forward(
        self, x: Float[Tensor, "B T D"], segments: Segments, state: LayerState
    ) -> tuple[Float[Tensor, "B T D"], LayerState]:
        """x + mix(norm(x)), then x + mlp(norm(x)); and the mixer's state after the last token."""
        mixed, state = self.self_attn(self.input_layernorm(x), segments, state)
        x = x + mixed
        mlp = self.block_sparse_moe if hasattr(self, "block_sparse_moe") else self.mlp
        return x + mlp(self.post_attention_layernorm(x)), state


class KimiLinearModel(nn.Module):
    """All but the LM head: from token ids to the normalised state of every token."""

    def __init__(self, config: KimiLinearConfig, options: Options) -> None:
        super().__init__()
        self.config, self.dtype = config, options.dtype
        dtype, device = options.dtype, options.device
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device)
        self.layers = nn.ModuleList(DecoderLayer(config, i, options) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        *,
        attention_mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
        cache: Cache | None = None,
    ) -> Hidden:
        """Arguments as for `KimiLinearForCausalLM`. Masked positions are packed away, and zero on return."""
        check_tokens(input_ids, attention_mask, self.config.vocab_size)
        segments = segments_of(input_ids, attention_mask, cu_seqlens)
        cache = self._start(cache, segments, input_ids.device)
        mask = attention_mask if segments.packed else None
        x = self.embed_tokens(input_ids if mask is None else input_ids[mask][None])
        hidden_states, states = [x], []
        for layer, state in zip(self.layers, cache.layers, strict=True):
            x, state = layer(x, segments, state)
            hidden_states.append(x)
            states.append(state)
        lengths = tuple(old + new for old, new in zip(cache.lengths, segments.lengths, strict=True))
        x, *hidden_states = (_spread(y, mask) for y in (self.norm(x), *hidden_states))
        return Hidden(x, Cache(tuple(states), lengths), tuple(hidden_states))

    def _start(self, cache: Cache | None, segments: Segments, device: torch.device) -> Cache:
        N = len(segments.lengths)
        if cache is None:
            return empty_cache(self.config, N, self.dtype, device)
        if len(cache.lengths) != N:
            raise ValueError(f"cache must hold N={N} sequences, those of input_ids; got {len(cache.lengths)}")
        return cache


class KimiLinearForCausalLM(nn.Module):
    """Kimi Linear with its LM head. Weights are uninitialised until `load_tensors` fills them.

    kda, decode_kda   KDA operators with the contract's signature: for many tokens, and for one a sequence
    router_weights    "unbiased", or "biased" as the code beside the released checkpoint has it (`moe`)
    dtype             of weights and activations. A_log, dt_bias, the router's weight and its correction
                      bias are fp32 in every model (fp64 in an fp64 one), and so are KDA states
    device            where the weights are; "meta" makes a model without memory
    """

    def __init__(
        self,
        config: KimiLinearConfig,
        *,
        kda: KDAOperator = chunk_kda,
        decode_kda: KDAOperator = recurrent_kda,
        router_weights: RouterWeights = "unbiased",
        dtype: torch.dtype = torch.float32,
        device: Where = None,
    ) -> None:
        super().__init__()
        check_choice("dtype", dtype, FLOAT_DTYPES)
        self.config = config
        self.model = KimiLinearModel(config, Options(kda, decode_kda, router_weights, dtype, device))
        self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype, device)

    def forward(
        self,
        input_ids: Int[Tensor, "B T"],
        *,
        attention_mask: Bool[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
        cache: Cache | None = None,
    ) -> Output:
        """Logits for the token after each token, and the cache from which the next call goes on.

        attention_mask   of this call's tokens, true where there is one; any pattern, left padding included.
                         Masked positions leave no trace, and their logits are 0
        cu_seqlens       segments packed end to end in one row (B = 1); the last offset is T. Empty ones
                         keep their cache
        cache            what an earlier call returned for the same sequences; it is not changed

        One call, several calls in a row and one call a token give the same, but for rounding.
        """
        x, cache, hidden_states = self.model(
            input_ids, attention_mask=attention_mask, cu_seqlens=cu_seqlens, cache=cache
        )
        return Output(self.lm_head(x), cache, hidden_states)


def _spread(x: Float[Tensor, "rows n D"], mask: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T D"]:
    """Packed tokens back to their places in a masked batch; 0 elsewhere."""
    if mask is None:
        return x
    return x.new_zeros(*mask.shape, x.shape[-1]).index_put((mask,), x[0])
