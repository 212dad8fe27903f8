# %% [markdown]
# # 4. Kimi Delta Attention, step by step
#
# **The question.** A state that is added to drowns (notebook 1), one that is corrected keeps too much (2), one that
# fades fades everywhere (3, and one gate a channel repairs that). Kimi Delta Attention (KDA) puts the repairs into
# one step. In which order? What does each line do to the state, and can the whole thing blow up?
#
# At the end you can read the definition line by line, predict what a step does to a state you see, and say which
# write strengths are safe, and what happens when one is not.

# %%
import inspect

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import normalize

from kimi_linear.reference import FrontEnd, SoftplusGate, l2norm
from kimi_linear.reference.naive import kda_step, recurrent_kda
from tools import checker, expect, expect_close, show

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## The definition
#
# This is the code that every other tier of this repository is measured against. Letters: `b` batch items, `h` heads,
# `k` and `v` channels of a key and of a value.

# %%
print(inspect.getsource(kda_step))

# %% [markdown]
# Five lines, four of them mathematics. For one head, with $a_t = \exp g_t$ (a decay for each of the $K$ channels):
#
# | | line | what it does |
# |---|---|---|
# | 1 | $S \leftarrow \mathrm{Diag}(a_t)\, S$ | **fade**: row $c$ of the state is multiplied by $a_{t,c}$ |
# | 2 | $u_t = \beta_t\,(v_t - S^\top k_t)$ | **compare** with the *faded* state, scale by the strength |
# | 3 | $S \leftarrow S + k_t u_t^\top$ | **correct**: write the difference at the key |
# | 4 | $o_t = \text{scale} \cdot S^\top q_t$ | **read** the *updated* state: a token sees what it has just written |
#
# The report ([arXiv:2510.26692](https://arxiv.org/abs/2510.26692), Eq. 1) writes lines 1 to 3 as one:
#
# $$ S_t = \left(I - \beta_t k_t k_t^\top\right) \mathrm{Diag}(a_t)\, S_{t-1} + \beta_t k_t v_t^\top . $$
#
# Put line 1 into 2 and 2 into 3 and you have it. The machine can check that too:

# %%
T, K, V = 30, 8, 8
q, k = (normalize(torch.randn(T, K).double(), dim=-1) for _ in range(2))
v, g, beta = torch.randn(T, V).double(), -torch.rand(T, K).double(), torch.rand(T).double()
scale = K**-0.5


def equation_1(S, q_t, k_t, v_t, g_t, beta_t):
    transition = (torch.eye(len(k_t)).to(k_t) - beta_t * torch.outer(k_t, k_t)) @ torch.diag(torch.exp(g_t))
    S = transition @ S + beta_t * torch.outer(k_t, v_t)
    return scale * S.T @ q_t, S


S, outputs = torch.zeros(K, V).double(), []
for t in range(T):
    o_t, S = equation_1(S, q[t], k[t], v[t], g[t], beta[t])
    outputs.append(o_t)
o, last = recurrent_kda(*(x[None, :, None] for x in (q, k, v, g, beta)), output_final_state=True)
print("Eq. 1 against recurrent_kda:", (torch.stack(outputs) - o[0, :, 0]).abs().max().item())
assert torch.allclose(torch.stack(outputs), o[0, :, 0])
assert torch.allclose(S, last[0, 0])

# %% [markdown]
# ## One step, seen
#
# A state of 8 x 8 with a pattern in it, and one token. Its key points at channels 2 and 3, (0.8, 0.6), which has
# length 1. Its value is a ramp. The decays go from 1 at the top to 0.3 at the bottom, and $\beta = 1$.

# %%
rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
S_old = torch.cos(0.9 * (rows - columns)).double()
k_t = torch.tensor([0, 0, 0.8, 0.6, 0, 0, 0, 0]).double()
v_t = torch.linspace(-1, 1, 8).double()
a_t, beta_t = torch.linspace(1, 0.3, 8).double(), 1.0

