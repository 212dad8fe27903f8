"""The mixture of experts: a sigmoid router, the tokens of each expert as one batch, a shared expert.

    s       = sigmoid(W x)                              a score for each expert, in fp32
    chosen  = top k of s + bias                         within the best groups, where there are groups
    w       = s[chosen], or (s + bias)[chosen]          mixing weights
    w       = scaling * w / sum(w)                      the division if `moe_renormalize`
    y       = sum w_e expert_e(x) + shared(x)

The bias balances the load between experts and is meant to choose only: "unbiased" weights, the default, are
what transformers, vLLM and SGLang compute. The code that came with the released checkpoint adds the bias in
place to an array that its weights are then read from, so there they include it; "biased" does the same. With
more than one group that code also masks with 0 where everyone else masks with -inf, which is not done here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from einops import einsum, rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..contract import check_choice, compute_dtype
from .config import KimiLinearConfig
from .parts import MLP, Where, gated_mlp

RouterWeights = Literal["unbiased", "biased"]
ROUTER_WEIGHTS = ("unbiased", "biased")
BEST_OF_GROUP = 2  # a group is worth the sum of its two best experts
SUM_FLOOR = 1e-20  # keeps 0 / 0 out of the renormalisation where every chosen score underflows


class Routing(NamedTuple):
    """Where n tokens go, and how much each of their experts counts."""

    experts: Int[Tensor, "n k"]
    weights: Float[Tensor, "n k"]


def choose_experts(biased: Float[Tensor, "n E"], k: int, groups: int = 1, kept_groups: int = 1) -> Int[Tensor, "n k"]:
    """The k best experts of each token within its best groups; the lower index wins a tie.

    A group is worth the sum of its two best experts. Experts of other groups count as -inf.
    """
    if groups > 1:
        by_group = rearrange(biased, "n (g e) -> n g e", g=groups)
        worth = by_group.topk(BEST_OF_GROUP, dim=-1).values.sum(-1)
        rank = best_first(worth).argsort(-1)  # each group's place, 0 for the best
        lost = repeat(rank >= kept_groups, "n g -> n (g e)", e=by_group.shape[-1])
        biased = biased.masked_fill(lost, -torch.inf)
    return best_first(biased)[:, :k]


def best_first(x: Float[Tensor, "n E"]) -> Int[Tensor, "n E"]:
    """Indices by falling value, the lower index first among equals."""
    return x.argsort(dim=-1, descending=True, stable=True)


class Router(nn.Module):
    """Scores, choice and mixing weights. Its weight and bias are fp32 whatever the model's dtype."""

    def __init__(
        self, config: KimiLinearConfig, weights: RouterWeights, dtype: torch.dtype, device: Where = None
    ) -> None:
        super().__init__()
        check_choice("router_weights", weights, ROUTER_WEIGHTS)
        E, D, wide = config.num_experts, config.hidden_size, compute_dtype(dtype)
        self.weights, self.k = weights, config.num_experts_per_token
        self.groups, self.kept_groups = config.num_expert_group, config.topk_group
        self.renormalize, self.scaling = config.moe_renormalize, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(E, D, dtype=wide, device=device))
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.empty(E, dtype=wide, device=device))

    def forward(self, x: Float[Tensor, "n D"]) -> Routing:
        """Choose each token's experts, and weigh them."""
        scores = torch.sigmoid(nn.functional.linear(x.to(self.weight.dtype), self.weight))
        biased = scores + self.e_score_correction_bias
        experts = choose_experts(biased, self.k, self.groups, self.kept_groups)
        weights = (scores if self.weights == "unbiased" else biased).gather(1, experts)
        if self.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + SUM_FLOOR)
        return Routing(experts, self.scaling * weights)


class Experts(nn.Module):
    """The weights of E experts, stacked: `experts.{e}.w1.weight` of the checkpoint is `experts.w1[e]`."""

    def __init__(self, E: int, channels: int, width: int, dtype: torch.dtype, device: Where = None) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(E, width, channels, dtype=dtype, device=device))
        self.w3 = nn.Parameter(torch.empty(E, width, channels, dtype=dtype, device=device))
        self.w2 = nn.Parameter(torch.empty(E, channels, width, dtype=dtype, device=device))

    def __len__(self) -> int:
        return len(self.w1)

    def weights_of(self, expert: int) -> tuple[Float[Tensor, "I D"], Float[Tensor, "I D"], Float[Tensor, "D I"]]:
        """Gate, up and down projection of one expert. The only place that reads the weights."""
        return self.w1[expert], self.w3[expert], self.w2[expert]

    def forward(self, x: Float[Tensor, "n D"], experts: Int[Tensor, "n k"]) -> Float[Tensor, "n k D"]:
        """Every token through each of its experts.

        The n k pairs of token and expert are sorted by expert, so that an expert sees its tokens as one
        batch; experts that no token chose cost nothing.
        """
        n, k = experts.shape
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=len(self)).tolist()
        batches = x[order // k].split(counts)
        results = [
            gated_mlp(batch, *self.weights_of(expert)) for expert, batch in enumerate(batches) if len(batch) > 0
        ]
        y = torch.cat(results)[order.argsort()] if results else x[:0]
        return rearrange(y, "(n k) d -> n k d", n=n, k=k)


class SparseMoE(nn.Module):
    """The MLP of a layer with experts, with the checkpoint's names."""

    def __init__(
        self,
        config: KimiLinearConfig,
        router_weights: RouterWeights,
        dtype: torch.dtype,
        device: Where = None,
    ) -> None:
        super().__init__()
        D, width = config.hidden_size, config.moe_intermediate_size
        self.gate = Router(config, router_weights, dtype, device)
        self.experts = Experts(config.num_experts, D, width, dtype, device)
        shared = width * config.num_shared_experts
        self.shared_experts = MLP(D, shared, dtype, device) if shared else None

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The weighted sum over each token's experts, in fp32, plus the shared expert."""
        tokens = rearrange(x, "b t d -> (b t) d")
        routing = self.gate(tokens)
        results = self.experts(tokens, routing.experts).to(routing.weights.dtype)
        mixed = einsum(routing.weights, results, "n k, n k d -> n d").to(x.dtype)
        if self.shared_experts is not None:
            mixed = mixed + self.shared_experts(tokens)
        return rearrange(mixed, "(b t) d -> b t d", b=len(x))
