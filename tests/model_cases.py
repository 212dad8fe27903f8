"""Small models for the tests: configs of odd sizes, and weights with which every part matters."""

import math
from dataclasses import replace

import torch

from kimi_linear.reference.model import KimiLinearConfig, KimiLinearForCausalLM, checkpoint_shapes, load_tensors

SMALL = KimiLinearConfig(
    vocab_size=101,
    hidden_size=44,
    num_hidden_layers=4,
    intermediate_size=52,
    mla_layers=(3,),
    num_attention_heads=3,
    kv_lora_rank=20,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=14,
    kda_num_heads=5,
    kda_head_dim=12,
    first_k_dense_replace=1,
    num_experts=12,
    num_experts_per_token=3,
    num_shared_experts=1,
    moe_intermediate_size=18,
    routed_scaling_factor=2.446,
    eos_token_id=100,
    pad_token_id=99,
    bos_token_id=98,
    dtype="float32",
)
CONFIGS = {
    "four_layers": SMALL,
    "eight_layers": replace(SMALL, num_hidden_layers=8, mla_layers=(3, 7)),
    "last_layer_mla": replace(SMALL, num_hidden_layers=6, mla_layers=(3, 5), kda_num_heads=3, kda_head_dim=20),
    "query_latent": replace(SMALL, q_lora_rank=22, short_conv_kernel_size=3),
    "groups": replace(SMALL, num_expert_group=4, topk_group=2, num_experts_per_token=4, num_shared_experts=2),
    "plain_weights": replace(SMALL, moe_renormalize=False, first_k_dense_replace=2, routed_scaling_factor=1.3),
}
K3_CONFIGS = {  # no released transformers class has these
    "bounded_gate": replace(SMALL, gate_lower_bound=-5.0),
    "full_rank_gate": replace(SMALL, gate_lower_bound=-3.0, use_full_rank_gate=True),
}


def random_tensors(config: KimiLinearConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors in fp32. Layers add about as much as they get, gates decay at all speeds."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (shape, _) in checkpoint_shapes(config).items():
        x = torch.randn(shape, generator=rng)
        if name.endswith("norm.weight"):
            x = 1 + 0.2 * x
        elif name.endswith("A_log"):
            x = 2 * torch.rand(shape, generator=rng)
        elif name.endswith("dt_bias"):
            x = x - 3
        elif name.endswith("e_score_correction_bias"):
            x = 0.1 * x
        elif not name.endswith("embed_tokens.weight"):
            x = 1.5 * x / math.sqrt(math.prod(shape[1:]))
        tensors[name] = x
    return tensors


def small_model(config: KimiLinearConfig = SMALL, dtype=torch.float64, seed: int = 0, **options):
    """Our model with `random_tensors`."""
    model = KimiLinearForCausalLM(config, dtype=dtype, **options)
    load_tensors(model, random_tensors(config, seed).items())
    return model


def random_tokens(*shape: int, seed: int = 0, config: KimiLinearConfig = SMALL) -> torch.Tensor:
    """Token ids that are no special ones."""
    return torch.randint(config.vocab_size - 3, shape, generator=torch.Generator().manual_seed(seed))
