# %% [markdown]
# # 5. Chunks: many tokens at once
#
# **The question.** A step of KDA is tiny, and token $t$ waits for token $t - 1$. A processor that could do a million
# multiplications at once does a few thousand and waits. Softmax attention reads a prompt with two large matrix
# products. How can the delta rule, where each write depends on all writes before it, be done with matrix products?
#
# At the end you will have derived the **chunk form** in six stages, the ones that every fast KDA kernel computes,
# checked each of them *exactly*, and seen why a chunk has 64 tokens and not all of them.

# %%
import time

import matplotlib.pyplot as plt
import torch
from torch.nn.functional import normalize
from torch.utils.flop_counter import FlopCounterMode

from kimi_linear.reference.chunked import chunk_kda, chunk_stages
from kimi_linear.reference.naive import kda_scan, recurrent_kda
from tools import checker, expect, expect_close, show

# %%
torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## The derivation
#
# Cut the tokens into chunks of $C$. Let $S$ be the state at a chunk's start, count its tokens $i = 1 .. C$, and let
# $G_i = g_1 + \dots + g_i$ be the **cumulative gate**, a vector of $K$ numbers. What is the state after token $i$?
# We do not know the writes $u_j$ yet, but we know what becomes of them: written at $k_j$, then faded by the gates
# after $j$:
#
# $$ S_i = \mathrm{Diag}(e^{G_i})\, S + \sum_{j \le i} \mathrm{Diag}(e^{G_i - G_j})\, k_j u_j^\top . \tag{a} $$
#
# This is the **WY form**: the product of many transitions, written as a sum with one term a token. Now the write of
# token $i$ itself. It is $\beta_i (v_i - \text{prediction})$, and the prediction comes from (a) without the term $j
# = i$:
#
# $$ u_i = \beta_i v_i - \beta_i\, S^\top (e^{G_i} \odot k_i)
#        - \sum_{j < i} \underbrace{\beta_i \langle k_i,\, e^{G_i - G_j} \odot k_j \rangle}_{A_{ij}}\; u_j . $$
#
# Every $u_i$ needs the earlier ones, but *linearly*. With the writes as the rows of a matrix $U$ this is one
# triangular system, $(I + A)\, U = \beta V - (\beta K \odot e^{G})\, S$, and so
#
# $$ U = \underbrace{T (\beta V)}_{u} - \underbrace{T (\beta K \odot e^G)}_{w}\, S,
#    \qquad T = (I + A)^{-1} . \tag{b} $$
#
# That is the **UT transform**. Look at what happened: $T$, $u$ and $w$ *do not contain $S$*. They can be computed
# for all chunks side by side. Only "minus $w S$" has to wait for the chunk before. In the report
# ([arXiv:2510.26692](https://arxiv.org/abs/2510.26692)) these are Eq. 2 to 7, and 8 and 9 give the next state and
# the output.
#
# | stage | result | |
# |---|---|---|
# | 1 | $G$ and the decays $e^{G_i}$, $e^{G_i - G_j}$, $e^{G_C - G_j}$ | |
# | 2 | $A_{ij} = \beta_i \langle k_i, e^{G_i - G_j} k_j \rangle$ for $j < i$ | [C, C] |
# | 2 | $Aqk_{ij} = \langle q_i, e^{G_i - G_j} k_j \rangle$ for $j \le i$ | [C, C] |
# | 3 | $T = (I + A)^{-1}$ | [C, C] |
# | 4 | $w = T (\beta k\, e^G)$, $\; u = T (\beta v)$ | [C, K], [C, V] |
# | 5 | $v_\text{new} = u - w S$, then $S \leftarrow e^{G_C} S + (k\, e^{G_C - G})^\top v_\text{new}$ | serial |
# | 6 | $o = (q\, e^G) S + Aqk\, v_\text{new}$ | |
#
# ($q$ stands for scale times $q$ from here on. $v_\text{new}$ is $U$, every token's write.)
#
# ## First exactly: integers modulo a prime
#
# An index that is off by one in such formulas can hide behind rounding. So let us first compute where there *is* no
# rounding: in integers modulo the prime $p = 65537$. The derivation used only sums, products, and $e^{x + y} = e^x
# e^y$; a power $3^x \bmod p$ has that property too. And the inverse of $I + A$ needs no division, for its diagonal
# is 1. If the chunk form is right, both sides agree to the last digit; if not, they are unrelated numbers.
#
# One code for both worlds: `exp` is either function, `fix` takes a result modulo $p$ or leaves it alone.