faded = a_t[:, None] * S_old
pred = faded.T @ k_t
erased = -beta_t * torch.outer(k_t, pred)
written = beta_t * torch.outer(k_t, v_t)
S_new = faded + erased + written

inputs = k_t, k_t, v_t, a_t.log()
_, want = kda_step(S_old[None, None], *(x[None, None] for x in inputs), torch.ones(1, 1).double(), 1.0)
assert torch.allclose(S_new, want[0, 0])
assert torch.allclose(S_new.T @ k_t, v_t)  # beta = 1: the answer to this key is now exactly the value

# %%
panels = {
    "S before": S_old,
    "1: faded": faded,
    "2, 3: erased": erased,
    "2, 3: written": written,
    "S after": S_new,
}
figure, axes = plt.subplots(1, 5, figsize=(11, 2.9), sharey=True)
for panel, (title, matrix) in zip(axes, panels.items(), strict=True):
    image = panel.imshow(matrix, vmin=-1.2, vmax=1.2, cmap="RdBu_r")
    panel.set(title=title, xlabel="value channel")
    panel.grid(False)
axes[0].set_ylabel("key channel")
figure.colorbar(image, ax=axes, label="entry of the matrix", shrink=0.7)
show(
    figure,
    "fading dims the lower rows; erasing and writing touch the two rows that the key points at, and no other. In "
    "those rows the old pattern is *not* gone altogether: only its part along the key was replaced.",
)

# %% [markdown]
# The last point deserves a number. Rows 2 and 3 span two directions, the key $(0.8, 0.6)$ and the one perpendicular
# to it, $(-0.6, 0.8)$. The answer to the second is what it was after fading:

# %%
across = torch.tensor([0, 0, -0.6, 0.8, 0, 0, 0, 0]).double()
print("perpendicular direction, change by the write:", (S_new.T @ across - faded.T @ across).abs().max().item())
assert torch.allclose(S_new.T @ across, faded.T @ across)

# %% [markdown]
# ## Does the order matter?
#
# Three plausible mistakes: compare with the state *before* it faded; fade *after* writing; read *before* writing.
# Each looks reasonable, and nothing crashes. None is KDA.


# %%
def run(order):
    """KDA with its lines in some order; 'predict' asks the state of that moment."""
    S, outputs = torch.zeros(K, V).double(), []
    for t in range(T):
        for line in order:
            if line == "fade":
                S = torch.exp(g[t])[:, None] * S
            elif line == "predict":
                pred = S.T @ k[t]
            elif line == "write":
                S = S + beta[t] * torch.outer(k[t], v[t] - pred)
            elif line == "read":
                outputs.append(scale * S.T @ q[t])
    return torch.stack(outputs)


# %%
orders = {
    "as defined": ("fade", "predict", "write", "read"),
    "predict before fading": ("predict", "fade", "write", "read"),
    "fade after writing": ("predict", "write", "fade", "read"),
    "read before writing": ("fade", "predict", "read", "write"),
}
off = {name: ((run(order) - o[0, :, 0]).norm() / o.norm()).item() for name, order in orders.items()}
for name, error in off.items():
    print(f"{name:24} off by {error:.2f} (relative to the outputs)")
assert off.pop("as defined") < 1e-12
assert min(off.values()) > 0.05

# %% [markdown]
# ## What each term is for
#
# Take terms away, feed 600 random tokens, and watch how large the state grows. (Norm: root of the sum of squares.)


# %%
def norms(forget, correct, T=600, K=16, V=16):
    torch.manual_seed(3)
    S, sizes = torch.zeros(K, V), []
    for _ in range(T):
        k_t, v_t, decay = normalize(torch.randn(K), dim=0), torch.randn(V), torch.rand(K) ** 0.02
        S = decay[:, None] * S if forget else S
        pred = S.T @ k_t if correct else torch.zeros(V)
        S = S + torch.outer(k_t, v_t - pred)
        sizes.append(S.norm().item())
    return sizes


terms = {
    "add only (linear attention)": (False, False),
    "with decay": (True, False),
    "with correction (DeltaNet)": (False, True),
    "with both (KDA)": (True, True),
}
sizes = {name: norms(*which) for name, which in terms.items()}

