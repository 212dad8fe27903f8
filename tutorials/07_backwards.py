# %% [markdown]
# # 7. Backwards
#
# *A training kernel needs its gradients written by hand. What do they look like, and how do you check them when
# there is nothing to compare with?*
#
# You need notebook 4 (the recurrence) and, for one section, notebook 5 (the six stages). That autograd exists you
# know; here we do its work ourselves, because a kernel has to.

# %%
import matplotlib.pyplot as plt
import torch
from torch import Tensor

from kimi_linear.reference.naive import kda_step, recurrent_kda, recurrent_kda_backward
from tools import checker, expect, expect_close, recorded, show

rng = torch.Generator().manual_seed(7)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def draw(T: int, K: int = 12, V: int = 10, gate: float = 0.3) -> list[Tensor]:
    """q, k, v, g, beta of one head: [1, T, 1, ..], fp64, unit keys."""
    q, k = (torch.nn.functional.normalize(randn(1, T, 1, K), dim=-1) for _ in "qk")
    g = -gate * torch.rand(1, T, 1, K, generator=rng, dtype=torch.float64)
    return [q, k, randn(1, T, 1, V), g, 0.1 + 0.8 * torch.rand(1, T, 1, generator=rng, dtype=torch.float64)]


# %% [markdown]
# ## One token, backwards
#
# A gradient is a number for each input that says how much a loss $\mathcal L$ moves when the input does. We write
# $dx$ for $\partial\mathcal L/\partial x$, a tensor of the shape of $x$. One token reads, with $a=e^{g}$,
#
# $$ D=\mathrm{diag}(a)\,S_{\text{prev}},\quad u=\beta\,(v-D^\top k),\quad S=D+k\,u^\top,
# \quad o=\text{scale}\;S^\top q. $$
#
# Walk it from the bottom up, and each line hands its gradient to what it read. Two rules are enough: from $y=M^\top
# x$ come $dx=M\,dy$ and $dM=x\,dy^\top$; and what is used twice gets the sum.
#
# | line | gives |
# |---|---|
# | $o=\text{scale}\;S^\top q$ | $dq=\text{scale}\;S\,do$, and $dS{+}{=}\text{scale}\;q\,do^\top$ |
# | $S=D+k\,u^\top$ | $du=dS^\top k$, $dk=dS\,u$, $dD=dS$ |
# | $u=\beta e$, $e=v-D^\top k$ | $dv=\beta du$, $d\beta=\langle du, e\rangle$, $dk{-}{=}D\,dv$, $dD{-}{=}k dv^\top$ |
# | $D=\mathrm{diag}(a)S_{\text{prev}}$ | $dg=\mathrm{rowsum}(D\odot dD)$, $dS_{\text{prev}}=\mathrm{diag}(a)\,dD$ |
#
# In the first line $dS$ already holds something: what *later* tokens want of this state. The state runs forward
# through the text, its gradient runs backward.
#
# The last line deserves a look. $da = \mathrm{rowsum}(S_{\text{prev}}\odot dD)$, and $dg = a\,da$. Multiply first,
# and $a\,S_{\text{prev}}$ is $D$, which we have. Nothing is divided by a decay, so $g=-\infty$ gives $dg=0$ and not
# NaN.


# %%
def step_backward(S_prev, q, k, v, g, beta, *, scale, do, dS):
    """The table for one head: S_prev [K, V], vectors q, k, g [K] and v, do [V]."""
    D = g.exp()[:, None] * S_prev
    error = v - D.T @ k
    u = beta * error
    S = D + torch.outer(k, u)
    dq = scale * S @ do
    dS = dS + scale * torch.outer(q, do)
    du = dS.T @ k
    dv, dbeta = beta * du, du @ error
    dk = dS @ u - D @ dv
    dD = dS - torch.outer(k, dv)
    dg = (D * dD).sum(1)
    return [dq, dk, dv, dg, dbeta], g.exp()[:, None] * dD


