# %% [markdown]
# # 9. The whole model
#
# *Three layers in four keep a state of constant size, and the fourth keeps everything. How does such a model know
# where anything stands in the text, and what does a million tokens cost it?*
#
# You need notebook 4 (what a KDA layer computes) and 3 (gates). Everything here is `kimi_linear.reference.model`,
# in plain PyTorch. The model is Kimi Linear; its released sizes are in the package. Its weights are not, so we make
# a checkpoint of the same layout, small enough to write on the spot.

# %%
import tempfile
import warnings
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from kimi_linear.reference.model import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    empty_cache,
    load_model,
    make_checkpoint,
    tiny_config,
)
from kimi_linear.reference.model.checkpoint import count_parameters
from kimi_linear.reference.model.presets import KIMI_LINEAR_48B
from tools import checker, expect, expect_close, recorded, show

# %%
torch.set_grad_enabled(False)
big = KIMI_LINEAR_48B
mixers = ["MLA" if big.is_mla(i) else "KDA" for i in range(big.num_hidden_layers)]
print("token mixers:", " ".join(mixers))
print(f"{mixers.count('KDA')} KDA layers, {mixers.count('MLA')} MLA layers; dense MLP in layers {big.dense_layers}")
count = count_parameters(big)
print(f"{count.total / 1e9:.1f} billion parameters; {2 * count.total / 1e9:.0f} GB in bf16")
print(f"a token meets {count.activated / 1e9:.1f} billion of them")
print(
    f"{big.num_experts} experts a layer, of which a token visits {big.num_experts_per_token}, and one shared by all"
)

# %% [markdown]
# Each layer is a *token mixer* (KDA, or attention) and an MLP, each behind a norm and beside a residual connection.
# MLA, multi-head latent attention, is softmax attention whose keys and values all come out of one short vector a
# token, the *latent*; the cache holds latents. And it has no positions at all: no rotation, no bias, nothing.
#
# ## The smallest idea that fails
#
# One layer of attention without positions sees a bag of tokens: shuffle everything before the last one, and the
# prediction after it does not change. One layer of KDA sees a text.

# %%
home = Path(tempfile.mkdtemp())
config = tiny_config(layers=8)
configs = {
    "one layer, MLA": tiny_config(layers=1, mla_layers=(0,)),
    "one layer, KDA": tiny_config(layers=1),
    "eight layers, MLA": tiny_config(layers=8, mla_layers=tuple(range(8))),
    "eight layers, 3 to 1": config,
}
models, change = {}, {}
rng = torch.Generator().manual_seed(9)
ids = torch.randint(256, (1, 60), generator=rng)
shuffled = ids.clone()
shuffled[0, :-1] = ids[0, :-1][torch.randperm(59, generator=rng)]
for number, (name, c) in enumerate(configs.items()):
    models[name] = load_model(make_checkpoint(home / str(number), c), dtype=torch.float64)
    before, after = (models[name](x).logits[0, -1] for x in (ids, shuffled))
    change[name] = ((after - before).norm() / before.norm()).item()
    print(f"{name:22} logits change by {change[name]:.1e}")

# %%
assert change["one layer, MLA"] < 1e-12 < 1e-2 < change["one layer, KDA"]

# %% [markdown]
# Decay *is* position: what came earlier has faded more, and what is written later overwrites. (The third line shows
# that depth helps attention too. A token in the middle sees only those before it, so after one layer it carries a
# trace of where it stood, and the next layer reads that. But this is a trace that training has to find; KDA has the
# order at once, and the MLA layers between find it in what they read.)
#
# ## Inside a KDA layer: the short convolution
#
# $$ q,k,v=\mathrm{conv}(W x),\qquad o=\mathrm{KDA}(q,k,v,g,\beta),
# \qquad y=W_o\big(\mathrm{norm}(o)\odot\sigma(\text{gate})\big) $$
#
# In front of the operator, each channel of q, k and v is summed over the last four tokens, with weights of its own.
# A key is then made of a token *and its neighbours*: "the word after *New*" can be a key. It costs a memory of
# three tokens.

