# %% [markdown]
# # 3. Forgetting: one gate for each channel
#
# **The question.** The delta rule (notebook 2) replaces what a key says when *that key* comes again. Most things
# never come again. They stay in the state, where they disturb every answer. Who throws them out, and when?
#
# At the end you will know what a gate is, why Kimi Delta Attention has one for each channel where its ancestors had
# one for each head, how the two gate functions in use differ, and why a model with such layers needs no position
# encoding.

# %%
import math

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import normalize

from kimi_linear.reference import BoundedGate, SoftplusGate
from kimi_linear.reference.naive import recurrent_kda
from tools import checker, expect, expect_close, show

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## A gate is a logarithm
#
# Before a token writes, the state is multiplied by a **decay** $a_t \in [0, 1]$. It is stored as its natural
# logarithm, the **gate** $g_t = \ln a_t \le 0$. Logarithms are handy: the decay over many tokens is $\exp$ of a
# *sum* of gates. And they have a meaning that one can feel, the **half-life**: after how many tokens is half of
# what was written gone?
#
# $$ \exp(n\, g) = \tfrac12 \quad\Longleftrightarrow\quad n_{1/2} = \frac{\ln 2}{-g} . $$


# %%
def half_life(g):
    """Tokens until half is left."""
    return math.log(2) / -g


for decay in (0.5, 0.9, 0.99, 0.999):
    g = math.log(decay)
    print(f"decay {decay}: gate {g:.5f}, half-life {half_life(g):6.1f} tokens")
    assert math.isclose(math.exp(g * half_life(g)), 0.5)

# %% [markdown]
# ## The idea that is not enough: one decay for all
#
# Gated DeltaNet ([arXiv:2412.06464](https://arxiv.org/abs/2412.06464)) computes one $a_t$ for each token and head.
# All of the head's state fades together. Let us give such a head two jobs. First it hears 8 **facts**, to be kept.
# Then come 200 tokens of **chatter**, of which only the newest matters. Facts use the first 8 channels of the key,
# chatter the other 8. For the moment we write by adding, so that nothing but the gate can forget.


# %%
def write_all(k, v, g):
    """Decay, then add, token by token: the last state. g is [K], the same for every token."""
    S = torch.zeros(k.shape[1], v.shape[1])
    for k_t, v_t in zip(k, v, strict=True):
        S = torch.exp(g)[:, None] * S + torch.outer(k_t, v_t)
    return S


def job(facts=8, chatter=200):
    k = torch.zeros(facts + chatter, 16)
    k[:facts, :8] = torch.eye(8)
    k[facts:, 8:] = normalize(torch.randn(chatter, 8), dim=-1)
    return k, torch.randn(facts + chatter, 8)


def errors(k, v, g):
    """How far answers are from the right values, relative to their size: for the facts, for the last chatter."""
    off = k @ write_all(k, v, g) - v
    return [(off[rows].norm() / v[rows].norm()).item() for rows in (slice(0, 8), slice(-1, None))]


# %%
half_lives = torch.logspace(-1, 4, 16)
jobs = [job() for _ in range(6)]


def mean_errors(g):
    return torch.tensor([errors(k, v, g) for k, v in jobs]).mean(0)


one_gate = torch.stack([mean_errors(torch.full((16,), -math.log(2) / n)) for n in half_lives.tolist()])
two_gates = torch.cat([torch.zeros(8), torch.full((8,), -math.log(2) / 0.2)])
separate = mean_errors(two_gates)
best = one_gate.max(1).values.argmin()
print(f"compromise, half-life {half_lives[best]:.0f}: facts {one_gate[best, 0]:.2f}, chatter {one_gate[best, 1]:.2f}")
print(f"a gate for each channel: facts {separate[0]:.2f}, chatter {separate[1]:.2f}")
assert separate.max() < 0.1 < 0.5 < one_gate.max(1).values.min()