# %% [markdown]
# Does it agree with autograd? For one token, in fp64, with a gradient arriving from later tokens:

# %%
K, V, scale = 12, 10, 12**-0.5
q, k, v, g, beta = (x[0, 0, 0] for x in draw(1))
S_prev, do, dlater = randn(K, V), randn(V), randn(K, V)
leaves = [x.clone().requires_grad_() for x in (q, k, v, g, beta, S_prev)]
batched = [x[None, None] for x in leaves]
o, S = kda_step(batched[-1], *batched[:-1], scale)
theirs = torch.autograd.grad([o, S], leaves, [do[None, None], dlater[None, None]])
ours, dstate = step_backward(S_prev, q, k, v, g, beta, scale=scale, do=do, dS=dlater)
for name, got, want in zip(("dq", "dk", "dv", "dg", "dbeta", "dS_prev"), [*ours, dstate], theirs, strict=True):
    print(f"{name:8} off by {(got - want).abs().max().item():.1e}")
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-14)

# %% [markdown]
# ## The whole text, and the smallest idea that fails
#
# The loop goes from the last token to the first and needs $S_{\text{prev}}$ at each. Keeping them all is what
# autograd does. For the sizes of a real layer, 32 heads with $K=V=128$ in fp32:

# %%
T, heads, size = 8192, 32, 128
state = heads * size * size * 4
print(f"a state before every token: {T * state / 2**30:.0f} GiB a layer, for one text of {T} tokens")
print(f"a state before every 64th:  {T // 64 * state / 2**30:.2f} GiB")

# %% [markdown]
# That is too much, and here is a tempting way out: *run the recurrence backwards*. Everything in a step can be
# undone. We know $S$, $k$, $v$, $g$, $\beta$; solve the write for $D$, divide by the decay, and there is
# $S_{\text{prev}}$. No memory at all:
#
# $$ D=(I-\beta kk^\top)^{-1}(S-\beta k v^\top) = R+\frac{\beta}{1-\beta|k|^2}\,k\,(k^\top R),\quad R=S-\beta kv^\top,
# \qquad S_{\text{prev}}=\mathrm{diag}(1/a)\,D. $$


