# %% [markdown]
# # 1. From softmax attention to a state
#
# **The question.** A transformer that writes token 4097 reads 4096 old keys and values again, and did so for token
# 4096, and for 4095. Could it keep something of *fixed size* instead, and throw the old tokens away?
#
# You need attention and PyTorch. At the end you will have written attention as a recurrence with a **state**,
# measured what that saves, and seen what it loses. What it loses is the reason for all other notebooks.

# %%
import time

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import elu, normalize, scaled_dot_product_attention

from kimi_linear.reference.naive import recurrent_kda
from tools import checker, expect, expect_close, show

torch.manual_seed(0)
torch.set_num_threads(1)  # so that the times below are those of one core

# %% [markdown]
# ## Attention remembers by keeping everything
#
# One head. Token $t$ has a query $q_t$, a key $k_t$ (both of $K$ channels) and a value $v_t$ ($V$ channels). Causal
# softmax attention answers with a weighted mean of all values so far:
#
# $$ o_t = \sum_{i \le t} \frac{\exp(q_t^\top k_i / \sqrt K)}{\sum_{j \le t} \exp(q_t^\top k_j / \sqrt K)}\, v_i . $$
#
# The exponential takes $q_t$ and $k_i$ *together*. So when $q_t$ arrives, every $k_i$ has to be there: the
# **cache** of keys and values, which grows by $K + V$ numbers a token.


# %%
def causal(scores):
    """Zero above the diagonal: a token does not read what comes after it."""
    return scores.tril()


def softmax_weights(q, k):
    scores = causal(torch.exp(q @ k.T / q.shape[-1] ** 0.5))
    return scores / scores.sum(-1, keepdim=True)


def library_attention(q, k, v):
    return scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], is_causal=True)[0, 0]


T, K, V = 64, 16, 8
q, k, v = torch.randn(T, K).double(), torch.randn(T, K).double(), torch.randn(T, V).double()
o = softmax_weights(q, k) @ v
want = library_attention(q, k, v)
print("largest difference from PyTorch's own attention:", (o - want).abs().max().item())
assert torch.allclose(o, want)

# %% [markdown]
# ## The smallest idea: a product that comes apart
#
# Replace $\exp(q^\top k)$ by something that *factorises*: a **feature map** $\phi$ applied to each side alone,
# $\phi(q)^\top \phi(k)$. Katharopoulos et al. ([arXiv:2006.16236](https://arxiv.org/abs/2006.16236)) took $\phi(x)
# = \mathrm{elu}(x) + 1$, which is positive everywhere, so that the weights stay a mean. Now $\phi(q_t)$ can be
# pulled out of the sum:
#
# $$ o_t = \frac{\sum_{i \le t} v_i\, \phi(k_i)^\top \phi(q_t)}{\sum_{i \le t} \phi(k_i)^\top \phi(q_t)}
#        = \frac{S_t^\top \phi(q_t)}{z_t^\top \phi(q_t)}, \qquad
#    S_t = S_{t-1} + \phi(k_t)\, v_t^\top, \qquad z_t = z_{t-1} + \phi(k_t). $$
#
# $S$ is a $K \times V$ matrix, the **state**; $z$ is the sum of the weights. Everything that the past may ever say
# to the future is in these $KV + K$ numbers. This is **linear attention**.


# %%
def phi(x):
    return elu(x) + 1


def linear_weights(q, k):
    """All tokens at once: the [T, T] form, as in softmax attention."""
    scores = causal(phi(q) @ phi(k).T)
    return scores / scores.sum(-1, keepdim=True)


def linear_attention(q, k, v):
    """Token by token: nothing of the past is kept but S and z."""
    S, z, outputs = q.new_zeros(q.shape[-1], v.shape[-1]), q.new_zeros(q.shape[-1]), []
    for q_t, k_t, v_t in zip(phi(q), phi(k), v, strict=True):
        S = S + torch.outer(k_t, v_t)
        z = z + k_t
        outputs.append(S.T @ q_t / (z @ q_t))
    return torch.stack(outputs)


