# %% [markdown]
# # 2. The delta rule: writing is correcting
#
# **The question.** Somebody writes `x = 5`, and a page later `x = 7`. What does a memory answer when asked for `x`?
# Softmax attention has both in its cache and can learn to prefer the later one. A state of fixed size (notebook 1)
# has to decide *while it writes*.
#
# At the end you will know why adding is the wrong way to write, what DeltaNet
# ([arXiv:2406.06484](https://arxiv.org/abs/2406.06484)) does instead, and where that is a loss.

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy, elu, normalize

from kimi_linear.reference.naive import recurrent_kda
from tools import checker, expect_close, show

torch.manual_seed(0)
torch.set_num_threads(1)

# %% [markdown]
# ## The idea that fails: add
#
# The state $S$ is a $K \times V$ matrix, keys have unit length, and the memory's answer to a key is $S^\top k$.
# Linear attention writes by adding, $S \leftarrow S + k v^\top$ (notebook 1, with the plainest feature map $\phi(x)
# = x$).

# %%
K, V = 8, 1
x = normalize(torch.randn(K), dim=0)  # the key of "x"


def add(S, k, v):
    return S + torch.outer(k, v)


S = torch.zeros(K, V)
S = add(S, x, torch.tensor([5.0]))
print("after x = 5 the memory answers", round((S.T @ x).item(), 4))
S = add(S, x, torch.tensor([7.0]))
print("after x = 7 the memory answers", round((S.T @ x).item(), 4))
assert torch.allclose(S.T @ x, torch.tensor([12.0]))
cache, values = torch.stack([x, x]), torch.tensor([[5.0], [7.0]])
print("softmax attention over both answers", round((torch.softmax(cache @ x, 0) @ values).item(), 4))

# %% [markdown]
# Twelve. The sum of everything ever said about `x`. Softmax attention, which finds the same key twice in its cache,
# says 6: wrong as well, but no nonsense.
#
# ## The repair: write the difference
#
# Before writing, ask the memory what it would answer, and write only what is missing. The **prediction** is $S^\top
# k$, and $\beta \in [0, 1]$ is the **write strength**, in a model a number that each token computes for itself:
#
# $$ u = \beta\,(v - S^\top k), \qquad S \leftarrow S + k\, u^\top . $$


# %%
def delta_write(S, k, v, beta):
    pred = S.T @ k
    u = beta * (v - pred)
    return S + torch.outer(k, u)


S = torch.zeros(K, V)
for value in (5.0, 7.0, -2.0):
    S = delta_write(S, x, torch.tensor([value]), beta=1.0)
    print(f"after x = {value:4} the memory answers", round((S.T @ x).item(), 4))
assert torch.allclose(S.T @ x, torch.tensor([-2.0]), atol=1e-5)

# %% [markdown]
# With $\beta = 1$ and $k^\top k = 1$ the new answer is exactly $v$, whatever stood there: $S_\text{new}^\top k =
# S^\top k + u\,(k^\top k) = S^\top k + v - S^\top k = v$. With $\beta = 0$ nothing happens, and in between the
# answer moves a part of the way. What about all *other* keys $a$? Their answer changes by $(a^\top k)\,u$: not at
# all if $a \perp k$, and the more, the closer the two are. Both claims, on a state full of noise:

# %%
K, V = 16, 4
S = torch.randn(K, V).double()
k, other, v = normalize(torch.randn(K).double(), dim=0), torch.randn(K).double(), torch.randn(V).double()
perpendicular = other - k * (k @ other)
for beta in (0.0, 0.3, 1.0):
    new = delta_write(S, k, v, beta)
    assert torch.allclose(new.T @ k, (1 - beta) * S.T @ k + beta * v)
    assert torch.allclose(new.T @ perpendicular, S.T @ perpendicular)
    u = beta * (v - S.T @ k)
    assert torch.allclose(new.T @ other - S.T @ other, (other @ k) * u)
    moved = (new.T @ perpendicular - S.T @ perpendicular).norm()
    print(f"beta = {beta}: error at k {(new.T @ k - v).norm():.3f}, change at a perpendicular key {moved:.0e}")

# %% [markdown]
# ## It is learning, in the literal sense
#
# Take "how wrong is the memory at this key" as a loss, $\tfrac12 \lVert S^\top k - v \rVert^2$, and make one step
# of gradient descent on $S$ with learning rate $\beta$. That *is* the delta rule (Widrow and Hoff's, of 1960): a
# layer with this state trains a small linear model on its input as it reads. PyTorch's autograd can confirm it:

# %%
S = torch.randn(K, V).double().requires_grad_()
loss = 0.5 * (S.T @ k - v).square().sum()
(gradient,) = torch.autograd.grad(loss, S)
descended = S - 0.7 * gradient
print("delta rule against one gradient step:", (descended - delta_write(S, k, v, 0.7)).abs().max().item())
assert torch.allclose(descended, delta_write(S, k, v, 0.7))

# %% [markdown]
# It is also what this repository's definition of KDA does when nothing is forgotten. In `recurrent_kda` the
# argument `g` is the logarithm of a decay (notebook 3): zero means "keep everything", and what is left is DeltaNet.
# Shapes there are [B, T, H, K]: batch, tokens, heads, channels. Outputs are `scale` times $S^\top q$.


# %%
def deltanet(q, k, v, beta):
    """DeltaNet for [B, T, K] inputs, by the package's recurrence: all outputs, and the last state."""
    no_decay = torch.zeros_like(k)[:, :, None]
    arguments = q[:, :, None], k[:, :, None], v[:, :, None], no_decay, beta[:, :, None]
    o, S = recurrent_kda(*arguments, scale=1.0, output_final_state=True)
    return o[:, :, 0], S[:, 0]


T = 20
k, v = normalize(torch.randn(1, T, K).double(), dim=-1), torch.randn(1, T, V).double()
beta = torch.rand(1, T).double()
S = torch.zeros(K, V).double()
for t in range(T):
    S = delta_write(S, k[0, t], v[0, t], beta[0, t])
_, last_state = deltanet(k, k, v, beta)
print("our loop against the package:", (S - last_state[0]).abs().max().item())
assert torch.allclose(S, last_state[0])

# %% [markdown]
# ## Keys that are overwritten, again and again
#
# Sixteen keys in 32 channels. Two hundred times one of them, at random, gets a new random value. After every write
# we ask for *all* keys seen so far and measure how far the answers are from the latest values, relative to the
# values' size. Random directions are not perpendicular, so we try random keys and exactly perpendicular ones.


# %%
def overwriting_error(keys, write, writes=200, V=8):
    values, S, errors = torch.zeros(len(keys), V), torch.zeros(keys.shape[1], V), []
    seen = torch.zeros(len(keys), dtype=torch.bool)
    for _ in range(writes):
        i = torch.randint(len(keys), ()).item()
        values[i], seen[i] = torch.randn(V), True
        S = write(S, keys[i], values[i])
        errors.append(((keys @ S - values)[seen].norm() / values[seen].norm()).item())
    return errors


# %%
def correct(S, k, v):
    return delta_write(S, k, v, beta=1.0)


random_keys = normalize(torch.randn(16, 32), dim=-1)
perpendicular_keys = torch.linalg.qr(torch.randn(32, 16)).Q.T
curves = {
    "add, perpendicular keys": overwriting_error(perpendicular_keys, add),
    "delta rule, random keys": overwriting_error(random_keys, correct),
    "delta rule, perpendicular keys": overwriting_error(perpendicular_keys, correct),
}

# %%
figure, axes = plt.subplots()
for name, errors in curves.items():
    axes.plot(range(1, 201), errors, label=name)
    print(f"{name:32} after 20 writes {errors[19]:.3f}, after 200 {errors[-1]:.3f}")
writes = torch.arange(16, 201)
axes.plot(writes, (writes / 16 - 1).sqrt(), ":", color="tab:blue", label="add, expected: sqrt(writes / 16 - 1)")
axes.axhline(1, color="grey", linestyle=":")
axes.text(201, 1.03, "answering 0", color="grey", ha="right")
axes.set(xlabel="writes so far", ylabel="error of the answers\n(relative to the values)", ylim=(-0.1, None))
axes.legend()
show(
    figure,
    "what adds drowns, even with perfect keys: the leftovers of all earlier values pile up, as expected (dotted). "
    "The delta rule settles at an error that its keys' overlap sets, and at none where they do not overlap.",
)
assert curves["add, perpendicular keys"][-1] > 2
assert curves["delta rule, random keys"][-1] < 1
assert curves["delta rule, perpendicular keys"][-1] < 1e-5

# %% [markdown]
# ## A surprise: not better at everything
#
# Now the test of notebook 1: 256 *different* random keys in 64 channels, each written once. Far more pairs than the
# state has room for. How often is the right value recalled (is it the nearest of all stored), by the age of the pair?