# %%
def undo(S: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """S_prev [K, V] from S and the token that made it."""
    R = S - beta * torch.outer(k, v)
    D = R + beta / (1 - beta * (k @ k)) * torch.outer(k, k @ R)
    return (-g).exp()[:, None] * D


def walk_back(gate: float, dtype: torch.dtype, T: int = 200) -> list[float]:
    """Relative error of each state on the way back from the last one."""
    tokens = [x[0, :, 0] for x in draw(T, gate=gate)]
    states = [torch.zeros(K, V, dtype=torch.float64)]
    for q, k, v, g, beta in zip(*tokens, strict=True):
        _, S = kda_step(states[-1][None, None], *(x[None, None] for x in (q, k, v, g, beta)), scale)
        states.append(S[0, 0])
    S, errors = states[-1].to(dtype), []
    for t in reversed(range(1, T)):
        S = undo(S, *(x[t].to(dtype) for x in tokens[1:]))
        errors.append(((S.double() - states[t]).norm() / states[t].norm()).item())
    return errors


# %%
figure, axes = plt.subplots()
for gate, dtype in ((0.01, torch.float32), (0.3, torch.float32), (0.3, torch.float64), (3.0, torch.float64)):
    label = f"gates from 0 to {-gate} a token, {str(dtype)[6:]}"
    axes.semilogy(range(1, 200), walk_back(gate, dtype), label=label)
axes.axhline(1, color="grey", ls=":")
axes.set(xlabel="tokens walked back", ylabel="relative error of the state", ylim=(1e-17, 1e17))
axes.legend(fontsize=8)
show(figure, "each step back multiplies the error. Above the dotted line nothing of the state is left, even in fp64.")

# %%
errors = walk_back(0.3, torch.float32)
gone = next(i for i, e in enumerate(errors, start=1) if not e < 1)
print(f"gates around -0.15, fp32: after {gone} tokens the error is as large as the state")
assert gone < 64, "not even one chunk"

# %% [markdown]
# Of course: forgetting and overwriting are what the operator is *for*, and what is forgotten cannot be remembered.
# So kernels keep a state at the start of each chunk and compute the ones inside again. Inside a chunk one need not
# even go token by token. The backward pass runs through the six stages in reverse:
#
# $$ dv_{\text{new}}=A_{qk}^\top do + k_E\,dS,\quad dS \leftarrow e^{G_C}dS+q_G^\top do-w^\top dv_{\text{new}},\quad
# dA=-\mathrm{lower}\big((T^\top dw)\,w^\top+(T^\top du)\,u^\top\big) $$
#
# with $q_G=\text{scale}\,q\,e^{G}$, $k_E=k\,e^{G_C-G}$. The third is the only surprise, since it never forms $dT$:
# for an inverse, $dA=-T^\top\,dT\,T^\top$, and $T$ times its inputs are $w$ and $u$, which stage 4 left behind
# (exercise 2). All of it is in `kimi_linear/reference/chunked/backward.py`, stage by stage. Is it the same
# function?

# %%
from kimi_linear.reference.chunked import chunk_kda_backward

inputs = draw(T=150)
h0, do, dht = randn(1, 1, K, V), randn(1, 150, 1, V), randn(1, 1, K, V)
by_token = recurrent_kda_backward(*inputs, do, dht, initial_state=h0)
by_chunk = chunk_kda_backward(*inputs, do, dht, initial_state=h0)
for name in by_token._fields:
    want, got = getattr(by_token, name), getattr(by_chunk, name)
    print(f"{name:6} {list(want.shape)!s:18} differs by {((got - want).norm() / want.norm()).item():.1e}")
    assert (got - want).norm() <= 1e-12 * want.norm()

# %% [markdown]
# ## Checking a gradient you wrote
#
# These two agree, but suppose you have only one, in a kernel. The check that everybody knows moves the inputs a
# little along a random direction $\delta$ and compares,
#
# $$ \frac{\mathcal L(x+h\delta)-\mathcal L(x-h\delta)}{2h} \approx \langle dx,\delta\rangle. $$
#
# How small can $h$ be, and how good does it get?


# %%
def loss(inputs: list[Tensor], h0: Tensor) -> float:
    """<o, do> + <final state, dht>; summed in fp64, whatever the operator computes in."""
    o, S = recurrent_kda(*inputs, initial_state=h0, output_final_state=True)
    return ((o.double() * do).sum() + (S.double() * dht).sum()).item()


def along(direction: list[Tensor], h: float, dtype: torch.dtype) -> float:
    """The loss's slope along a direction, by central differences."""
    point = [*inputs, h0]
    ends = [[(x + sign * h * y).to(dtype) for x, y in zip(point, direction, strict=True)] for sign in (1, -1)]
    return (loss(ends[0][:5], ends[0][5]) - loss(ends[1][:5], ends[1][5])) / (2 * h)


direction = [randn(*x.shape) for x in (*inputs, h0)]
direction[3] = direction[3].abs() * inputs[3]  # a gate stays below 0
want = sum((dx * y).sum() for dx, y in zip(by_token, direction, strict=True)).item()

# %%
steps = torch.logspace(-12, -1, 23).tolist()
figure, axes = plt.subplots()
best = {}
for dtype in (torch.float32, torch.float64):
    errors = [abs(along(direction, h, dtype) - want) / abs(want) for h in steps]
    best[dtype] = min(errors)
    axes.loglog(steps, errors, marker="o", ms=3, label=str(dtype)[6:])
axes.set(xlabel="step h (in units of the direction)", ylabel="relative error of the slope", ylim=(1e-12, 1e3))
axes.legend()
show(
    figure, "a V. To the right the curve bends away from its tangent, to the left rounding takes over, 1/h at a time."
)
print(*(f"best in {str(dtype)[6:]}: {error:.0e}" for dtype, error in best.items()), sep="; ")
assert best[torch.float64] < 1e-8
assert best[torch.float32] > 100 * best[torch.float64]

# %% [markdown]
# In fp64 the check is sharp. In fp32 it is blunter by a factor of many thousands, and that only at the bottom of
# the V; and kernels compute in bf16. It also says *that* something is wrong, and not what.
#
# ## Identities that need no reference
#
# There is a better way. Every symmetry of a function is an equation between its gradients. Three examples, for
# $\mathcal L=\langle o,do\rangle+\langle S_T,dh_T\rangle$:
#
# - Scale $q_t$ by $c$: only $o_t$ changes, and by the factor $c$. Differentiate at $c=1$: $\;\langle
#   dq_t,q_t\rangle=\langle do_t,o_t\rangle$.
# - Send $k_t\to c\,k_t$, $v_t\to c\,v_t$, $\beta_t\to\beta_t/c^2$: then $u_t\to u_t/c$ and $k_tu_t^\top$ stays.
#   *Nothing* changes: $\;\langle dk_t,k_t\rangle+\langle dv_t,v_t\rangle=2\,\beta_t\,d\beta_t$.
# - Scale all $v$ and $h_0$ by $c$: all $o$ and $S_T$ scale: $\;\sum_t\langle dv_t,v_t\rangle+\langle
#   dh_0,h_0\rangle= \sum_t\langle do_t,o_t\rangle+\langle dh_T,S_T\rangle$.
# - And the first gate does nothing but scale the rows of $h_0$: $\;dg_1=\mathrm{rowsum}(h_0\odot dh_0)$.

# %%
o, S_T = recurrent_kda(*inputs, initial_state=h0, output_final_state=True)


def residuals(grads) -> dict[str, float]:
    """How far each identity is from holding, relative to the size of its terms."""
    dq, dk, dv, dg, dbeta, dh0 = grads
    q, k, v, _, beta = inputs
    by_token = (dk * k).sum(-1), (dv * v).sum(-1), -2 * beta * dbeta
    whole = (dv * v).sum(), (dh0 * h0).sum(), -(do * o).sum(), -(dht * S_T).sum()
    terms = {
        "q scales o": ((dq * q).sum(-1), -(do * o).sum(-1)),
        "k, v, beta": by_token,
        "v, h0 scale all": whole,
        "first gate": (dg[:, 0], -(h0 * dh0).sum(-1)),
    }
    return {name: (sum(x).abs().max() / max(y.abs().max() for y in x)).item() for name, x in terms.items()}


# %%
for name, residual in residuals(by_chunk).items():
    print(f"{name:18} {residual:.1e}")
    assert residual < 1e-12

# %% [markdown]
# They hold to the last digit, with no second implementation in sight, and they need the kernel's own outputs only.
# Now plant mistakes in the adjoint, one at a time, and look at which identity notices. Each mistake is a line of
# the table changed by hand; the loop below runs our own `step_backward` with it.

# %%
import inspect

SLIPS = {
    "none": ("", ""),
    "dq from S before the write": ("dq = scale * S @ do", "dq = scale * D @ do"),
    "dbeta from v": ("du @ error", "du @ v"),
    "dk misses the prediction": ("dk = dS @ u - D @ dv", "dk = dS @ u"),
    "dD misses the prediction": ("dD = dS - torch.outer(k, dv)", "dD = dS"),
    "du before do is added": ("du = dS.T @ k", "du = (dS - scale * torch.outer(q, do)).T @ k"),
    "dS not decayed": ("return [dq, dk, dv, dg, dbeta], g.exp()[:, None] * dD", "return [dq, dk, dv, dg, dbeta], dD"),
    "dg is da": ("dg = (D * dD)", "dg = (S_prev * dD)"),
    "dg of later tokens doubled": ("dg = (D * dD).sum(1)", "dg = (D * dD).sum(1) * (2 - torch.equal(S_prev, first))"),
}


def with_slip(old: str, new: str):
    """step_backward with one line changed."""
    scope = {"torch": torch, "first": h0[0, 0]}
    exec(inspect.getsource(step_backward).replace(old, new), scope)
    return scope["step_backward"]


# %%
def backward(step) -> list[Tensor]:
    """The loop over the text of one head: dq, dk, dv, dg, dbeta [1, T, 1, ..] and dh0."""
    states, tokens = [h0[0, 0]], [x[0, :, 0] for x in inputs]
    for q, k, v, g, beta in zip(*tokens, strict=True):
        _, S = kda_step(states[-1][None, None], *(x[None, None] for x in (q, k, v, g, beta)), scale)
        states.append(S[0, 0])
    columns, dS = [], dht[0, 0]
    for t in reversed(range(len(tokens[0]))):
        grads, dS = step(states[t], *(x[t] for x in tokens), scale=scale, do=do[0, t, 0], dS=dS)
        columns.append(grads)
    return [torch.stack(column[::-1])[None, :, None] for column in zip(*columns, strict=True)] + [dS[None, None]]


assert all(torch.allclose(x, y) for x, y in zip(backward(step_backward), by_token, strict=True))
seen = {name: residuals(backward(with_slip(*slip))) for name, slip in SLIPS.items()}

# %%
matrix = torch.tensor([list(row.values()) for row in seen.values()]).clamp(min=1e-16).log10()
figure, axes = plt.subplots(figsize=(8, 4))
image = axes.imshow(matrix, cmap="magma", vmin=-16, vmax=1, aspect="auto")
figure.colorbar(image, label="log10 of the residual (relative)")
axes.set_xticks(range(4), list(residuals(by_token)))
axes.set_yticks(range(len(SLIPS)), list(SLIPS))
axes.set(xlabel="identity", ylabel="mistake planted")
axes.grid(False)
show(
    figure, "dark is right. Each mistake lights up its own pattern, and the last row stays dark: no identity sees it."
)

# %%
caught = {name: [identity for identity, residual in row.items() if residual > 1e-9] for name, row in seen.items()}
for name, identities in caught.items():
    print(f"{name:28} {', '.join(identities) or '(nothing)'}")
assert caught["none"] == caught["dg of later tokens doubled"] == []
assert all(caught[name] for name in list(SLIPS)[1:-1])

# %% [markdown]
# The last mistake respects every one of the four equations. Only the *first* gate is in them. The blind spot has a
# remedy that again needs no reference: start the operator in the middle of the text, and any gate is the first one
# (exercise 3). `kimi_linear.conformance` has these identities as the check `limit.gradient_identities`, with limits
# that are measured on the input (notebook 10).
#
# ## What it cost
#
# Recorded by `benchmarks/cpu.py`, fp32, 8 heads, $K=V=128$; then the same ratio here, at a smaller size.

# %%
table = recorded("cpu.json")
for name in ("ours: chunk_kda", "ours: chunk_kda, autograd", "ours: chunk_kda_backward"):
    print(f"{name:28} {1e3 * table['seconds']['2048'][name]['median']:6.0f} ms for 2048 tokens, recorded")

# %%
from torch.utils.benchmark import Timer

from kimi_linear.reference.chunked import chunk_kda

wide = [torch.cat([x.float()] * 4, dim=2) for x in draw(512, K=64, V=64)]
leaves = [x.clone().requires_grad_() for x in wide]
calls = {
    "forward": lambda: chunk_kda(*wide),
    "forward + backward, autograd": lambda: torch.autograd.grad(chunk_kda(*leaves)[0].sum(), leaves),
    "forward + backward, by hand": lambda: chunk_kda_backward(*wide, torch.ones_like(wide[2])),
}
for name, call in calls.items():
    timer = Timer("call()", globals={"call": call})
    print(f"{name:30} {1e3 * timer.blocked_autorange(min_run_time=0.5).median:6.1f} ms, here")

# %% [markdown]
# Forward and backward together cost some three forward passes: the stages once more, and for each product of two
# matrices two products, since both of its operands get a gradient.
#
# ## Exercises


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_1(norm_backward):
    x, dy = randn(5, 8).requires_grad_(), randn(5, 8)
    y = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    (want,) = torch.autograd.grad(y, x, dy)
    got = norm_backward(x.detach(), dy)
    expect_close(got, want, "dx")
    along_x = (got * x.detach()).sum(-1).abs().max().item()
    expect(along_x < 1e-5, f"y does not change when x grows longer, so <dx, x> must be near 0; got {along_x:.2g}")


@checker
def check_2(inverse_backward):
    A = torch.tril(randn(9, 9), -1).requires_grad_()
    T = torch.linalg.inv(torch.eye(9, dtype=torch.float64) + A)
    dT = randn(9, 9)
    (want,) = torch.autograd.grad(T, A, dT)
    expect_close(inverse_backward(T.detach(), dT), torch.tril(want, -1), "dA")


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_3(gate_gradient):
    for t in (0, 40, 149):
        expect_close(gate_gradient(t), by_token.dg[:, t], f"dg of token {t}")


# %% [markdown]
# **1.** The front end normalises, $y=x/\sqrt{|x|^2+\varepsilon}$ over the last dimension, $\varepsilon=10^{-6}$.
# Its gradient: from $x$ and $dy$, both [n, D], give $dx$.


# %% tags=["exercise"]
def norm_backward(x: Tensor, dy: Tensor) -> Tensor:
    raise NotImplementedError


check_1(norm_backward)


# %% tags=["answer"] jupyter={"source_hidden": true}
def project(x: Tensor, dy: Tensor) -> Tensor:
    """y = r x with r = (|x|^2 + eps)^-1/2 and dr/dx = -r^3 x: dx = r (dy - y <y, dy>)."""
    r = torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    y = r * x
    return r * (dy - y * (y * dy).sum(-1, keepdim=True))


assert check_1(project)
assert not check_1(lambda x, dy: dy * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6))  # r taken for a constant