# %%
P = 65537
POWERS = torch.tensor([pow(3, x, P) for x in range(P - 1)])  # 3 ** x; exponents repeat after p - 1


def power(x):
    return POWERS[x % (P - 1)]


def modulo(x):
    return x % P


def keep(x):
    return x


x, y = torch.randint(10**6, (2, 5))
print(power(x + y).tolist(), modulo(power(x) * power(y)).tolist())
assert torch.equal(power(x + y), modulo(power(x) * power(y)))


# %%
def recurrence(q, k, v, g, beta, S, exp, fix):
    """The definition, token by token: notebook 4."""
    outputs = []
    for t in range(len(q)):
        S = fix(exp(g[t])[:, None] * S)
        u = fix(beta[t] * fix(v[t] - k[t] @ S))
        S = fix(S + torch.outer(k[t], u))
        outputs.append(fix(q[t] @ S))
    return torch.stack(outputs), S


# %% [markdown]
# Now the stages, each a function of a few lines. Stage 1 takes `exp` of $G_i - G_j$ in the lower triangle only:
# above it the difference is positive and the power may overflow (notebook 6 shows what follows).


# %%
def stage_1(g, exp):
    G = g.cumsum(0)
    rows, columns = torch.tril_indices(len(g), len(g))
    between = torch.zeros(len(g), *g.shape, dtype=g.dtype)
    between[rows, columns] = exp(G[rows] - G[columns])  # [C, C, K], lower triangle
    return exp(G), exp(G[-1] - G), between


def stage_2(q, k, beta, between, fix):
    A = fix(beta[:, None] * fix((fix(k[:, None] * between) * k[None]).sum(-1)))
    Aqk = fix((fix(q[:, None] * between) * k[None]).sum(-1))
    return A.tril(-1), Aqk.tril()


def stage_3(A, fix):
    """Forward substitution: row i of T is row i of I, minus what the rows above contribute."""
    T = torch.eye(len(A), dtype=A.dtype)
    for i in range(1, len(A)):
        T[i] = fix(T[i] - A[i, :i] @ T[:i])
    return T


# %%
def stage_4(T, k, v, beta, from_start, fix):
    w = fix(T @ fix(fix(beta[:, None] * k) * from_start))
    u = fix(T @ fix(beta[:, None] * v))
    return w, u


def stage_5(w, u, k, from_start, to_end, S, fix):
    v_new = fix(u - fix(w @ S))
    S = fix(fix(from_start[-1][:, None] * S) + fix(fix(k * to_end).T @ v_new))
    return v_new, S


def stage_6(q, Aqk, v_new, from_start, S, fix):
    return fix(fix(fix(q * from_start) @ S) + fix(Aqk @ v_new))


# %%
def one_chunk(q, k, v, g, beta, S, exp, fix):
    from_start, to_end, between = stage_1(g, exp)
    A, Aqk = stage_2(q, k, beta, between, fix)
    T = stage_3(A, fix)
    w, u = stage_4(T, k, v, beta, from_start, fix)
    v_new, S_next = stage_5(w, u, k, from_start, to_end, S, fix)
    o = stage_6(q, Aqk, v_new, from_start, S, fix)
    return o, S_next


def in_chunks(q, k, v, g, beta, S, exp, fix, C):
    outputs = []
    for start in range(0, len(q), C):
        chunk = (x[start : start + C] for x in (q, k, v, g, beta))
        o, S = one_chunk(*chunk, S, exp, fix)
        outputs.append(o)
    return torch.cat(outputs), S


# %%
tokens, K, V = 50, 5, 3
q, k = torch.randint(P, (2, tokens, K))
v, beta, S = torch.randint(P, (tokens, V)), torch.randint(P, (tokens,)), torch.randint(P, (K, V))
g = torch.randint(1000, (tokens, K))  # exponents of 3: "gates" of this world
residues = q, k, v, g, beta, S

