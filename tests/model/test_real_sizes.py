"""One layer of each kind at the sizes of Kimi-Linear-48B, against transformers' layer with the same weights."""

from pathlib import Path

import pytest
import torch

from hf_oracle import fp64_throughout, transformers
from judge import assert_within_envelope, bounds_of
from kimi_linear.reference.chunked import chunk_kda
from kimi_linear.reference.model import KDAState, KimiLinearConfig, MLAState, checkpoint_shapes
from kimi_linear.reference.model.kda import KimiDeltaAttention
from kimi_linear.reference.model.mla import MultiHeadLatentAttention
from kimi_linear.reference.model.moe import SparseMoE
from kimi_linear.reference.model.parts import gated_mlp
from kimi_linear.reference.model.segments import Segments
from kimi_linear.reference.naive import recurrent_kda

RELEASED = Path(__file__).parent / "kimi_linear_48b_config.json"
CONFIG = KimiLinearConfig.from_json(RELEASED)
KDA_LAYER, MLA_LAYER = 0, 3
T = 67

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*rope_scaling.*:FutureWarning")]


def their_module():
    from transformers.models.kimi_linear import modeling_kimi_linear

    return modeling_kimi_linear


def their_config():
    config = transformers.KimiLinearConfig.from_pretrained(RELEASED.parent, _configuration_file=RELEASED.name)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def weights(layer: int) -> dict[str, torch.Tensor]:
    """A mixer's tensors, fp32 values held in fp64, by their names in the layer."""
    rng = torch.Generator().manual_seed(layer)
    prefix = f"model.layers.{layer}.self_attn."
    shapes = {
        name.removeprefix(prefix): s for name, (s, _) in checkpoint_shapes(CONFIG).items() if name.startswith(prefix)
    }
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=rng)
        if name.endswith("norm.weight"):
            x = 1 + 0.2 * x
        elif name == "A_log":
            x = 2 * torch.rand(shape, generator=rng)
        elif name == "dt_bias":
            x = x - 3
        else:
            x = 1.5 * x / x[0].numel() ** 0.5
        tensors[name] = x.double()
    return tensors


def tokens(n=T):
    return torch.randn(1, n, CONFIG.hidden_size, generator=torch.Generator().manual_seed(9)).double()


def filled(module, tensors):
    module.load_state_dict(tensors)
    return module.requires_grad_(False).eval()


def agree(ours, theirs, x):
    """In fp64 the two are equal to rounding; in fp32 ours is the fp64 result to rounding."""
    exact = [ours(x)]
    bounds = bounds_of(exact, lambda: [ours(x)])
    with fp64_throughout():
        got = [theirs(x)]
    assert_within_envelope(got, exact, bounds)
    return exact, bounds


def test_a_kda_layer_of_32_heads_of_128_channels():
    tensors = weights(KDA_LAYER)
    layer = filled(KimiDeltaAttention(CONFIG, chunk_kda, recurrent_kda, torch.float64), tensors)
    renamed = {
        n: x for n, x in tensors.items() if "conv1d" not in n and n not in ("A_log", "dt_bias") and "f_" not in n
    }
    renamed |= {f"forget_gate.{n}": tensors[n] for n in tensors if n in ("A_log", "dt_bias") or n.startswith("f_")}
    renamed["conv1d.weight"] = torch.cat([tensors[f"{p}_conv1d.weight"] for p in "qkv"])
    theirs = filled(their_module().KimiLinearDeltaAttention(their_config(), KDA_LAYER).double(), renamed)

    def ours(x, layer=layer):
        return layer(x, Segments((x.shape[1],), packed=False), zero_state(x.dtype))[0]

    x = tokens()
    exact, bounds = agree(ours, theirs, x)
    assert_within_envelope([ours(x.float(), layer.float())], exact, bounds)


def under_their_names(tensors):
    in_gate = ("A_log", "dt_bias", "f_a_proj", "f_b_proj")
    theirs = {f"forget_gate.{n}" if n.startswith(in_gate) else n: x for n, x in tensors.items() if "conv1d" not in n}
    return {**theirs, "conv1d.weight": torch.cat([tensors[f"{p}_conv1d.weight"] for p in "qkv"])}