# %% [markdown]
# **2.** Stage 3. $T=(I+A)^{-1}$ with $A$ strictly lower triangular; from $T$ and $dT$ give $dA$, strictly lower
# too. (Start from $T(I+A)=I$ and let $A$ change a little.)


# %% tags=["exercise"]
def inverse_backward(T: Tensor, dT: Tensor) -> Tensor:
    raise NotImplementedError


check_2(inverse_backward)

# %% tags=["answer"] jupyter={"source_hidden": true}
assert check_2(lambda T, dT: -torch.tril(T.T @ dT @ T.T, -1))
assert not check_2(lambda T, dT: -torch.tril(T @ dT @ T, -1))  # no transposes

# %% [markdown]
# **3.** Close the blind spot: $dg$ of token $t$ ([1, 1, K]), from nothing but calls of the operator and its
# backward that *start* at $t$. Use `inputs`, `h0`, `do`, `dht`; a text up to token $t$ leaves a state, and a text
# from $t$ on has a $dh_0$.


# %% tags=["exercise"]
def gate_gradient(t: int) -> Tensor:
    raise NotImplementedError


check_3(gate_gradient)


# %% tags=["answer"] jupyter={"source_hidden": true}
def as_first_gate(t: int) -> Tensor:
    """Token t's gate scales the rows of the state before it: dg_t = rowsum(S dS)."""
    _, S = recurrent_kda(*(x[:, :t] for x in inputs), initial_state=h0, output_final_state=True)
    rest = [x[:, t:] for x in inputs]
    return (S * chunk_kda_backward(*rest, do[:, t:], dht, initial_state=S).dh0).sum(-1)


assert check_3(as_first_gate)
assert not check_3(lambda t: (h0 * by_token.dh0).sum(-1))  # the first gate's, for all
doubled = backward(with_slip(*SLIPS["dg of later tokens doubled"]))[3]
print(f"the slip that nobody saw, at token 40: off by {(doubled[:, 40] / as_first_gate(40) - 1).mean().item():.0%}")