# %%
from kimi_linear.reference.model import short_convolution

layer = models["eight layers, 3 to 1"].model.layers[0].self_attn
weight = layer.k_conv1d.weight  # [P, 1, W]
P, _, W = weight.shape
x = torch.randn(1, 20, P, generator=rng, dtype=torch.float64)
state = torch.zeros(1, W - 1, P, dtype=torch.float64)
whole, _ = short_convolution(x, weight, state)
pieces = []
for t in range(20):
    y, state = short_convolution(x[:, t : t + 1], weight, state)
    pieces.append(y)
assert torch.equal(torch.cat(pieces, 1), whole)
print(f"one token a call, same bits; kept between calls: {W - 1} x {P} numbers, whatever the length")

# %% [markdown]
# ## The router
#
# From the second layer on, the MLP is a mixture of experts. A router scores all, $s=\sigma(W_r x)$; a learned bias
# that evens out the load is added *to choose*; and what the chosen ones answer is mixed by their scores:
#
# $$ \text{chosen}=\mathrm{top}_k(s+b),\qquad
# y=\gamma\sum_{e\in\text{chosen}}\frac{s_e}{\sum s}\,\mathrm{expert}_e(x)+\mathrm{shared}(x). $$
#
# Is $b$ in the mixing weights? The code that came with the released checkpoint says yes, by accident of an addition
# in place; transformers, vLLM and SGLang say no. It is one line, and it changes the text.

# %%
folder = home / "3"
biased = load_model(folder, dtype=torch.float64, router_weights="biased")
ours = models["eight layers, 3 to 1"]
unbiased_logits, biased_logits = ours(ids).logits, biased(ids).logits
moved = ((biased_logits - unbiased_logits).norm() / unbiased_logits.norm()).item()
flips = (biased_logits.argmax(-1) != unbiased_logits.argmax(-1)).double().mean().item()
print(f"logits differ by {moved:.1%}, the likeliest next token at {flips:.0%} of the positions")
assert moved > 1e-3

# %% [markdown]
# ## Two implementations, layer by layer
#
# `transformers` has Kimi Linear too, written by other people. Both read the same files. We let both run in fp32 and
# compare what leaves each layer with our model in fp64. And because a comparison that cannot fail says nothing, a
# third run has a fault planted: one $A_{\log}$ of layer 4, off by one percent.

# %%
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # tqdm misses widgets; transformers dislikes a key that the released config has
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    options = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    theirs = transformers.KimiLinearForCausalLM.from_pretrained(folder, **options).eval()
single = load_model(folder)
faulty = load_model(folder)
faulty.model.layers[4].self_attn.A_log[0, 0, 0] *= 1.01

long_ids = torch.randint(256, (1, 150), generator=rng)
exact = ours(long_ids)
*their_states, their_norm = theirs(long_ids, output_hidden_states=True, use_cache=False).hidden_states
runs = {
    "this repository, fp32": single(long_ids).hidden_states[:-1],
    "transformers, fp32": their_states,
    "A_log of layer 4 off by 1 %": faulty(long_ids).hidden_states[:-1],
}

# %%
figure, axes = plt.subplots()
off = {}
for (name, states), marker in zip(runs.items(), "os^", strict=True):
    pairs = zip(states, exact.hidden_states, strict=False)
    off[name] = [((x.double() - y).norm() / y.norm()).item() for x, y in pairs]
    axes.semilogy(range(1, len(states)), off[name][1:], marker=marker, label=name)
axes.set(xlabel="after so many layers", ylabel="relative difference from fp64", ylim=(1e-8, 1e-1))
axes.legend()
show(
    figure,
    "two independent programs, one rounding error. The planted fault leaves them exactly where it was planted.",
)

# %%
agree, faulty_off = off["transformers, fp32"], off["A_log of layer 4 off by 1 %"]
print("transformers:", *(f"{x:.1e}" for x in agree[1:]))
print("planted:     ", *(f"{x:.1e}" for x in faulty_off[1:]))
assert max(agree) < 1e-5, "fp32 rounding, through all layers"
first = next(i for i, (x, y) in enumerate(zip(faulty_off, agree, strict=True)) if x > 10 * max(y, 1e-7))
assert first == 5, "the output of layer 4, counted from 0, is the fifth"