o_want, S_want = recurrence(*residues, power, modulo)
for C in (1, 7, 16, 50):
    o, S_last = in_chunks(*residues, power, modulo, C)
    print(f"chunks of {C:2}: {int((o != o_want).sum())} of {o.numel()} outputs differ; last row {o[-1].tolist()}")
    assert torch.equal(o, o_want)
    assert torch.equal(S_last, S_want)

# %% [markdown]
# Not one differs, for chunks that divide 50 and chunks that do not. That is no proof, but if the formula were wrong
# anywhere, each of these 150 numbers would agree with a chance of 1 in 65537.
#
# ## Why bother? A bug that floats do not see
#
# Plant one: let $Aqk$ use the decay to the token *before*, $e^{G_{i-1} - G_j}$, an easy slip.
# With slow gates, such as trained models have on many channels, the wrong decay is nearly right:


# %%
def off_by_one(q, k, v, g, beta, S, exp, fix):
    from_start, to_end, between = stage_1(g, exp)
    A, Aqk = stage_2(q, k, beta, between, fix)
    late = torch.cat([between[:1], between[:-1]])  # rows of the token before
    wrong = stage_2(q, k, beta, late, fix)[1]
    Aqk = torch.where(torch.eye(len(q)).bool(), Aqk, wrong)
    w, u = stage_4(stage_3(A, fix), k, v, beta, from_start, fix)
    v_new, _ = stage_5(w, u, k, from_start, to_end, S, fix)
    return stage_6(q, Aqk, v_new, from_start, S, fix)


floats = [normalize(torch.randn(50, 5), dim=-1).double() for _ in range(2)]
floats += [torch.randn(50, 3).double(), -0.003 * torch.rand(50, 5).double(), torch.rand(50).double()]
floats += [torch.zeros(5, 3).double()]
want, _ = recurrence(*floats, torch.exp, keep)
float_error = ((off_by_one(*floats, torch.exp, keep) - want).norm() / want.norm()).item()
bf16_error = ((want.bfloat16().double() - want).norm() / want.norm()).item()
exact = off_by_one(*residues, power, modulo)
print(f"the bug in floats: off by {float_error:.4f}; rounding the right result to bf16: off by {bf16_error:.4f}")
print(f"the bug in integers: {int((exact != o_want).sum())} of {exact.numel()} outputs differ")

# %%
assert float_error < 2 * bf16_error
assert (exact != o_want).double().mean() > 0.9

# %% [markdown]
# A test that compares a bf16 kernel with some tolerance lets this bug through, until some channel learns a fast
# gate. The integers see it in all tokens but the first. `kimi_linear`'s own tests run the code of the package in
# this way.
#
# ## Then in floats, stage by stage
#
# The same functions with the real `exp`, against the package's `chunk_stages`, which keeps every intermediate by
# name. Its stage 1 avoids the subtraction $G_i - G_j$ altogether (notebook 6 says why); everything else is what you
# have just read.

# %%
C, K, V = 16, 8, 6
q, k = (normalize(torch.randn(C, K).double(), dim=-1) for _ in range(2))
v, beta = torch.randn(C, V).double(), torch.rand(C).double()
g, S = -torch.rand(C, K).double(), torch.randn(K, V).double()
batched = [x[None, :, None] for x in (q, k, v, g, beta)]
package = chunk_stages(*batched, scale=1.0, initial_state=S[None, None], chunk_size=C)

from_start, to_end, between = stage_1(g, torch.exp)
A, Aqk = stage_2(q, k, beta, between, keep)
T = stage_3(A, keep)
w, u = stage_4(T, k, v, beta, from_start, keep)
v_new, S_next = stage_5(w, u, k, from_start, to_end, S, keep)
o = stage_6(q, Aqk, v_new, from_start, S, keep)
for name, mine in {"A": A, "Aqk": Aqk, "T": T, "w": w, "u": u, "v_new": v_new, "o": o}.items():
    print(f"{name:6} {(mine - getattr(package, name)[0, 0]).abs().max():.1e}")
    assert torch.allclose(mine, getattr(package, name)[0, 0])
assert torch.allclose(S_next, package.final_state[0, 0])