# %%
figure, axes = plt.subplots()
axes.plot(half_lives, one_gate[:, 0], "o-", label="facts, one gate")
axes.plot(half_lives, one_gate[:, 1], "s-", label="chatter, one gate")
axes.axhline(separate.max(), color="tab:green", label="the worse of both, a gate for each channel")
axes.set(xscale="log", xlabel="half-life (tokens)", ylabel="error of the answers\n(relative to the values)")
axes.legend(fontsize=9)
show(
    figure,
    "one gate can serve the facts (right end) or the chatter (left end); wherever it stands, one job is badly done. "
    "With a gate for each channel both errors are nearly zero, in a state of the same size.",
)

# %% [markdown]
# That is the step from Gated DeltaNet to **Kimi Delta Attention** (KDA,
# [arXiv:2510.26692](https://arxiv.org/abs/2510.26692)): $g_t$ becomes a vector of $K$ numbers, and channel $c$ of
# the key, row $c$ of the state, fades at its own speed. Together with the delta rule this is Eq. 1 of the report,
# and all of `recurrent_kda`:
#
# $$ S \leftarrow \mathrm{Diag}(\exp g_t)\, S, \qquad u_t = \beta_t\,(v_t - S^\top k_t), \qquad
#    S \leftarrow S + k_t u_t^\top, \qquad o_t = \text{scale} \cdot S^\top q_t . $$
#
# If all channels of a head are given the same gate, Gated DeltaNet comes out:

# %%
T, K, V = 24, 16, 8
q, k = (normalize(torch.randn(1, T, 1, K).double(), dim=-1) for _ in range(2))
v, beta = torch.randn(1, T, 1, V).double(), torch.rand(1, T, 1).double()
scalar_gate = -torch.rand(1, T, 1, 1).double()
o, _ = recurrent_kda(q, k, v, scalar_gate.expand(1, T, 1, K), beta, scale=1.0)

S, outputs = torch.zeros(K, V).double(), []
for t in range(T):
    S = torch.exp(scalar_gate[0, t, 0, 0]) * S
    u = beta[0, t, 0] * (v[0, t, 0] - S.T @ k[0, t, 0])
    S = S + torch.outer(k[0, t, 0], u)
    outputs.append(S.T @ q[0, t, 0])
print("KDA with equal gates against Gated DeltaNet:", (torch.stack(outputs) - o[0, :, 0]).abs().max().item())
assert torch.allclose(torch.stack(outputs), o[0, :, 0])

# %% [markdown]
# ## What a half-life looks like
#
# Write into all channels once, then let 200 tokens pass that write nothing ($\beta = 0$). Sixteen channels, with
# half-lives from 1 to 1000 tokens:

# %%
T, K = 200, 16
half_lives = torch.logspace(0, 3, K).double()
g = (-math.log(2) / half_lives).expand(1, T, 1, K)
silent = torch.zeros(1, T, 1, K).double()
states, S = [], torch.ones(1, 1, K, 1).double()
for t in range(T):
    one = slice(t, t + 1)
    q = k = silent[:, one]
    _, S = recurrent_kda(q, k, k[..., :1], g[:, one], k[..., 0], initial_state=S, output_final_state=True)
    states.append(S[0, 0, :, 0])
states = torch.stack(states, dim=1)
assert torch.allclose(states, 0.5 ** (torch.arange(1, T + 1) / half_lives[:, None]))

# %%
figure, axes = plt.subplots(figsize=(8, 3.4))
image = axes.imshow(states, aspect="auto", vmin=0, vmax=1, extent=(0.5, T + 0.5, K - 0.5, -0.5))
axes.contour(torch.arange(1, T + 1), torch.arange(K), states, levels=[0.5], colors="white")
labels = range(0, K, 3)
axes.set_yticks(labels, [f"{half_lives[c]:.0f}" for c in labels])
axes.set(xlabel="tokens since the write", ylabel="channel, by its half-life\n(tokens)")
axes.grid(False)
figure.colorbar(image, label="what is left of the write (share)")
show(
    figure,
    "one write, and sixteen ways to forget it. The white line is where half is left. The head holds the last few "
    "words and the beginning of the page at the same time.",
)