# %% [markdown]
# This is how one debugs a port of a model: not by the text it writes, but by the first layer whose output parts. On
# a real checkpoint: `kimi-linear logits FOLDER --text "..." --against transformers`.
#
# ## Generating
#
# The prompt goes through in one call, and leaves a cache; then one token at a time. Does a token at a time give
# what one long call gives?

# %%
from kimi_linear.reference.model.generate import generate
from kimi_linear.reference.model.tokenizer import load_tokenizer

tokenizer = load_tokenizer(folder)
prompt = tokenizer.encode("The state is ")
(new,) = generate(single, [prompt], max_new_tokens=40, stop_ids=())
print(repr(tokenizer.decode(prompt + new)), "(untrained weights write noise)")
logits = single(torch.tensor([prompt + new])).logits[0]
again = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
assert again == new, "each token is the likeliest after those before it, read in one call"

# %% [markdown]
# ## What is kept
#
# A KDA layer keeps its state and three tokens for the convolutions, always. An MLA layer keeps a latent for every
# token.

# %%
sizes = {}
for length in (1, 10, 100, 1000):
    grown = single(torch.randint(256, (1, length), generator=rng)).cache
    per_layer = [sum(x.nbytes for x in (s.latents if hasattr(s, "latents") else s)) for s in grown.layers]
    sizes[length] = per_layer
    print(f"{length:>5} tokens: KDA layer {per_layer[0]:>6} bytes, MLA layer {per_layer[3]:>7} bytes")
assert sizes[1][0] == sizes[1000][0]
assert sizes[1000][3] == 1000 * sizes[1][3]

# %% [markdown]
# Now the released sizes. No weights are needed to count: a cache on PyTorch's `meta` device has shapes and no
# memory. We set it beside two other models of the same 27 layers: all of them MLA, and all of them plain multi-head
# attention.

# %%
bf16 = 2  # bytes
constant = empty_cache(big, 1, torch.bfloat16, "meta").nbytes
latent = (big.kv_lora_rank + big.qk_rope_head_dim) * bf16
plain = 2 * big.num_attention_heads * big.v_head_dim * bf16
layers = big.num_hidden_layers


def cache_bytes(tokens: Tensor | int) -> dict[str, Tensor | int]:
    return {
        "Kimi Linear, 20 KDA + 7 MLA": constant + len(big.mla_layers) * latent * tokens,
        "27 MLA layers": layers * latent * tokens,
        "27 layers of plain attention": layers * plain * tokens,
    }


print(f"constant part: {constant / 2**20:.1f} MiB, then {len(big.mla_layers) * latent} bytes a token")
for name, size in cache_bytes(2**20).items():
    print(f"{name:30} {size / 2**30:7.1f} GiB for a text of a million tokens")

# %%
tokens = torch.logspace(1.5, 6.02, 60).double()
crossing = constant / ((layers - len(big.mla_layers)) * latent)
figure, axes = plt.subplots()
for name, size in cache_bytes(tokens).items():
    axes.loglog(tokens, size / 2**20, label=name)
axes.axvline(crossing, color="grey", ls=":")
axes.annotate(f" {crossing:.0f} tokens", (crossing, 2), color="grey")
axes.set(xlabel="tokens of one text", ylabel="cache (MiB)")
axes.legend()
show(
    figure,
    "left of the dotted line the constant state is the larger cache; far to the right, the smallest.",
)

# %% [markdown]
# For a short chat the state of constant size costs *more* than a cache of latents would. It pays from a few
# thousand tokens on, and in the end it is the ratio of layers that decides:

# %%
at_a_million = list(cache_bytes(2**20).values())
print(f"27 MLA layers / Kimi Linear: {at_a_million[1] / at_a_million[0]:.2f}; 27 / 7 is {27 / 7:.2f}")
assert 1000 < crossing < 4000
assert at_a_million[1] / at_a_million[0] > 3.5