# %%
figure, axes = plt.subplots()
for name, values in sizes.items():
    axes.plot(values, label=name)
axes.set(xlabel="tokens", ylabel="norm of the state", ylim=(0, None))
axes.legend(fontsize=9)
show(
    figure,
    "what only adds grows without end, like the square root of the number of tokens. A decay stops the growth, and "
    "so does the correction, at a lower level: it never writes what is there already.",
)
assert sizes["add only (linear attention)"][-1] > 1.6 * sizes["add only (linear attention)"][149]
assert max(sizes["with both (KDA)"]) < max(sizes["with decay"])

# %% [markdown]
# ## Can it blow up? Eigenvalues of a step
#
# Without its input, a step multiplies the state by the **transition** $M = (I - \beta k k^\top)\,
# \mathrm{Diag}(a)$. If an eigenvalue of $M$ is larger than 1 in size, something in the state can grow with every
# token. Take $a = 1$ first. Then $k$ itself is an eigenvector, $M k = (1 - \beta\, k^\top k)\, k$, and everything
# perpendicular to $k$ has eigenvalue 1.
#
# So for unit keys the one interesting eigenvalue is $1 - \beta$. A sigmoid gives $\beta \in (0, 1)$, which keeps it
# positive. Nothing forbids $\beta$ up to 2, where it reaches $-1$; variants of the model use $2 \cdot
# \text{sigmoid}$. Here is the whole spectrum, with decays between 0.5 and 1:


# %%
def transition(k, a, beta):
    return (torch.eye(len(k)).to(k) - beta * torch.outer(k, k)) @ torch.diag(a)


torch.manual_seed(0)
k_t, a_t = normalize(torch.randn(8).double(), dim=0), torch.linspace(0.5, 1, 8).double()
betas = torch.linspace(0, 3, 121).double()
spectra = torch.stack([torch.linalg.eigvals(transition(k_t, a_t, beta)) for beta in betas])
print("largest imaginary part of any eigenvalue:", spectra.imag.abs().max().item())
assert spectra.imag.abs().max() < 1e-12
spectra = spectra.real.sort(-1).values
safe = betas <= 2
assert spectra[safe].abs().max() <= 1 + 1e-12
assert spectra[~safe].abs().max() > 1

# %%
figure, axes = plt.subplots()
axes.plot(betas, spectra, color="tab:blue", linewidth=1)
axes.plot(betas, spectra[:, 0], color="tab:red", label="smallest eigenvalue")
axes.plot(betas, 1 - betas, "k:", label="1 - beta (no decay)")
axes.axhspan(-1, 1, color="tab:green", alpha=0.08, label="nothing grows")
axes.axvline(2, color="grey", linewidth=0.8)
axes.set(xlabel="write strength beta", ylabel="eigenvalues of the transition", ylim=(-2.1, 1.2))
axes.legend(fontsize=9, loc="lower left")
show(
    figure,
    "of eight eigenvalues one moves: it is zero at beta = 1 and negative from there. Without decay it leaves the "
    "safe band at beta = 2, with decay later. All are real, although the transition is not a symmetric matrix.",
)

# %% [markdown]
# Real, because $M$ has the same eigenvalues as the symmetric matrix $\mathrm{Diag}(a)^{1/2}\,(I - \beta k
# k^\top)\,\mathrm{Diag}(a)^{1/2}$; and inside $[-1, 1]$, because each of its factors has norm at most 1 as long as
# $0 \le \beta\, k^\top k \le 2$. There is the *second* condition: it is $\beta\, k^\top k$ that counts. That is why
# KDA normalises its keys. Without that, a key of length 2 turns $\beta = 1$ into $1 - 4 = -3$:

# %%
same_token = {"length 1": 1.0, "length 1.4": 1.4, "length 2": 2.0}
for name, length in same_token.items():
    S = torch.ones(8, 1).double()
    for _ in range(20):
        S = transition(length * k_t, torch.ones(8).double(), 1.0) @ S
    print(f"keys of {name:11} norm of the state after 20 equal tokens: {S.norm():.3g}")
    assert (S.norm() > 1000) == (length == 2.0)