# %% [markdown]
# The claim is that these two are *the same function*, not that one approximates the other. In double precision they
# must agree to about fifteen digits:

# %%
all_at_once = linear_weights(q, k) @ v
one_by_one = linear_attention(q, k, v)
print("largest difference:", (all_at_once - one_by_one).abs().max().item())
assert torch.allclose(all_at_once, one_by_one, rtol=1e-12, atol=1e-12)

# %% [markdown]
# That is why linear attention **needs no cache**: addition does not need to know what was added before. Be precise
# about what has been shown, though. The recurrence equals the [T, T] form *of linear attention*. Neither equals
# softmax attention, and we shall see how much that matters.
#
# ## What it saves
#
# First the memory that a sequence has to keep between two tokens: real tensors, their bytes counted.

# %%
K = V = 64
lengths = [256, 512, 1024, 2048, 4096]


def kept_by_softmax(T):
    cache = torch.zeros(T, K), torch.zeros(T, V)
    return sum(x.nbytes for x in cache)


def kept_by_linear_attention(T):
    state = torch.zeros(K, V), torch.zeros(K)
    return sum(x.nbytes for x in state)


for T in lengths:
    print(
        f"T = {T:4}: cache {kept_by_softmax(T) / 1024:6.0f} KiB, state {kept_by_linear_attention(T) / 1024:6.2f} KiB"
    )
assert kept_by_softmax(4096) == 16 * kept_by_softmax(256)
assert kept_by_linear_attention(4096) == kept_by_linear_attention(256)

# %% [markdown]
# Then time, in two situations. *Writing*: one new token, after $T$ old ones. *Reading*: a prompt of $T$ tokens. The
# Python loop above would be an unfair way to read a prompt, so here is one that works on 64 tokens at a time:
# inside a block the [64, 64] form, between blocks the state. (Notebook 5 does this to KDA, where it is much less
# obvious.) Softmax attention is PyTorch's own, fused one.


# %%
def linear_attention_in_blocks(q, k, v, block=64):
    S, z, outputs = torch.zeros(K, V), torch.zeros(K), []
    for q_b, k_b, v_b in zip(phi(q).split(block), phi(k).split(block), v.split(block), strict=True):
        scores = causal(q_b @ k_b.T)
        total = scores.sum(-1) + q_b @ z
        outputs.append((q_b @ S + scores @ v_b) / total[:, None])
        S = S + k_b.T @ v_b
        z = z + k_b.sum(0)
    return torch.cat(outputs)


q, k, v = torch.randn(4096, K), torch.randn(4096, K), torch.randn(4096, V)
short = slice(0, 300)  # no multiple of 64
blocks, loop = (
    linear_attention_in_blocks(q[short], k[short], v[short]),
    linear_attention(q[short], k[short], v[short]),
)
print("blocks against the loop:", (blocks - loop).abs().max().item())
assert torch.allclose(blocks, loop, rtol=1e-4, atol=1e-5)


# %%
def softmax_write(T):
    weights = torch.softmax(k[:T] @ q[0] / K**0.5, 0)
    return weights @ v[:T]


state_before, z_before = torch.ones(K, V), torch.ones(K)


def linear_write(T):
    q_t, k_t = phi(q[0]), phi(k[0])
    S, z = state_before + torch.outer(k_t, v[0]), z_before + k_t
    return S.T @ q_t / (z @ q_t)