# %% [markdown]
# ## A picture that may surprise: many exponentials make a long tail
#
# A single decay forgets *exponentially*: after ten half-lives a thousandth is left. What does a query read that
# looks at 64 channels with half-lives from 1 to 100 000 tokens? Give channel $c$ the weight $q_c k_c \propto -g_c$
# and look at what token $t$ receives from a token that lies $n$ tokens back, $\sum_c q_c k_c \exp(n g_c)$:

# %%
lives = torch.logspace(0, 5, 64).double()
g = -math.log(2) / lives
weight = -g / (-g).sum()
n = torch.logspace(0, 4, 60).double().round().unique()
many = (weight * torch.exp(n[:, None] * g)).sum(-1)
single = torch.exp(-n * math.log(2) / 10)
slope = torch.diff(many.log()) / torch.diff(n.log())
middle = (n[1:] > 10) & (n[1:] < 1e4)
print(f"slope between 10 and 10 000 tokens: {slope[middle].min():.2f} .. {slope[middle].max():.2f} (1/n would be -1)")
assert ((slope[middle] > -1.2) & (slope[middle] < -0.8)).all()

# %%
figure, axes = plt.subplots()
axes.plot(n, many / many[0], "o-", markersize=3, label="64 channels, each with its own gate")
axes.plot(n, single / single[0], "s-", markersize=3, label="one gate, half-life 10")
axes.plot(n, 1 / n, "k:", label="1 / n")
axes.set(xscale="log", yscale="log", ylim=(1e-6, 2))
axes.set(xlabel="distance n (tokens back)", ylabel="influence (relative)")
axes.legend()
show(
    figure,
    "each channel forgets exponentially, yet the head as a whole forgets like 1 / n, over four orders of magnitude. "
    "A head with one gate falls off its cliff after a few dozen tokens.",
)

# %% [markdown]
# ## Where gates come from: two functions
#
# A linear layer computes a raw number $x$ for each token and channel; a function turns it into a gate $g \le 0$.
# Released models use two, with learned parameters `A_log` (one a head) and `dt_bias` (one a channel):
#
# $$ \text{softplus:}\quad g = -e^{A}\, \ln(1 + e^{x + b}), \qquad\qquad
#    \text{bounded:}\quad g = -5\, \sigma\!\left(e^{A} (x + b)\right), $$
#
# with $A$ for `A_log`, $b$ for `dt_bias` and $\sigma$ the sigmoid. Kimi-Linear-48B has the first, Kimi K3 the second.

# %%
x = torch.linspace(-12, 12, 481).double()
A_logs = (-1.0, 0.0, 1.0)


def gate_values(kind, A_log):
    gate = kind(A_log=torch.tensor([A_log]).double(), dt_bias=torch.zeros(1, 1).double())
    return gate(x[None, :, None, None])[0, :, 0, 0]


# %%
figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), sharex=True, sharey="row")
for column, kind in enumerate((SoftplusGate, BoundedGate)):
    for A_log in A_logs:
        g = gate_values(kind, A_log)
        axes[0, column].plot(x, g, label=f"A_log = {A_log:.0f}")
        axes[1, column].plot(x, half_life(g))
    axes[0, column].set(title=kind.__name__, ylim=(-12, 0.5))
    axes[1, column].set(xlabel="raw number x (dt_bias = 0)", yscale="log")
axes[0, 0].set_ylabel("gate g (natural log)")
axes[1, 0].set_ylabel("half-life (tokens)")
axes[0, 0].legend()
show(
    figure,
    "A_log moves the softplus gate up and down, as a rate: all half-lives change by one factor. In the bounded gate "
    "it sets the steepness instead, and g never falls below -5. The one is no clamp of the other.",
)

# %%
softplus, bounded = gate_values(SoftplusGate, 0.0), gate_values(BoundedGate, 0.0)
assert torch.allclose(gate_values(SoftplusGate, 1.0), math.e * softplus)  # A_log is a rate ...
assert not torch.allclose(gate_values(BoundedGate, 1.0), math.e * bounded)  # ... and here it is none
assert bounded.min() > -5 > softplus.min()
assert not torch.allclose(bounded, softplus.clamp(min=-5), atol=1.0)
print(f"most that one token can forget: softplus keeps {softplus.exp().min():.1e}, bounded {bounded.exp().min():.1e}")
smallest = torch.finfo(torch.float32).tiny
print(f"16 bounded gates together keep at least {math.exp(-5 * 16):.1e}; fp32 goes down to {smallest:.1e}")
assert math.exp(-5 * 16) > smallest
print(f"x = -12: half-lives {half_life(softplus[0]):.0f} (softplus) and {half_life(bounded[0]):.0f} tokens (bounded)")