# %%
K, V, T, trials = 64, 64, 256, 40
k, v = normalize(torch.randn(trials, T, K), dim=-1), torch.randn(trials, T, V)
_, S_delta = deltanet(k, k, v, torch.ones(trials, T))
S_add = k.transpose(1, 2) @ v
found = {}
for name, S in (("add", S_add), ("delta rule", S_delta)):
    answers = normalize(k @ S, dim=-1)
    nearest = (answers @ normalize(v, dim=-1).transpose(1, 2)).argmax(-1)
    found[name] = (nearest == torch.arange(T)).double().mean(0)
    print(
        f"{name:10} all {found[name].mean():.2f}, newest 32 {found[name][-32:].mean():.2f}, "
        f"oldest 32 {found[name][:32].mean():.2f}"
    )

# %%
figure, axes = plt.subplots()
for (name, share), mark in zip(found.items(), "os", strict=True):
    groups = share.unflatten(0, (16, 16)).mean(1)
    axes.plot(torch.arange(8, 256, 16), groups.flip(0), mark + "-", label=name)
axes.set(xlabel="age of the pair (writes ago, groups of 16)", ylabel="recalled correctly (share)", ylim=(-0.05, 1.05))
axes.legend()
show(
    figure,
    "adding treats all pairs alike, and all are equally blurred. The delta rule is right about what is new and has "
    "lost what is old: it spends the room of the state on the present. On average it recalls *less* here.",
)
assert found["delta rule"][-32:].mean() > found["add"][-32:].mean()
assert found["delta rule"][:32].mean() < found["add"][:32].mean()

# %% [markdown]
# So the delta rule is no free gain in capacity. It buys two things: answers that are *exact* where keys are apart,
# and a memory that stays useful when there is more to say than room to keep it.
#
# ## Trained, on associative recall
#
# Random keys are a poor model's keys. Let us train: 24 key symbols and 16 value symbols with learned vectors, a
# learned write strength, and a state of only $12 \times 12$. A sequence makes 32 writes to 10 of the keys, so that
# most of them are overwritten; then each key that was seen is asked for its *latest* value. (Key and value arrive
# in one token. In a real model a short convolution brings them together, notebook 9.) Three ways to write,
# everything else the same.


# %%
class Memory(nn.Module):
    def __init__(self, rule, keys=24, values=16, channels=12):
        super().__init__()
        self.rule = rule
        self.key, self.value = nn.Embedding(keys, channels), nn.Embedding(values, channels)
        self.strength, self.read = nn.Parameter(torch.zeros(())), nn.Linear(channels, values)

    def forward(self, keys, values, queries):
        k, q, v, beta = self.key(keys), self.key(queries), self.value(values), torch.sigmoid(self.strength)
        if self.rule == "add, ELU + 1":
            weights = (elu(3 * q) + 1) @ (elu(3 * k) + 1).transpose(1, 2)
            return self.read(weights @ v / weights.sum(-1, keepdim=True))
        k, q = normalize(k, dim=-1), normalize(q, dim=-1)
        if self.rule == "add":
            return self.read(q @ (k.transpose(1, 2) @ (beta * v)))
        return self.read(q @ deltanet(k, k, v, beta.expand(keys.shape))[1])


# %%
def draw(batch, writes=32, asked=10):
    """Writes to ten keys; for each of the ten its latest value, and how often it was written."""
    chosen = torch.rand(batch, 24).argsort(-1)[:, :asked]
    slot = torch.randint(asked, (batch, writes))
    slot[:, :asked] = torch.arange(asked)  # every key at least once
    slot = slot.gather(1, torch.rand(batch, writes).argsort(-1))
    values = torch.randint(16, (batch, writes))
    hits = slot[:, None, :] == torch.arange(asked)[None, :, None]
    last = (hits * torch.arange(1, writes + 1)).argmax(-1)
    return chosen.gather(1, slot), values, chosen, values.gather(1, last), hits.sum(-1)