# %% [markdown]
# ## What a token costs to write
#
# To decode one token, everything it needs has to come through memory once: the weights that it meets, the states
# (read and written back), the latents of the text so far. At the bandwidth of an H200, as recorded by
# `benchmarks/gpu.py`, that bounds the time from below. Weights are shared by all texts of a batch, caches are not.

# %%
bandwidth = recorded("gpu.json")["copy_TBps"] * 1e12
weights = count.activated * bf16


def least_milliseconds(tokens: Tensor) -> dict[str, Tensor]:
    """Of memory traffic for one token of one text, weights apart."""
    sizes = cache_bytes(tokens)
    sizes["Kimi Linear, 20 KDA + 7 MLA"] = sizes["Kimi Linear, 20 KDA + 7 MLA"] + constant  # states go back, too
    return {name: 1e3 * size / bandwidth for name, size in sizes.items()}


# %%
figure, axes = plt.subplots()
for name, ms in least_milliseconds(tokens).items():
    axes.loglog(tokens, ms, label=name)
axes.axhline(1e3 * weights / bandwidth, color="grey", ls="--", label="the weights a token meets, once a batch")
axes.set(xlabel="tokens of the text so far", ylabel="least time of a token (ms)", ylim=(1e-3, 1e2))
axes.legend(fontsize=8)
show(
    figure,
    "below the dashed line weights dominate for one text. A batch shares them, and the other lines decide.",
)

# %%
for length in (1024, 32768, 2**20):
    row = least_milliseconds(torch.tensor(float(length)))
    print(f"{length:>8} tokens:", ", ".join(f"{name} {ms.item():.3f} ms" for name, ms in row.items()))
end = [ms.item() for ms in least_milliseconds(torch.tensor(2.0**20)).values()]
print(
    f"at a million tokens, attention in all layers reads {end[1] / end[0]:.1f} or {end[2] / end[0]:.0f} times as much"
)

# %% [markdown]
# These are bounds, counted and not measured; what kernels reach of the bandwidth is in notebook 8.
#
# ## What it cost
#
# This repository's model is a reference: one file a concept, no kernel. Recorded beside transformers' PyTorch path
# (`benchmarks/model_cpu.py`, 1024 tokens, fp32, four layers, a CPU):

# %%
record = recorded("model_cpu.json")
for name, seconds in record["forward_seconds"].items():
    print(f"{name:32} {1e3 * seconds['median']:6.0f} ms forward")
for name, samples in record["loading"].items():
    peak = max(sample["peak"] for sample in samples) / record["checkpoint_bytes"]
    print(f"{name:32} {peak:6.2f} times the checkpoint's bytes in memory, at most")

# %% [markdown]
# ## Exercises


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_1(size_of_cache):
    for changes in ({}, {"short_conv_kernel_size": 3}, {"kda_num_heads": 2, "kda_head_dim": 24}):
        c = tiny_config(layers=6, **changes)
        model = KimiLinearForCausalLM(c, dtype=torch.float32)
        for length in (1, 17):
            want = model.requires_grad_(False)(torch.zeros(1, length, dtype=torch.int64)).cache.nbytes
            got = size_of_cache(c, length, 4)
            expect(got == want, f"after {length} tokens, {changes or 'as it is'}: {want} bytes, got {got}")


@checker
def check_2(mixing_weights):
    router = ours.model.layers[1].block_sparse_moe.gate
    tokens = torch.randn(11, config.hidden_size, generator=rng, dtype=torch.float64)
    experts, weights = router(tokens)
    want = torch.zeros(11, config.num_experts, dtype=torch.float64).scatter(1, experts, weights)
    got = mixing_weights(tokens, router.weight, router.e_score_correction_bias, router.k, router.scaling)
    expect_close(got, want, "the mixing weights")


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_3(greedy):
    calls = []
    hook = single.register_forward_pre_hook(lambda _, arguments: calls.append(arguments[0].shape[1]))
    try:
        got = greedy(single, prompt, 12)
    finally:
        hook.remove()
    expect(got == new[:12], f"the 12 likeliest tokens are {new[:12]}, got {got}")
    expect(calls[0] == len(prompt), f"the first call must read the prompt of {len(prompt)} tokens, got {calls[0]}")
    expect(set(calls[1:]) == {1}, f"later calls must read one token each, got {calls[1:]}")