# %% [markdown]
# ## What negative eigenvalues are good for
#
# With $\beta = 2$ a write of $v = 0$ does not erase the answer but *flips its sign*: $(1 - 2) = -1$. A memory whose
# eigenvalues are all positive can fade and overwrite, never flip. Flipping can count: **parity**. Read a sequence
# of bits, say at each point whether the number of ones so far is odd. One channel, the state starts at 1; $\beta =
# 2$ on a one, $\beta = 0$ on a zero:

# %%
T = 300
bits = torch.randint(2, (T,)).double()
one = torch.ones(1, T, 1, 1).double()
start = torch.ones(1, 1, 1, 1).double()
answers = {}
for name, strength in (("beta = 2", 2.0), ("beta = 1", 1.0)):
    beta = (strength * bits)[None, :, None]
    o, _ = recurrent_kda(one, one, 0 * one, 0 * one, beta, scale=1.0, initial_state=start)
    answers[name] = o[0, :, 0, 0]
odd = bits.cumsum(0) % 2 == 1
for name, answer in answers.items():
    print(f"{name}: parity right at {((answer < 0) == odd).double().mean():.0%} of {T} tokens")
assert ((answers["beta = 2"] < 0) == odd).all()
assert ((answers["beta = 1"] < 0) == odd).double().mean() < 0.7

# %% [markdown]
# Three hundred tokens, no error, one number of state. (That linear recurrences need negative eigenvalues for parity
# is shown in [arXiv:2411.12537](https://arxiv.org/abs/2411.12537).) In this repository
# `FrontEnd(beta="double_sigmoid")` gives the range $(0, 2)$, and the checks of `kimi_linear.conformance` include
# such inputs.
#
# ## From raw projections: the front end
#
# The step takes unit keys, log decays and strengths. A layer computes raw numbers. What stands between is the
# **front end**: $q$ and $k$ to unit length, a gate function (notebook 3), a sigmoid.

# %%
B, T, H, K, V = 1, 20, 2, 8, 6
raw_q, raw_k, raw_g = torch.randn(3, B, T, H, K).double()
raw_v, raw_beta = torch.randn(B, T, H, V).double(), torch.randn(B, T, H).double()
gate = SoftplusGate(A_log=torch.zeros(H).double(), dt_bias=torch.zeros(H, K).double())
o, _ = recurrent_kda(raw_q, raw_k, raw_v, raw_g, raw_beta, front_end=FrontEnd(gate=gate))
by_hand, _ = recurrent_kda(l2norm(raw_q), l2norm(raw_k), raw_v, gate(raw_g), torch.sigmoid(raw_beta))
print("front end inside or outside:", (o - by_hand).abs().max().item())
assert torch.allclose(o, by_hand)

# %% [markdown]
# ## What it cost
#
# Multiplications with the state, per token and head: fading $KV$, predicting $KV$, writing $KV$, reading $KV$.
# Nothing in it depends on how many tokens came before. For the released model of 48 billion parameters (32 heads,
# $K = V = 128$):

# %%
heads, K, V = 32, 128, 128
state = torch.zeros(heads, K, V)
print(f"state of one layer: {state.nbytes / 2**20:.0f} MiB in fp32, at any length")
print(f"multiplications a token and layer: {4 * heads * K * V / 1e6:.1f} million")
kept = heads * (K + V) * 2  # bytes a token, if the same heads were softmax attention with a bf16 cache
print(f"a softmax layer of the same heads has filled as much after {state.nbytes / kept:.0f} tokens")
assert state.nbytes == 4 * heads * K * V