# %%
def train(rule, steps=160):
    torch.manual_seed(1)
    model = Memory(rule)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(steps):
        keys, values, queries, target, _ = draw(48)
        loss = cross_entropy(model(keys, values, queries).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


# %%
models = {rule: train(rule) for rule in ("add, ELU + 1", "add", "delta rule")}
keys, values, queries, target, times = draw(1000)
shares = {}
with torch.no_grad():
    for rule, model in models.items():
        right = (model(keys, values, queries).argmax(-1) == target).double()
        shares[rule] = [right[times.clamp(max=6) == n].mean().item() for n in range(1, 7)]
        print(
            f"{rule:14} all {right.mean():.2f}, overwritten {right[times > 1].mean():.2f}; "
            f"beta {torch.sigmoid(model.strength):.2f}"
        )

# %%
figure, axes = plt.subplots()
for (rule, values_right), mark in zip(shares.items(), "^os", strict=True):
    axes.plot(range(1, 7), values_right, mark + "-", label=rule)
axes.axhline(1 / 16, color="grey", linestyle=":")
axes.text(6, 1 / 16 + 0.02, "guessing", color="grey", ha="right")
axes.set(xlabel="times the key was written (6: six or more)", ylabel="latest value found (share)", ylim=(0, 1.03))
axes.legend()
show(
    figure,
    "a memory that adds gets worse each time a key is rewritten; for the delta rule it hardly matters how often "
    "that happened. All three have a state of the same size, 144 numbers.",
)
assert min(shares["delta rule"]) > max(shares["add"][1:]) + 0.2

# %% [markdown]
# ## What it cost
#
# A write now reads first. Per token and head, in multiplications: adding takes $KV$ for the outer product and $KV$
# for the output; the delta rule takes another $KV$ for $S^\top k$. That is half as much again, and the state is no
# larger. The real price is elsewhere: what a token writes depends on the state before it, so the writes are no
# longer a plain sum, and the blocks of notebook 1 do not work any more. Notebook 5 repairs that.
#
# | | adding | delta rule |
# |---|---|---|
# | multiplications a token | $2KV$ | $3KV$ |
# | a key that comes again | answers blur | the old answer is replaced |
# | more pairs than room | all equally blurred | old ones are lost, new ones kept |
# | many tokens at once | a matrix product | needs an idea (notebook 5) |
#
# ## Exercises


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_1(replace):
    for length in (1.0, 0.2, 3.0):
        S, v = torch.randn(6, 3).double(), torch.randn(3).double()
        k = length * normalize(torch.randn(6).double(), dim=0)
        new = replace(S, k, v)
        expect_close(new.T @ k, v, f"the answer to a key of length {length}")
        far = torch.randn(6).double()
        far = far - k * (k @ far) / (k @ k)
        expect_close(new.T @ far, S.T @ far, "the answer to a perpendicular key")


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_2(remaining):
    k = normalize(torch.randn(5).double(), dim=0)
    for beta, writes in ((0.5, 1), (0.25, 3), (1.0, 2), (0.1, 10)):
        S = torch.outer(k, torch.ones(1).double())
        for _ in range(writes):
            S = delta_write(S, k, torch.zeros(1).double(), beta)
        expect_close(torch.as_tensor([remaining(beta, writes)]), S.T @ k, f"beta {beta}, {writes} writes: the rest")


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_3(erase):
    S, k = torch.randn(6, 3).double(), normalize(torch.randn(6).double(), dim=0)
    far = torch.randn(6).double()
    far = far - k * (k @ far)
    new = erase(S, k)
    expect_close(new.T @ k + 1, torch.ones(3).double(), "1 + the answer to the erased key")
    expect_close(new.T @ far, S.T @ far, "the answer to a perpendicular key")


# %% [markdown]
# **Exercise 1.** The delta rule replaces exactly only if $k^\top k = 1$. Write `replace(S, k, v)` that makes the
# memory answer exactly $v$ to a key of *any* length, and leaves perpendicular keys alone.


# %% tags=["exercise"]
def replace(S, k, v):
    raise NotImplementedError  # return the new state


check_1(replace)


# %% tags=["answer"] jupyter={"source_hidden": true}
def replace_answer(S, k, v):
    return S + torch.outer(k, v - S.T @ k) / (k @ k)


assert check_1(replace_answer)
assert not check_1(lambda S, k, v: delta_write(S, k, v, 1.0))  # right for unit keys only

# %% [markdown]
# **Exercise 2.** A key's answer is 1. Then the value 0 is written to it $n$ times with strength $\beta$. What does
# the memory answer now? Return a number.


# %% tags=["exercise"]
def remaining(beta, writes):
    raise NotImplementedError


check_2(remaining)


# %% tags=["answer"] jupyter={"source_hidden": true}
def remaining_answer(beta, writes):
    return (1 - beta) ** writes


assert check_2(remaining_answer)
assert not check_2(lambda beta, writes: max(0.0, 1 - beta * writes))  # each write removes a share of what is left

# %% [markdown]
# **Exercise 3.** Make the memory forget one key: after `erase(S, k)` it answers 0 to the unit key $k$, and answers to
# perpendicular keys are as before. You do not know which value was stored.


# %% tags=["exercise"]
def erase(S, k):
    raise NotImplementedError  # return the new state


check_3(erase)


# %% tags=["answer"] jupyter={"source_hidden": true}
def erase_answer(S, k):
    return delta_write(S, k, torch.zeros_like(S[0]), beta=1.0)


assert check_3(erase_answer)
assert not check_3(lambda S, k: S * (1 - k**2)[:, None])  # fades channels, which touches every key
