"""The sizes and constants of a Kimi Linear model, as its `config.json` states them.

Layers are numbered from 0 here, as in the names of the checkpoint's tensors; `linear_attn_config` in the
file counts them from 1. `KimiLinearConfig.from_json` reads the file that came with the released checkpoint
and the one that transformers writes; anything that would change the result and that this model does not do
is refused by name (`config_json`).

The architecture is that of section 4, arXiv:2510.26692: three KDA layers and one MLA layer without positions,
again and again; a dense MLP in the first layer, mixtures of experts in the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

DTYPES = ("bfloat16", "float16", "float32", "float64")
POSITIVE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "kv_lora_rank"),
    *("qk_nope_head_dim", "v_head_dim", "kda_num_heads", "kda_head_dim", "short_conv_kernel_size"),
    *("moe_layer_freq", "num_expert_group", "topk_group"),
)
POSITIVE_OR_ZERO = ("qk_rope_head_dim", "first_k_dense_replace", "num_experts", "num_shared_experts")
LATENT_NORM_EPS = 1e-6  # of the norms inside MLA: released code builds them without the config's rms_norm_eps


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig:
    """Everything that decides a model's shapes and arithmetic. Immutable; checked when it is made.

    Names are those of the original `config.json`, but for `kda_num_heads`, `kda_head_dim` and `mla_layers`
    (0-based), which it nests in `linear_attn_config`.

    gate_lower_bound     None: softplus gate; a negative number: the bounded gate
    use_full_rank_gate   the output gate of KDA is g_proj, instead of g_b_proj after g_a_proj
    q_lora_rank          None: MLA's queries are q_proj, instead of q_b_proj after a norm after q_a_proj
    num_experts          0: every MLP is dense
    dtype                what the checkpoint stores, A_log and dt_bias apart; a model may be built in another
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    rms_norm_eps: float = 1e-5

    mla_layers: tuple[int, ...] = ()
    num_attention_heads: int
    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None
    use_full_rank_gate: bool = False

    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1

    model_max_length: int = 1048576
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    initializer_range: float = 0.02
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_layers()
        self._check_experts()
        if self.dtype not in DTYPES:
            reject("dtype", "one of " + ", ".join(DTYPES), repr(self.dtype))
        if self.gate_lower_bound is not None and not -math.inf < self.gate_lower_bound < 0:
            reject("gate_lower_bound", "null (softplus gate) or a finite negative number", self.gate_lower_bound)

    @classmethod
    def from_json(cls, source: str | Path | dict[str, Any]) -> KimiLinearConfig:
        """Read a `config.json`: its path, the folder it lies in, or its contents.

        Both layouts are read: the released checkpoint's, and the one of transformers (`layer_types`,
        `mlp_layer_types`, `linear_head_dim`, ..). A ValueError names the key, what was
        wanted and what came: for a key that is missing, for a value that this model does not implement
        (another router function, positions in MLA, biases, ..), for an unknown key that is set.
        """
        from .config_json import read_config

        return cls(**read_config(source))

    def to_json(self) -> dict[str, Any]:
        """The contents of a `config.json` in the layout of the released checkpoint, ready for `json.dump`."""
        from .config_json import original_layout

        return original_layout(self)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based layers whose token mixer is KDA: all that are not MLA."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.mla_layers)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based layers whose MLP is a mixture of experts."""
        return tuple(i for i in range(self.num_hidden_layers) if self.is_moe(i))

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """0-based layers whose MLP is dense."""
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_moe(i))

    def is_mla(self, layer: int) -> bool:
        """Whether a 0-based layer mixes tokens by MLA; else it does by KDA."""
        return layer in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Whether a 0-based layer has experts: from first_k_dense_replace on, every moe_layer_freq-th."""
        late_enough = layer >= self.first_k_dense_replace
        return self.num_experts > 0 and late_enough and layer % self.moe_layer_freq == 0

    @property
    def qk_head_dim(self) -> int:
        """Channels of an MLA query or key: those from the latent, and those that all heads share."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kda_width(self) -> int:
        """Channels of all KDA heads together."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        ids = self.eos_token_id
        if ids is None:
            return ()
        return (ids,) if isinstance(ids, int) else ids

    def _check_sizes(self) -> None:
        for name in POSITIVE:
            if not _is_int(getattr(self, name)) or getattr(self, name) < 1:
                reject(name, "a positive integer", repr(getattr(self, name)))
        for name in POSITIVE_OR_ZERO:
            if not _is_int(getattr(self, name)) or getattr(self, name) < 0:
                reject(name, "an integer, 0 or more", repr(getattr(self, name)))
        if not self.rms_norm_eps > 0:
            reject("rms_norm_eps", "a positive number", repr(self.rms_norm_eps))

    def _check_layers(self) -> None:
        wanted = sorted(set(self.mla_layers))
        if list(self.mla_layers) != wanted or any(not 0 <= i < self.num_hidden_layers for i in self.mla_layers):
            want = f"increasing 0-based layers below num_hidden_layers={self.num_hidden_layers}"
            reject("mla_layers", want, list(self.mla_layers))

    def _check_experts(self) -> None:
        E, groups = self.num_experts, self.num_expert_group
        if E == 0:
            return
        if E % groups or (groups > 1 and E // groups < 2):
            reject("num_expert_group", f"a divisor of num_experts={E} that leaves two or more a group", groups)
        if self.topk_group > groups:
            reject("topk_group", f"at most num_expert_group={groups}", self.topk_group)
        if not 1 <= self.num_experts_per_token <= E // groups * self.topk_group:
            want = f"1 to {E // groups * self.topk_group}, the experts of the chosen groups"
            reject("num_experts_per_token", want, self.num_experts_per_token)
        if self.moe_intermediate_size < 1:
            reject("moe_intermediate_size", "a positive integer", self.moe_intermediate_size)


def reject(name: str, want: str, got: Any) -> NoReturn:
    """Raise the ValueError of a config key."""
    raise ValueError(f"config: {name} must be {want}; got {got}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