# %% [markdown]
# ## What the stages look like
#
# Random keys make grey pictures. Take four perpendicular keys that come round and round, *a b c d a b c d ...*, with
# $\beta = 1$ and a decay of 0.95 a token: each key is overwritten every fourth token. What should token $i$ correct?

# %%
C, K = 16, 4
k = torch.eye(K).repeat(C // K, 1).double()
q, beta, g = k, torch.ones(C).double(), torch.full((C, K), 0.95).double().log()
from_start, to_end, between = stage_1(g, torch.exp)
A, Aqk = stage_2(q, k, beta, between, keep)
T = stage_3(A, keep)
panels = {
    "stage 1: decay j to i": between[:, :, 0],
    "stage 2: A": A,
    "stage 3: T": T,
    "stage 6: Aqk": Aqk,
    "Aqk T": Aqk @ T,
}

# %%
figure, axes = plt.subplots(1, 5, figsize=(11.5, 2.9), sharey=True)
for panel, (title, matrix) in zip(axes, panels.items(), strict=True):
    image = panel.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r")
    panel.set(title=title, xlabel="token j")
    panel.grid(False)
axes[0].set_ylabel("token i")
figure.colorbar(image, ax=axes, label="entry of the matrix", shrink=0.7)
show(
    figure,
    "A knows *all* earlier tokens with the same key, yet its inverse T has one stripe: a token corrects the latest "
    "write to its key, which has corrected all before. Aqk T leads from values to answers: only the newest is left.",
)

# %%
stripe = torch.full((C - 4,), -(0.95**4)).double()
assert torch.allclose(T, torch.eye(C).double() + torch.diag(stripe, -4))
assert torch.allclose(Aqk @ T, torch.eye(C).double(), atol=1e-12)
print("entries of A:", int((A != 0).sum()), " entries of T - I:", int(((T - torch.eye(C)).abs() > 1e-12).sum()))

# %% [markdown]
# ## Why $O(T\,C)$ and not $O(T^2)$
#
# Nothing forbids *one* chunk of all $T$ tokens; the formulas hold. But stages 2 and 3 build [C, C] matrices, so
# that one chunk pays for every pair of tokens, like softmax attention. Chunks of one token are the recurrence: the
# least work and the most waiting. PyTorch can count the multiplications of matrix products for us. Here are the
# package's stages, put together for any chunk length that is a power of two:


# %%
from kimi_linear.reference.chunked import (
    chunk_output,
    cumulative_gate,
    invert_unit_lower,
    key_products,
    query_products,
    state_pass,
    wy_vectors,
)


# %%
def package_stages(q, k, v, g, beta, C):
    """The six stages for one head from an empty state; q, k, g are [T, K], v is [T, V], beta is [T]."""
    q, k, v, g, beta = (x.unflatten(0, (-1, C))[None] for x in (q, k, v, g, beta[:, None]))  # [HV=1, N, C, ..]
    decays = cumulative_gate(g)  # stage 1
    A, Aqk = key_products(beta * k, k, decays), query_products(q, k, decays)  # stage 2
    T = invert_unit_lower(A)  # stage 3
    w, u = wy_vectors(T, beta * k, beta * v, decays)  # stage 4
    steps = [slice(n, n + 1) for n in range(q.shape[1])]
    empty = torch.zeros(1, 1, k.shape[-1], v.shape[-1])
    starts, v_new, _ = state_pass(w, u, k, decays, empty, steps)  # stage 5
    o_inter, o_intra = chunk_output(q, Aqk, starts, v_new, decays)  # stage 6
    return (o_inter + o_intra).flatten(0, 2)


def draw(tokens, K=64, V=64):
    q, k = (normalize(torch.randn(tokens, K), dim=-1) for _ in range(2))
    return q, k, torch.randn(tokens, V), -torch.rand(tokens, K), torch.rand(tokens)


# %%
def multiplications(f, *arguments):
    with FlopCounterMode(display=False) as counter:
        f(*arguments)
    return counter.get_total_flops() / 2


def token_by_token(q, k, v, g, beta):
    batched = (x[None, :, None] for x in (q, k, v, g, beta))
    return kda_scan(*batched, scale=1.0, S=torch.zeros(1, 1, 64, 64))[0][0, :, 0]


# %%
lengths = [64, 128, 256, 512]
counts = {"one chunk, C = T": [], "chunks, C = 64": [], "recurrence": []}
for tokens in lengths:
    inputs = draw(tokens)
    counts["one chunk, C = T"].append(multiplications(package_stages, *inputs, tokens))
    counts["chunks, C = 64"].append(multiplications(package_stages, *inputs, 64))
    counts["recurrence"].append(multiplications(token_by_token, *inputs))
results = token_by_token(*inputs), package_stages(*inputs, 64), package_stages(*inputs, 512)
assert torch.allclose(results[0], results[1], atol=1e-5)
assert torch.allclose(results[0], results[2], atol=1e-5)

# %%
sizes, work, serial, spent = [1, 4, 16, 64, 256, 512], [], [], []
for C in sizes:
    work.append(multiplications(package_stages, *inputs, C) / 512)
    serial.append(512 // C)
    start = time.perf_counter()
    package_stages(*inputs, C)
    spent.append((time.perf_counter() - start) * 1e6 / 512)
for C, m, n, us in zip(sizes, work, serial, spent, strict=True):
    print(f"C = {C:4}: {m:9.0f} multiplications a token, {n:4} serial steps, {us:6.1f} us a token here")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
for (name, values), mark in zip(counts.items(), "o^s", strict=True):
    left.plot(lengths, values, mark + "-", label=name)
left.set(xlabel="tokens T", ylabel="multiplications (one head)")
left.legend(fontsize=8)
right.plot(sizes, work, "o-", color="tab:blue")
right.set_ylabel("multiplications a token", color="tab:blue")
right.set_xlabel("tokens of a chunk, C (T = 512)")
for axes, ticks in ((left, lengths), (right, sizes)):
    axes.set(xscale="log", yscale="log", xticks=ticks, xticklabels=ticks)
    axes.minorticks_off()
times = right.twinx()
times.plot(sizes, spent, "s--", color="tab:red")
times.set(xlabel="C", ylim=(0, None))
times.set_ylabel("time a token (microseconds)", color="tab:red")
show(
    figure,
    "left, one chunk comes to cost four times as much and more for twice the tokens; chunks of 64 twice. Right, the "
    "smallest do the least work and still take long: many small steps. The best are in between.",
)

# %%
growth = {name: values[-1] / values[-2] for name, values in counts.items()}
print("twice the tokens cost", {name: f"{ratio:.2f} times" for name, ratio in growth.items()})
assert growth["chunks, C = 64"] < 2.01
assert growth["one chunk, C = T"] > 4
assert work == sorted(work)

# %% [markdown]
# Times are of this machine, once; the counts are the same everywhere. The usual choice on a GPU is $C = 64$: small
# enough for the [64, 64] matrices of stages 2 and 3 to stay close to the arithmetic units (notebook 8).
#
# ## And the whole thing
#
# `chunk_kda` does this for batches, heads, packed sequences and any length. In fp32 it is as good as the recurrence
# in fp32, both measured against fp64:

# %%
inputs = [x[None, :, None] for x in draw(1000)]
truth, _ = recurrent_kda(*(x.double() for x in inputs))
for name, op in (("recurrent_kda", recurrent_kda), ("chunk_kda", chunk_kda)):
    start = time.perf_counter()
    o, _ = op(*inputs)
    elapsed = time.perf_counter() - start
    error = ((o - truth).norm() / truth.norm()).item()
    print(f"{name:14} error {error:.1e} (relative, fp32 against fp64), {elapsed * 1e3:6.1f} ms for 1000 tokens")
    assert error < 1e-5

# %% [markdown]
# ## What it cost
#
# | | recurrence | chunk form |
# |---|---|---|
# | work | $O(T\,K V)$ | $O(T\,K V + T\,C\,(K + V + C))$ |
# | serial steps | $T$ | $T / C$ |
# | kind of work | outer products | matrix products |
# | memory on the way | one state | $A$, $Aqk$, $T$, $w$, $u$, and a state for each chunk |
#
# More arithmetic, less waiting. What can go wrong with the numbers in it is notebook 6; how a gradient comes back
# through it is 7; how a GPU kernel does it is 8.
#
# ## Exercises


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_1(inverse):
    A = torch.randint(P, (9, 9)).tril(-1)
    X = inverse(A.clone(), modulo)
    expect(isinstance(X, torch.Tensor) and X.shape == A.shape, "inverse must return a [C, C] tensor")
    expect(
        torch.equal(modulo(X @ (A + torch.eye(9, dtype=A.dtype))), torch.eye(9, dtype=A.dtype)), "X (I + A) is not I"
    )


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_2(state_after):
    k, g, writes, S = (
        torch.randn(7, 4).double(),
        -torch.rand(7, 4).double(),
        torch.randn(7, 3).double(),
        torch.randn(4, 3),
    )
    want = S = S.double()
    for t in range(7):
        want = torch.exp(g[t])[:, None] * want + torch.outer(k[t], writes[t])
    expect_close(state_after(S, k, g, writes), want, "the state after the chunk")


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_3(as_map):
    q, k, v, g, beta = (x.double() for x in draw(8, K=5, V=3))
    S = torch.randn(5, 3).double()
    want, unused = recurrence(q, k, v, g, beta, S, torch.exp, keep)[1], torch.zeros(5, 3).double()
    from_start, to_end, between = stage_1(g, torch.exp)
    T = stage_3(stage_2(q, k, beta, between, keep)[0], keep)
    w, u = stage_4(T, k, v, beta, from_start, keep)
    result = as_map(w, u, k, from_start, to_end)
    expect(isinstance(result, tuple) and len(result) == 2, "as_map must return M, N")
    expect_close(result[1], recurrence(q, k, v, g, beta, unused, torch.exp, keep)[1], "N")
    expect_close(result[0] @ S + result[1], want, "M S + N")


# %% [markdown]
# **Exercise 1.** Stage 3 without looking: $(I + A)^{-1}$ for a strictly lower triangular `A`, by forward
# substitution. `fix` takes a result modulo $p$.


# %% tags=["exercise"]
def inverse(A, fix):
    raise NotImplementedError


check_1(inverse)


# %% tags=["answer"] jupyter={"source_hidden": true}
def inverse_answer(A, fix):
    X = torch.eye(len(A), dtype=A.dtype)
    for i in range(1, len(A)):
        X[i] = fix(X[i] - A[i, :i] @ X[:i])
    return X


assert check_1(inverse_answer)
assert not check_1(lambda A, fix: fix(torch.eye(len(A), dtype=A.dtype) - A))  # the first two terms of a series

# %% [markdown]
# **Exercise 2.** Equation (a): given a chunk's start state, keys, gates and *writes* (rows $u_j$), compute the
# state at its end without a loop over tokens.


# %% tags=["exercise"]
def state_after(S, k, g, writes):
    raise NotImplementedError


check_2(state_after)


# %% tags=["answer"] jupyter={"source_hidden": true}
def state_after_answer(S, k, g, writes):
    G = g.cumsum(0)
    return torch.exp(G[-1])[:, None] * S + (k * torch.exp(G[-1] - G)).T @ writes


assert check_2(state_after_answer)
assert not check_2(lambda S, k, g, u: torch.exp(g.sum(0))[:, None] * S + k.T @ u)  # writes do not fade

# %% [markdown]
# **Exercise 3.** A whole chunk is an affine map of the state, $S_\text{next} = M S + N$. Find the [K, K] matrix $M$
# and the [K, V] matrix $N$ from the stages. (Two such maps in a row are one such map again: that is how chunks can
# be spread over several GPUs.)


# %% tags=["exercise"]
def as_map(w, u, k, from_start, to_end):
    raise NotImplementedError  # return M, N


check_3(as_map)


# %% tags=["answer"] jupyter={"source_hidden": true}
def as_map_answer(w, u, k, from_start, to_end):
    late_keys = (k * to_end).T
    return torch.diag(from_start[-1]) - late_keys @ w, late_keys @ u


def as_map_slip(w, u, k, from_start, to_end):  # forgets that the writes depend on S
    return torch.diag(from_start[-1]), (k * to_end).T @ u


assert check_3(as_map_answer)
assert not check_3(as_map_slip)