def zero_state(dtype):
    conv = torch.zeros(1, CONFIG.short_conv_kernel_size - 1, CONFIG.kda_width, dtype=dtype)
    S = torch.zeros(1, CONFIG.kda_num_heads, CONFIG.kda_head_dim, CONFIG.kda_head_dim, dtype=dtype)
    return KDAState(conv, conv, conv, S)


def test_an_mla_layer_with_a_latent_of_512_channels_and_64_shared_ones():
    tensors = weights(MLA_LAYER)
    layer = filled(MultiHeadLatentAttention(CONFIG, torch.float64), tensors)
    theirs = filled(their_module().KimiLinearAttention(their_config(), MLA_LAYER).double(), tensors)
    mask = torch.full((T, T), -torch.inf, dtype=torch.float64).triu(1)[None, None]

    def ours(x, layer=layer):
        empty = torch.zeros(0, CONFIG.kv_lora_rank + CONFIG.qk_rope_head_dim, dtype=x.dtype)
        return layer(x, Segments((x.shape[1],), packed=False), MLAState((empty,)))[0]

    x = tokens()
    exact, bounds = agree(ours, lambda x: theirs(x, mask)[0], x)
    assert_within_envelope([ours(x.float(), layer.float())], exact, bounds)

    def absorbed(x):
        latent = layer.latent(x)[0]
        o = layer.attention(layer.queries(x)[0, -1:], latent)
        return [layer.o_proj(o.flatten(1).to(x.dtype))]

    layer.double()
    last = [exact[0][0, -1:]]
    assert_within_envelope(absorbed(x), last, bounds_of(last, lambda: absorbed(x)))


def test_a_moe_layer_of_256_experts_with_8_of_1024_channels_for_each_token():
    """The experts' weights, 7 GB in fp32, are shared: our w1 and w3 are the halves of their one tensor."""
    theirs = their_module().KimiLinearMoE(their_config()).requires_grad_(False)
    rng = torch.Generator().manual_seed(1)
    for name, x in theirs.named_parameters():
        x.normal_(generator=rng).mul_(1.5 / x.shape[-1] ** 0.5)
        assert x.dtype == torch.float32, name
    theirs.gate.e_score_correction_bias.normal_(generator=rng).mul_(0.1)

    ours = SparseMoE(CONFIG, "unbiased", torch.float32, "meta").requires_grad_(False)
    gate, up = theirs.experts.gate_up_proj.chunk(2, dim=1)
    shared = {"experts.w1": gate, "experts.w3": up, "experts.w2": theirs.experts.down_proj}
    rest = {name: x for name, x in theirs.state_dict().items() if not name.startswith("experts.")}
    ours.load_state_dict({**shared, **rest}, assign=True)

    x = tokens(13)[0]
    exact = [by_hand(ours, x)]
    bounds = bounds_of(exact, lambda: [by_hand(ours, x)])
    assert_within_envelope([ours(x.float()[None])[0]], exact, bounds)
    assert_within_envelope([theirs(x.float()[None])[0]], exact, bounds)
    assert len(ours.gate(x.float()).experts.unique()) > 50


def by_hand(layer, x):
    """The layer in fp64, one token and one expert at a time, from fp32 weights."""
    wide = {name: w.double() for name, w in layer.state_dict().items() if not name.startswith("experts.")}
    outputs = []
    for token in x:
        scores = torch.sigmoid(token[None] @ wide["gate.weight"].T)[0]
        chosen = (scores + wide["gate.e_score_correction_bias"]).topk(CONFIG.num_experts_per_token).indices
        mixing = CONFIG.routed_scaling_factor * scores[chosen] / scores[chosen].sum()
        y = gated_mlp(token[None], *(wide[f"shared_experts.{p}_proj.weight"] for p in ("gate", "up", "down")))
        for weight, e in zip(mixing, chosen.tolist(), strict=True):
            y = y + weight * gated_mlp(token[None], *(w.double() for w in layer.experts.weights_of(e)))
        outputs.append(y[0])
    return torch.stack(outputs)