# %%
def best_time(f, *arguments, repeats=5):
    """Seconds of the fastest of some runs: the one that was disturbed least."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f(*arguments)
        times.append(time.perf_counter() - start)
    return min(times)


# %%
write = {"softmax": [], "linear": []}
read = {"softmax": [], "linear": []}
for T in lengths:
    prompt = q[:T], k[:T], v[:T]
    write["softmax"].append(best_time(softmax_write, T, repeats=30) * 1e6)
    write["linear"].append(best_time(linear_write, T, repeats=30) * 1e6)
    read["softmax"].append(best_time(library_attention, *prompt) * 1e3)
    read["linear"].append(best_time(linear_attention_in_blocks, *prompt) * 1e3)
for name, times in (("write one token, us", write), ("read a prompt, ms", read)):
    for kind, values in times.items():
        print(f"{name:20} {kind:8}", *(f"{value:8.1f}" for value in values))

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(10.5, 3.4))
left.plot(lengths, [kept_by_softmax(T) / 1024 for T in lengths], "o-", label="softmax: cache")
left.plot(lengths, [kept_by_linear_attention(T) / 1024 for T in lengths], "s-", label="linear: state")
for axes, times in ((middle, write), (right, read)):
    axes.plot(lengths, times["softmax"], "o-", label="softmax")
    axes.plot(lengths, times["linear"], "s-", label="linear")
left.set(title="kept between tokens", ylabel="KiB a head (fp32)")
middle.set(title="writing one token", ylabel="time (microseconds)")
right.set(title="reading a prompt", ylabel="time (milliseconds)")
for axes in (left, middle, right):
    axes.set(xlabel="tokens so far, T", xscale="log", yscale="log", xticks=lengths, xticklabels=lengths)
    axes.minorticks_off()
    axes.legend(fontsize=8)
middle.set(yscale="linear", ylim=(0, None))
show(
    figure,
    "twice the tokens double the cache and leave the state as it is; to read a prompt, softmax attention comes to "
    "pay four times as much, linear attention twice. For few tokens the state is no bargain.",
)

# %% [markdown]
# ## What it loses
#
# Attention is a memory: *what value came with this key?* Ask exactly that. Store $T$ pairs of random unit keys and
# random values, then query with each stored key, and look at where the weight goes. A useful memory puts it on the
# diagonal: on the pair that was asked for. To let both memories be as sharp as they can, softmax gets its scores
# scaled by 40, and ELU + 1 its queries and keys by 100.

# %%
T, K = 32, 64
k = normalize(torch.randn(T, K), dim=-1)
sharp = torch.softmax(40 * k @ k.T, -1)
flat = phi(100 * k) @ phi(100 * k).T
flat = flat / flat.sum(-1, keepdim=True)
print(f"weight on the right pair: softmax {sharp.diagonal().mean():.3f}, ELU + 1 {flat.diagonal().mean():.3f}")
print(f"weight if all {T} pairs got the same: {1 / T:.3f}")
assert sharp.diagonal().mean() > 0.99
assert flat.diagonal().mean() < 4 / T

for scale in (1, 10, 100, 1000):
    weights = phi(scale * k) @ phi(scale * k).T
    wrong = (weights.sum() - weights.trace()) / (T * (T - 1)) / weights.diagonal().mean()
    print(f"ELU + 1, queries and keys times {scale:4}: a wrong pair weighs {wrong:.2f} of the right one")
    assert wrong > 0.25  # for random directions it cannot go below 1 / pi by more than chance

# %%
figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.6), sharey=True)
for panel, weights, title in ((axes[0], sharp, "softmax"), (axes[1], flat, "linear, ELU + 1")):
    image = panel.imshow(weights, vmin=0, vmax=1, cmap="viridis")
    panel.set(title=title, xlabel="stored pair i")
    panel.grid(False)
axes[0].set_ylabel("query for pair j")
figure.colorbar(image, ax=axes, label="weight (each row sums to 1)")
show(
    figure,
    "on the left each query finds its own pair. On the right the diagonal is hardly there: a wrong pair gets a third "
    "of the right one's weight, and there are 31 wrong ones, so that the answer is a mean over all that was stored.",
)

# %% [markdown]
# The reason is in the feature map. Features of $\mathrm{elu} + 1$ are all positive, so any two of them have a large
# product: everything is similar to everything. Making them longer helps only so far, as the list shows. A signed
# map, the plainest being $\phi(x) = x$ on unit keys and no division, has no such trouble. But then the *size* of
# the state shows. Let us count how often the memory answers with the right value, as more pairs are stored. "Right"
# means: of all stored values, the one closest to the answer (by cosine) is the one asked for.


# %%
def recall(answers, v):
    """The share of answers whose nearest stored value, by cosine, is their own."""
    nearest = (normalize(answers, dim=-1) @ normalize(v, dim=-1).T).argmax(-1)
    return (nearest == torch.arange(len(v))).double().mean().item()


def elu_memory(k, v):
    features = phi(100 * k)
    S, z = features.T @ v, features.sum(0)
    return features @ S / (features @ z)[:, None]


memories = {
    "softmax, whole cache": lambda k, v: torch.softmax(40 * k @ k.T, -1) @ v,
    "linear, ELU + 1": elu_memory,
    "linear, phi(x) = x": lambda k, v: k @ (k.T @ v),
}

# %%
pairs = [2, 4, 8, 16, 32, 64, 128, 256]
rates = {name: [] for name in memories}
for T in pairs:
    trials = [(normalize(torch.randn(T, K), dim=-1), torch.randn(T, V)) for _ in range(8)]
    for name, memory in memories.items():
        rates[name].append(sum(recall(memory(k, v), v) for k, v in trials) / len(trials))
figure, axes = plt.subplots()
for (name, values), mark in zip(rates.items(), "os^", strict=True):
    axes.plot(pairs, values, mark + "-", label=name)
axes.set(xscale="log", xticks=pairs, xticklabels=pairs, xlabel="pairs stored", ylabel="recalled correctly (share)")
axes.minorticks_off()
axes.legend()
show(
    figure,
    "softmax with its cache forgets nothing. ELU + 1 is lost after a few dozen pairs although its state could hold "
    "more: the signed map, with a state of the same size, holds on far longer. No fixed state holds on for ever.",
)

# %%
by_name = {name: dict(zip(pairs, values, strict=True)) for name, values in rates.items()}
for name, values in by_name.items():
    print(f"{name:22}", *(f"{T}: {values[T]:.2f}  " for T in pairs))
assert by_name["softmax, whole cache"][256] > 0.99
assert by_name["linear, ELU + 1"][64] < by_name["linear, phi(x) = x"][64] - 0.2
assert by_name["linear, phi(x) = x"][256] < by_name["linear, phi(x) = x"][16]

# %% [markdown]
# ## A common mix-up
#
# Many articles explain Kimi Linear with exactly the ELU + 1 formula above. It is not what the model does. Kimi
# Delta Attention ([arXiv:2510.26692](https://arxiv.org/abs/2510.26692), Eq. 1) has *no feature map and no
# division*: queries and keys are scaled to unit length and stay signed, and its state is not a plain sum. Two
# things tell them apart from outside. A mean of values can never leave the range of the values, and features that
# are all positive cannot answer *minus* to the opposite question:

# %%
T, K, V = 12, 16, 8
q, k, v = torch.randn(T, K).double(), normalize(torch.randn(T, K).double(), dim=-1), torch.randn(T, V).double()


def kda_outputs(q, k, v):
    no_decay, full_strength = torch.zeros(1, T, 1, K).double(), torch.ones(1, T, 1).double()
    o, _ = recurrent_kda(*(x[None, :, None] for x in (q, k, v)), no_decay, full_strength, scale=1.0)
    return o[0, :, 0]


for name, attend in (("linear attention, ELU + 1", linear_attention), ("KDA", kda_outputs)):
    o, o_negated = attend(q, k, v), attend(-q, k, v)
    outside = ((o < v.amin(0)) | (o > v.amax(0))).sum().item()
    print(
        f"{name}: answers to -q are -answers: {torch.allclose(o_negated, -o)}; outside the values' range: {outside}"
    )

# %%
assert torch.allclose(kda_outputs(-q, k, v), -kda_outputs(q, k, v))
assert not torch.allclose(linear_attention(-q, k, v), -linear_attention(q, k, v))
assert ((linear_attention(q, k, v) >= v.amin(0)) & (linear_attention(q, k, v) <= v.amax(0))).all()

# %% [markdown]
# ## What it cost
#
# | | softmax attention | linear attention |
# |---|---|---|
# | kept between tokens | $T (K + V)$ numbers | $KV + K$ numbers |
# | to write one token | $O(T)$ | $O(1)$ |
# | to read a prompt | $O(T^2)$ | $O(T)$ |
# | pairs it can recall | all of them | as many as its size allows; with ELU + 1 far fewer |
#
# The state cannot grow. So it matters *what is written into it* (notebook 2: the delta rule) and *what is let go*
# (notebook 3: gates). Kimi Linear is the answer that does both.
#
# ## Exercises
#
# Each has a checker. Below each is a folded cell with an answer, and with a slip that the checker finds.


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_1(step):
    q, k, v = torch.randn(9, 5).double(), torch.randn(9, 5).double(), torch.randn(9, 3).double()
    S, z, want = torch.zeros(5, 3).double(), torch.zeros(5).double(), linear_weights(q, k) @ v
    for t in range(9):
        result = step(S, z, q[t], k[t], v[t])
        expect(isinstance(result, tuple) and len(result) == 3, "step must return o_t, S, z")
        o_t, S, z = result
        expect_close(o_t, want[t], f"o of token {t}")


@checker
def check_2(break_even):
    for K, V in ((64, 64), (128, 128), (16, 8), (1, 1)):
        T = break_even(K, V)
        expect(T * (K + V) > K * V + K, f"K = {K}, V = {V}: at T = {T} the cache is not larger yet")
        expect((T - 1) * (K + V) <= K * V + K, f"K = {K}, V = {V}: the cache was larger before T = {T}")


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_3(square_map):
    q, k = torch.randn(6, 4).double(), torch.randn(7, 4).double()
    expect_close(square_map(q) @ square_map(k).T, (q @ k.T) ** 2, "phi(q)^T phi(k)")


# %% [markdown]
# **Exercise 1.** Write one step of linear attention with ELU + 1: given the state and one token, return the output
# and the new state. This is what a server runs for each token it writes.


# %% tags=["exercise"]
def step(S, z, q_t, k_t, v_t):
    raise NotImplementedError  # return o_t, S, z


check_1(step)


# %% tags=["answer"] jupyter={"source_hidden": true}
def step_answer(S, z, q_t, k_t, v_t):
    S = S + torch.outer(phi(k_t), v_t)
    z = z + phi(k_t)
    return S.T @ phi(q_t) / (z @ phi(q_t)), S, z


def step_slip(S, z, q_t, k_t, v_t):  # reads before it writes: the token does not see itself
    o_t = S.T @ phi(q_t) / (z @ phi(q_t) + 1e-9)
    return o_t, S + torch.outer(phi(k_t), v_t), z + phi(k_t)


assert check_1(step_answer)
assert not check_1(step_slip)

# %% [markdown]
# **Exercise 2.** From how many tokens on is the cache of softmax attention larger than the state (with $z$) of linear
# attention? Return the smallest such $T$, a whole number, for any $K$ and $V$.


# %% tags=["exercise"]
def break_even(K, V):
    raise NotImplementedError


check_2(break_even)


# %% tags=["answer"] jupyter={"source_hidden": true}
def break_even_answer(K, V):
    return (K * V + K) // (K + V) + 1


assert check_2(break_even_answer)
assert not check_2(lambda K, V: K * V // (K + V))  # forgets z, and stops where both are equal

# %% [markdown]
# **Exercise 3.** Softmax is sharp because $\exp$ grows fast. Find a feature map whose product is *sharper* than the
# plain one: $\phi(q)^\top \phi(k) = (q^\top k)^2$ exactly. `square_map` takes [T, K] and returns [T, as many
# features as you need]. (How large is the state then? This is the price of sharpness.)


# %% tags=["exercise"]
def square_map(x):
    raise NotImplementedError


check_3(square_map)


# %% tags=["answer"] jupyter={"source_hidden": true}
def square_map_answer(x):
    return (x[:, :, None] * x[:, None, :]).flatten(1)  # all products of two channels: K^2 features


assert check_3(square_map_answer)
assert not check_3(lambda x: x**2)  # squares alone leave out the products of different channels