# %% [markdown]
# The catch: token $t$ needs the state of token $t - 1$. A million tokens are a million steps, each too small to
# fill a processor. Notebook 5 turns 64 steps into a few matrix products.
#
# ## Exercises


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_1(step):
    S, want = torch.randn(6, 4).double(), None
    q, k, g = torch.randn(6).double(), normalize(torch.randn(6).double(), dim=0), -torch.rand(6).double()
    v, beta = torch.randn(4).double(), torch.tensor(0.7).double()
    o, want = kda_step(S[None, None], *(x[None, None] for x in (q, k, v, g, beta)), 0.5)
    result = step(S, q, k, v, g, beta, 0.5)
    expect(isinstance(result, tuple) and len(result) == 2, "step must return o_t, S")
    expect_close(result[1], want[0, 0], "S")
    expect_close(result[0], o[0, 0], "o_t")


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_2(largest_beta):
    for length in (1.0, 0.5, 3.0):
        k = length * normalize(torch.randn(6).double(), dim=0)
        beta = float(largest_beta(k))
        for factor, grows in ((0.999, False), (1.001, True)):
            spectrum = torch.linalg.eigvals(transition(k, torch.ones(6).double(), factor * beta)).abs()
            too_large = bool(spectrum.max() > 1 + 1e-9)
            expect(too_large == grows, f"length {length}: beta = {beta:.3f} is too {'small' if grows else 'large'}")


@checker
def check_3(two_keys):
    for turn in (0.3, 1.0, 2.5):
        a, b = two_keys(turn)
        M = transition(b, torch.ones(2).double(), 2.0) @ transition(a, torch.ones(2).double(), 2.0)
        c, s = torch.cos(torch.tensor(turn).double()), torch.sin(torch.tensor(turn).double())
        expect_close(M, torch.stack([torch.stack([c, -s]), torch.stack([s, c])]), f"the turn by {turn}")


# %% [markdown]
# **Exercise 1.** Without looking up: one step of KDA for one head. `S` is [K, V], `q`, `k` and `g` are [K], `v` is
# [V].


# %% tags=["exercise"]
def step(S, q, k, v, g, beta, scale):
    raise NotImplementedError  # return o_t, S


check_1(step)


# %% tags=["answer"] jupyter={"source_hidden": true}
def step_answer(S, q, k, v, g, beta, scale):
    S = torch.exp(g)[:, None] * S
    S = S + torch.outer(k, beta * (v - S.T @ k))
    return scale * S.T @ q, S


def step_slip(S, q, k, v, g, beta, scale):  # predicts from the state before it faded
    S = torch.exp(g)[:, None] * S + torch.outer(k, beta * (v - S.T @ k))
    return scale * S.T @ q, S


assert check_1(step_answer)
assert not check_1(step_slip)

# %% [markdown]
# **Exercise 2.** Without decay, which is the largest write strength for which no eigenvalue is larger than 1 in
# size, for a key `k` of any length?


# %% tags=["exercise"]
def largest_beta(k):
    raise NotImplementedError


check_2(largest_beta)


# %% tags=["answer"] jupyter={"source_hidden": true}
def largest_beta_answer(k):
    return 2 / (k @ k)


assert check_2(largest_beta_answer)
assert not check_2(lambda k: 2 / k.norm())  # the key enters twice: squared

# %% [markdown]
# **Exercise 3.** Two reflections make a rotation. Find two unit keys `a`, `b` in the plane (fp64, shape [2]) so
# that a step with `a` and then one with `b`, both with $\beta = 2$ and $v = 0$, turn the state by the angle `turn`
# against the clock: $\begin{pmatrix} \cos & -\sin \\ \sin & \cos \end{pmatrix}$. (With a rotation a state can count
# modulo anything.)


# %% tags=["exercise"]
def two_keys(turn):
    raise NotImplementedError  # return a, b


check_3(two_keys)


# %% tags=["answer"] jupyter={"source_hidden": true}
def two_keys_answer(turn):
    half = torch.tensor(turn / 2).double()  # the rotation is by twice the angle between the keys
    return torch.tensor([1.0, 0.0]).double(), torch.stack([torch.cos(half), torch.sin(half)])


assert check_3(two_keys_answer)
assert not check_3(lambda turn: two_keys_answer(2 * turn))  # turns twice too far