# %% [markdown]
# Why bound a gate? A chunk of 16 tokens then decays by no less than $e^{-80}$, which fp32 can still hold, and fast
# kernels may use simpler arithmetic. What happens without a bound, and how to do without one, is the story of
# notebook 6.
#
# ## Decay as position
#
# Shuffle the past of a softmax attention layer that has no position encoding: the answer does not change, for it is
# a sum over a *set*. That is why transformers need RoPE or the like. And KDA?


# %%
def softmax_last(q, k, v, g, beta):
    return torch.softmax(k @ q[-1], 0) @ v


def kda_last(q, k, v, g, beta):
    o, _ = recurrent_kda(*(y[None, :, None] for y in (q, k, v, g, beta)), scale=1.0)
    return o[0, -1, 0]


# %%
T, K, V = 12, 8, 4
q, k = (normalize(torch.randn(T, K).double(), dim=-1) for _ in range(2))
v, beta = torch.randn(T, V).double(), torch.ones(T).double()
past = torch.cat([torch.randperm(T - 1), torch.tensor([T - 1])])  # the last token stays where it is
changes = {}
no_decay, gates = torch.zeros(T, K).double(), -torch.rand(T, K).double()
layers = {
    "softmax, no positions": (softmax_last, no_decay),
    "delta rule, no decay": (kda_last, no_decay),
    "KDA": (kda_last, gates),
}
for name, (attend, g) in layers.items():
    original, shuffled = attend(q, k, v, g, beta), attend(q, k[past], v[past], g[past], beta[past])
    changes[name] = (shuffled - original).norm().item() / original.norm().item()
    print(f"{name:22} answer changes by {changes[name]:.1e} (relative) when the past is shuffled")

# %%
assert changes["softmax, no positions"] < 1e-12
assert min(changes["delta rule, no decay"], changes["KDA"]) > 0.01

# %% [markdown]
# So KDA knows about order, and its gates measure *distance*: with constant gates the influence of a token that lies
# $n$ back is $\sum_c q_c k_c e^{n g_c}$, whatever the two positions are. Kimi Linear has three KDA layers for each
# layer of full attention (**MLA**, multi-head latent attention), and gives its MLA layers *no position encoding at
# all*. They need none: what reaches them has passed layers that mark order. Softmax without positions, on top of a
# KDA layer:

# %%
g = gates
Wq, Wk, Wv = torch.randn(3, K, K).double()


def kda_layer(x):
    q, k, v = normalize(x @ Wq, dim=-1), normalize(x @ Wk, dim=-1), normalize(x @ Wv, dim=-1)
    o, _ = recurrent_kda(*(y[None, :, None] for y in (q, k, v, g, beta)), scale=1.0)
    return normalize(x + o[0, :, 0], dim=-1)  # with a residual connection


def mla_like(x):
    return torch.softmax(4 * x @ x[-1], 0) @ x  # the last token asks, without positions


x = normalize(torch.randn(T, K).double(), dim=-1)
alone = (mla_like(x[past]) - mla_like(x)).norm() / mla_like(x).norm()
on_top = (mla_like(kda_layer(x[past])) - mla_like(kda_layer(x))).norm() / mla_like(kda_layer(x)).norm()
print(f"softmax layer alone: {alone:.1e}; on top of a KDA layer: {on_top:.2f}")
assert alone < 1e-12
assert on_top > 0.01