# %% [markdown]
# **1.** The cache of one text in bytes, from the config alone: `size_of_cache(config, tokens, itemsize)`. States
# are fp32 whatever the rest is. Fields: `kda_layers`, `mla_layers`, `kda_num_heads`, `kda_head_dim`, `kda_width`,
# `short_conv_kernel_size`, `kv_lora_rank`, `qk_rope_head_dim`.


# %% tags=["exercise"]
def size_of_cache(config: KimiLinearConfig, tokens: int, itemsize: int) -> int:
    raise NotImplementedError


check_1(size_of_cache)


# %% tags=["answer"] jupyter={"source_hidden": true}
def counted(c: KimiLinearConfig, tokens: int, itemsize: int) -> int:
    state = c.kda_num_heads * c.kda_head_dim**2 * 4
    convolutions = 3 * (c.short_conv_kernel_size - 1) * c.kda_width * itemsize
    latents = tokens * (c.kv_lora_rank + c.qk_rope_head_dim) * itemsize
    return len(c.kda_layers) * (state + convolutions) + len(c.mla_layers) * latents


assert check_1(counted)
assert not check_1(lambda c, tokens, itemsize: counted(c, tokens, itemsize) // 3)
print(f"{counted(big, 2**20, 2) / 2**30:.2f} GiB for a million tokens of the released model")
assert counted(big, 2**20, 2) == at_a_million[0]

# %% [markdown]
# **2.** The router: from x [n, D], its weight [E, D], the correction bias [E], k and the scaling, the mixing weight
# of every expert, [n, E], 0 where not chosen.


# %% tags=["exercise"]
def mixing_weights(x: Tensor, weight: Tensor, bias: Tensor, k: int, scaling: float) -> Tensor:
    raise NotImplementedError


check_2(mixing_weights)


# %% tags=["answer"] jupyter={"source_hidden": true}
def choose_then_mix(x: Tensor, weight: Tensor, bias: Tensor, k: int, scaling: float, mixed_bias: int = 0) -> Tensor:
    scores = torch.sigmoid(x @ weight.T)
    chosen = (scores + bias).topk(k).indices
    kept = torch.zeros_like(scores).scatter(1, chosen, 1.0) * (scores + mixed_bias * bias)
    return scaling * kept / kept.sum(-1, keepdim=True)


assert check_2(choose_then_mix)
assert not check_2(lambda *arguments: choose_then_mix(*arguments, mixed_bias=1))  # the accident described above

# %% [markdown]
# **3.** `greedy(model, prompt, n)`: the n likeliest tokens, one after the other. Read the prompt once, then one
# token a call: `out = model(ids, cache=cache)` gives `out.logits` [1, t, vocab] and `out.cache`.


# %% tags=["exercise"]
def greedy(model: KimiLinearForCausalLM, prompt: list[int], n: int) -> list[int]:
    raise NotImplementedError


check_3(greedy)


# %% tags=["answer"] jupyter={"source_hidden": true}
def one_by_one(model: KimiLinearForCausalLM, prompt: list[int], n: int) -> list[int]:
    ids, cache, tokens = torch.tensor([prompt]), None, []
    for _ in range(n):
        out = model(ids, cache=cache)
        cache = out.cache
        tokens.append(out.logits[0, -1].argmax().item())
        ids = torch.tensor([tokens[-1:]])
    return tokens


def all_again(model: KimiLinearForCausalLM, prompt: list[int], n: int) -> list[int]:
    tokens = []
    for _ in range(n):
        tokens.append(model(torch.tensor([prompt + tokens])).logits[0, -1].argmax().item())
    return tokens


assert check_3(one_by_one)
assert not check_3(all_again)
