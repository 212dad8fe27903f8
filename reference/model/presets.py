"""The sizes of released models, for those who have no `config.json` at hand."""

from __future__ import annotations

from .config import KimiLinearConfig

KIMI_LINEAR_48B = KimiLinearConfig(  # Kimi-Linear-48B-A3B, base and instruct
    vocab_size=163840,
    hidden_size=2304,
    num_hidden_layers=27,
    intermediate_size=9216,
    mla_layers=(3, 7, 11, 15, 19, 23, 26),
    num_attention_heads=32,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    kda_num_heads=32,
    kda_head_dim=128,
    num_experts=256,
    num_experts_per_token=8,
    num_shared_experts=1,
    moe_intermediate_size=1024,
    routed_scaling_factor=2.446,
    bos_token_id=163584,
    eos_token_id=163586,
    pad_token_id=163839,
)