# %% [markdown]
# This shows that order *can* be told from what the KDA layers pass on. How well a trained model tells it is a
# question for a trained model.
#
# ## What it cost
#
# | | Gated DeltaNet | KDA |
# |---|---|---|
# | gates a token and head | 1 | $K$ |
# | multiplications to apply them | $KV$ | $KV$ |
# | decay between two tokens | one number, a factor of $q^\top k$ | $K$ numbers, *inside* $q^\top k$ |
#
# The last line is what makes KDA harder to compute fast. A scalar can be multiplied on after the matrix product of
# queries and keys. Here each channel has its own, and notebooks 5 and 6 are about doing it with matrix products all
# the same.
#
# ## Exercises


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_1(gate_for):
    for tokens in (0.5, 1.0, 100.0):
        g = gate_for(tokens)
        expect(g < 0, f"a gate is a logarithm of a decay below 1, so negative; got {g}")
        expect(math.isclose(half_life(g), tokens, rel_tol=1e-6), f"half-life {half_life(g):.3f}, wanted {tokens}")


@checker
def check_2(raw_for):
    for tokens, A_log in ((1.0, 0.0), (100.0, 1.0), (0.1, 2.0)):
        x = torch.full((1, 1, 1, 1), float(raw_for(tokens, A_log))).double()
        gate = SoftplusGate(A_log=torch.tensor([A_log]).double(), dt_bias=torch.zeros(1, 1).double())
        got = half_life(gate(x).item())
        expect(math.isclose(got, tokens, rel_tol=1e-6), f"A_log {A_log}: half-life {got:.4f}, wanted {tokens}")


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_3(reset):
    first = torch.tensor([True, False, False, True, False, True])
    q, k = (normalize(torch.randn(1, 6, 1, 4).double(), dim=-1) for _ in range(2))
    v, beta, g = torch.randn(1, 6, 1, 3).double(), torch.ones(1, 6, 1).double(), -torch.rand(1, 6, 1, 4).double()
    new_g = reset(g, first)
    expect(not new_g.isnan().any(), "there is a NaN among the gates")
    o, _ = recurrent_kda(q, k, v, new_g, beta)
    parts = [slice(0, 3), slice(3, 5), slice(5, 6)]
    want = [recurrent_kda(q[:, p], k[:, p], v[:, p], g[:, p], beta[:, p])[0] for p in parts]
    expect_close(o, torch.cat(want, 1), "the output of three documents in a row")


# %% [markdown]
# **Exercise 1.** Which gate gives a half-life of `tokens` tokens?


# %% tags=["exercise"]
def gate_for(tokens):
    raise NotImplementedError


check_1(gate_for)


# %% tags=["answer"] jupyter={"source_hidden": true}
def gate_for_answer(tokens):
    return -math.log(2) / tokens


assert check_1(gate_for_answer)
assert not check_1(lambda tokens: 0.5 ** (1 / tokens))  # that is the decay; the gate is its logarithm

# %% [markdown]
# **Exercise 2.** A new layer is to start with chosen half-lives. Which raw number $x$ makes the softplus gate (with
# `dt_bias` 0) give a half-life of `tokens`, for a given `A_log`? Solve $g = -e^A \ln(1 + e^x)$ for $x$.


# %% tags=["exercise"]
def raw_for(tokens, A_log):
    raise NotImplementedError


check_2(raw_for)


# %% tags=["answer"] jupyter={"source_hidden": true}
def raw_for_answer(tokens, A_log):
    return math.log(math.expm1(math.log(2) / tokens / math.exp(A_log)))


assert check_2(raw_for_answer)
assert not check_2(lambda tokens, A_log: math.log(math.log(2) / tokens) - A_log)  # right for long half-lives only

# %% [markdown]
# **Exercise 3.** Three documents stand in one row of tokens. Change the gates so that nothing passes from one to
# the next: `g` is [1, T, 1, K], `first` is [T] and true where a document begins. (A decay of exactly 0 is allowed:
# its gate is `-math.inf`.)


# %% tags=["exercise"]
def reset(g, first):
    raise NotImplementedError  # return the new gates


check_3(reset)


# %% tags=["answer"] jupyter={"source_hidden": true}
def reset_answer(g, first):
    return torch.where(first[None, :, None, None], -math.inf, g)


assert check_3(reset_answer)
assert not check_3(lambda g, first: g + -math.inf * first[None, :, None, None])  # inf * 0 is NaN
