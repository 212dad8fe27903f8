# %% [markdown]
# # 8. A Triton kernel
#
# *The chunk form does little arithmetic and all of it in matrix products. What is left that decides how fast it is
# on a GPU, and how does one write it?*
#
# You need notebook 5 (the six stages). Triton is a language for GPU kernels inside Python; you need not know it.
# Nor do you need a GPU: Triton has an interpreter that runs a kernel on the CPU, with NumPy, one program after the
# other. It has to be asked for before `triton` is imported.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 asks to be told

import matplotlib.pyplot as plt
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kimi_linear.reference.chunked import chunk_kda, chunk_stages
from kimi_linear.reference.naive import recurrent_kda
from tools import checker, expect, expect_close, recorded, show

# %% [markdown]
# ## A GPU waits for memory
#
# A GPU multiplies faster than it can fetch what to multiply. So before anything else we count what a computation
# *moves*: every number that is read from memory or written to it, for each token and head. An operation of PyTorch
# reads its operands from memory and writes its result back, whatever came before and comes after. We can watch it
# do so.


# %%
class Moved(TorchDispatchMode):
    """Inside this context: how many numbers PyTorch's operations read and write. Views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.operations = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
            self.numbers += sum(x.numel() for x in tensors)
            self.operations += 1
        return result


# %%
T, H, K, V = 128, 2, 64, 64
rng = torch.Generator().manual_seed(8)
q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, K, generator=rng), dim=-1) for _ in "qk")
v, g = torch.randn(1, T, H, V, generator=rng), -0.2 * torch.rand(1, T, H, K, generator=rng)
beta = torch.rand(1, T, H, generator=rng)
inputs = (q, k, v, g, beta)

floor = 3 * K + V + 1 + V  # read q, k, g, v, beta once; write o once
moved = {"read inputs, write o": floor}
for name, form in (("PyTorch, recurrence", recurrent_kda), ("PyTorch, chunks", chunk_kda)):
    with Moved() as meter:
        form(*inputs)
    moved[name] = meter.numbers / (T * H)
    print(f"{name}: {meter.operations} operations, {moved[name] / floor:.0f} times the least possible traffic")

# %% [markdown]
# That is the problem. The chunk form in PyTorch is the right algorithm, and most of its time on a GPU would go into
# carrying intermediates to memory and back. *Fusing* means: one kernel does several operations and keeps what is
# between them in registers.
#
# ## The first kernel: the recurrence
#
# A Triton kernel is written for one *program*, and launched as a grid of them, which run in parallel and do not
# speak to each other. Ours takes one head and some columns of its state, which stay in registers from the first
# token to the last. Columns are independent: $S^\top k$ and $S^\top q$ sum over rows. `tl.load` and `tl.store` are
# the only lines that touch memory.


# %%
@triton.jit
def recurrence(q, k, v, g, beta, o, T, scale, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    head, columns = tl.program_id(0), tl.program_id(1) * BV + tl.arange(0, BV)
    channels = tl.arange(0, K)
    S = tl.zeros([K, BV], tl.float32)
    for t in range(T):
        row = head * T + t
        decay = tl.exp(tl.load(g + row * K + channels))
        k_t = tl.load(k + row * K + channels)
        q_t = tl.load(q + row * K + channels) * scale
        S = decay[:, None] * S
        pred = tl.sum(S * k_t[:, None], axis=0)
        u_t = tl.load(beta + row) * (tl.load(v + row * V + columns) - pred)
        S = S + k_t[:, None] * u_t[None, :]
        tl.store(o + row * V + columns, tl.sum(S * q_t[:, None], axis=0))


# %%
by_head = [x[0].transpose(0, 1).contiguous() for x in inputs]  # [H, T, ..]


def run_recurrence(BV: int) -> Tensor:
    """o [H, T, V] from a grid of H * V / BV programs."""
    o = torch.full((H, T, V), torch.nan)
    recurrence[(H, V // BV)](*by_head, o, T, K**-0.5, K, V, BV)
    return o


exact = recurrent_kda(*(x.double() for x in inputs))[0][0].transpose(0, 1)


def error(o: Tensor) -> float:
    return ((o.double() - exact).norm() / exact.norm()).item()


reference_error = error(recurrent_kda(*inputs)[0][0].transpose(0, 1))
print(f"off by {error(run_recurrence(64)):.1e}; the reference in fp32 is off by {reference_error:.1e}")
assert error(run_recurrence(64)) < 4 * reference_error

# %% [markdown]
# `o` was full of NaN before: a row that the kernel forgot would show. Now let us count. In the interpreter each
# `tl.load` and `tl.store` passes through a Python object, so a meter is a matter of standing in between.

# %%
from triton.runtime.interpreter import InterpreterBuilder as Builder

counted = {"numbers": 0}
plain_load, plain_store = Builder.create_masked_load, Builder.create_masked_store


def load(self, pointers, mask, *rest):
    counted["numbers"] += int(mask.data.sum())
    return plain_load(self, pointers, mask, *rest)


def store(self, pointers, value, mask, *rest):
    counted["numbers"] += int(mask.data.sum())
    return plain_store(self, pointers, value, mask, *rest)


# %%
def numbers_moved(call) -> float:
    """What a call's kernels load and store, per token and head."""
    Builder.create_masked_load, Builder.create_masked_store, counted["numbers"] = load, store, 0
    call()
    Builder.create_masked_load, Builder.create_masked_store = plain_load, plain_store
    return counted["numbers"] / (T * H)


# %%
for BV in (64, 32):
    count = numbers_moved(lambda BV=BV: run_recurrence(BV))
    print(f"{V // BV} programs a head: {count:.0f} numbers a token; the least is {floor}")
    moved.setdefault("kernel: recurrence", count)
assert moved["kernel: recurrence"] == floor

# %% [markdown]
# The recurrence as one kernel moves *exactly* the least that is possible. Why are we not done? Because of what the
# count does not show. The tokens of a head are a chain in which each step waits for the one before, and a step is a
# few multiplications an element, on the GPU's ordinary units, while its matrix units do nothing. (For decoding,
# where there is one token a call, this kernel is the right one. We come back to it.)
#
# ## The second kernel: stages 5 and 6
#
# Chunks break the chain: a text of $T$ tokens has $T/C$ links, and what happens in a link is matrix products.
# Stages 1 to 4 know nothing of the state, so they run for all chunks at once and leave $w$, $u$, $A_{qk}$ and the
# decayed keys and queries. What has to be serial is this, and it is short:
#
# $$ v_{\text{new}}=u-wS,\qquad o=q_GS+A_{qk}v_{\text{new}},\qquad S\leftarrow e^{G_C}S+k_E^\top v_{\text{new}} $$


# %%
@triton.jit
def stages_5_and_6(
    q_decayed, w, u, k_to_end, Aqk, decay, o, N, C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr
):
    head, columns = tl.program_id(0), tl.program_id(1) * BV + tl.arange(0, BV)
    rows, channels = tl.arange(0, C), tl.arange(0, K)
    S = tl.zeros([K, BV], tl.float32)
    for n in range(N):
        at = (head * N + n) * C + rows[:, None]
        x_w = tl.load(w + at * K + channels)
        x_q = tl.load(q_decayed + at * K + channels)
        x_k = tl.load(k_to_end + at * K + channels)
        v_new = tl.load(u + at * V + columns) - tl.dot(x_w, S, input_precision="ieee")
        x_Aqk = tl.load(Aqk + at * C + rows)
        x_o = tl.dot(x_q, S, input_precision="ieee") + tl.dot(x_Aqk, v_new, input_precision="ieee")
        tl.store(o + at * V + columns, x_o)
        chunk_decay = tl.load(decay + (head * N + n) * K + channels)
        S = chunk_decay[:, None] * S + tl.dot(tl.trans(x_k), v_new, input_precision="ieee")


# %% [markdown]
# The same names as in `kimi_linear/reference/chunked/stages.py`, where each line stands in PyTorch. From there we
# take stages 1 to 4, and run only the last two ourselves.

# %%
s = chunk_stages(*inputs)  # [H, N, C, ..]
q_decayed, k_to_end = s.inputs.q * s.decays.from_start, s.inputs.k * s.decays.to_end
operands = [x.contiguous() for x in (q_decayed, s.w, s.u, k_to_end, s.Aqk, s.decays.from_start[:, :, -1])]
N, C = s.w.shape[1:3]


def run_chunks(BV: int) -> Tensor:
    o = torch.full((H, T, V), torch.nan)
    stages_5_and_6[(H, V // BV)](*operands, o, N, C, K, V, BV)
    return o


print(f"off by {error(run_chunks(32)):.1e}; the reference in fp32 is off by {reference_error:.1e}")
assert error(run_chunks(32)) < 4 * reference_error
print(f"links in the chain: {N} instead of {T}")

# %% [markdown]
# ## What fusing saves
#
# Compare stages 5 and 6 as PyTorch operations with the kernel, and then all of `chunk_kda`: the repository has it
# in three kernels (`triton_kernels/chunk.py`: stages 1 to 3 in tiles of 16 tokens, stages 2 to 4 of a chunk, stages
# 5 and 6).

# %%
import warnings

from kimi_linear.reference.chunked import chunk_output, state_pass
from kimi_linear.triton_kernels import chunk_kda as chunk_kda_kernels


def in_pytorch() -> None:
    starts, v_new, _ = state_pass(s.w, s.u, s.inputs.k, s.decays, torch.zeros(H, 1, K, V), s.layout.steps)
    o_inter, o_intra = chunk_output(s.inputs.q, s.Aqk, starts, v_new, s.decays)
    o_inter + o_intra


with Moved() as meter:
    in_pytorch()
moved["PyTorch, stages 5 and 6"] = meter.numbers / (T * H)
moved["kernel: stages 5 and 6"] = numbers_moved(lambda: run_chunks(64))
with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy, of numbers that a mask drops afterwards
    moved["kernels: all six stages"] = numbers_moved(lambda: chunk_kda_kernels(*inputs))

# %%
figure, axes = plt.subplots(figsize=(8, 3.2))
order = sorted(moved, key=moved.get, reverse=True)
colors = ["C1" if "PyTorch" in name else "C0" if "kernel" in name else "grey" for name in order]
axes.barh(order, [moved[name] for name in order], color=colors)
for row, name in enumerate(order):
    axes.annotate(f" {moved[name]:.0f}", (moved[name], row), va="center", fontsize=8)
axes.set(xscale="log", xlim=(100, 2e5), xlabel="numbers moved, per token and head (K = V = 64)", ylabel="program")
axes.grid(axis="y", visible=False)
show(
    figure,
    "kernels (blue) move a fraction of what PyTorch (orange) does. Best is one that is not used for long texts.",
)

# %%
saved = moved["PyTorch, chunks"] / moved["kernels: all six stages"]
print(f"all six stages: {saved:.1f} times less traffic in three kernels")
print(f"and still {moved['kernels: all six stages'] / floor:.1f} times the least: what the kernels hand each other")
assert moved["kernel: stages 5 and 6"] < moved["PyTorch, stages 5 and 6"]
assert saved > 4

# %% [markdown]
# Why three kernels and not one? Because they want different grids. Stages 1 to 4 have a program for every chunk,
# hundreds at a time; stages 5 and 6 have one for every head and slice of columns, and are serial. What passes
# between them through memory is the price.
#
# ## Where the time goes on an H200
#
# Measured on a real GPU, recorded in this repository (`benchmarks/gpu.py`; bf16, K = V = 128). If memory traffic
# were all, a call would take the *floor*: inputs read once, outputs written once, at the speed of a copy.

# %%
measured = recorded("gpu.json")
ours = {x["shape"]: x for x in measured["times"] if (x["candidate"], x["gate"]) == ("ours", "softplus")}
print(f"{measured['versions']['device']}, a copy moves {measured['copy_TBps']:.2f} TB/s")
for shape, x in ours.items():
    print(f"{shape:28} {x['ms']:7.3f} ms, the floor is {x['floor_ms'] / x['ms']:.0%} of it")
if torch.cuda.is_available():
    print("your GPU: python benchmarks/gpu.py makes the same table; this notebook's process interprets kernels")
else:
    print("no GPU here: nothing measured, recorded numbers shown")

# %% [markdown]
# A tenth to a sixth of the time, so there is something else. A guess with two terms: work that all of the GPU
# shares, in proportion to tokens times heads, and the chain of chunks, in proportion to tokens alone, since heads
# run side by side:
#
# $$ t \approx a\,T H + b\,T/64. $$
#
# Two shapes determine $a$ and $b$. A guess is worth what it predicts, so we predict the others of the same kind.


# %%
def milliseconds(T: int, H: int) -> float:
    return ours[f"B=1 T={T} H={H}"]["ms"]


work = (milliseconds(65536, 32) - milliseconds(65536, 16)) / (65536 * 16)
chain = (milliseconds(65536, 16) - work * 65536 * 16) / (65536 / 64)
share = chain / 64 / (chain / 64 + 32 * work)
print(f"work: {1e6 * work:.2f} ns a token and head; chain: {1e3 * chain:.2f} us a chunk")
print(f"with 32 heads the chain is {share:.0%} of the time")
lengths = [T for T in (1024, 4096, 8192, 16384, 65536, 262144) if f"B=1 T={T} H=32" in ours]
predicted = {T: work * T * 32 + chain * T / 64 for T in lengths}
for T_, t in predicted.items():
    print(f"T = {T_:>6}, H = 32: predicted {t:8.3f} ms, measured {milliseconds(T_, 32):8.3f}")
assert all(abs(predicted[n] / milliseconds(n, 32) - 1) < 0.15 for n in lengths if n >= 4096)

# %%
figure, axes = plt.subplots()
per_token = [1e3 * milliseconds(n, 32) / n for n in lengths]
axes.semilogx(lengths, per_token, "ko", label="measured")
shares = {"chain of chunks": 1e3 * chain / 64, "work of all heads": 1e3 * work * 32}
axes.stackplot(lengths, *([share] * len(lengths) for share in shares.values()), labels=shares, alpha=0.4)
least = [1e3 * ours[f"B=1 T={n} H=32"]["floor_ms"] / n for n in lengths]
axes.semilogx(lengths, least, "r--", label="floor: memory traffic alone")
axes.set(xlabel="tokens T (H = 32, one text)", ylabel="time per token (us)", ylim=(0, 0.14))
axes.legend(fontsize=8)
show(
    figure,
    "from ten thousand tokens on time per token is flat, and two terms explain it. Short texts pay for the start.",
)

# %% [markdown]
# So about a fifth of a long call is waiting for the chain, the rest is work: products, exponentials, the traffic
# between kernels. Which is where to look next. More heads, or several texts at once, hide the chain; a bounded gate
# saves exponentials (`benchmarks/results/gpu.md` has both).
#
# Decoding is the other extreme: one token a call, and the state has to come from memory and go back. There the
# recurrence *is* the kernel, and its time is that of moving states:

# %%
print(recorded("decode.txt"))
state = 32 * 128 * 128 * 4
copy = float(recorded("decode.txt").split("copy ")[1].split()[0])
print(f"a sequence's states in one layer: {2 * state / 1e6:.1f} MB to read and write")
print(f"256 of them at {copy} TB/s take {2 * 256 * state / copy / 1e6:.0f} us; measured is the last line above")

# %% [markdown]
# ## What it cost
#
# The two kernels above are 17 lines each, and only right: no packed texts, no odd sizes, no initial state, no bf16.
# With all of that the repository's have, counted without blank lines:

# %%
from pathlib import Path

import kimi_linear.triton_kernels as kernels

for name in ("chunk_tiles", "chunk_slices", "chunk_products", "chunk_merge", "chunk_state", "chunk_launch", "decode"):
    lines = (Path(kernels.__file__).parent / f"{name}.py").read_text().splitlines()
    print(f"{name:16} {sum(bool(line.strip()) for line in lines)} lines")

# %% [markdown]
# ## Exercises


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_1(kernel):
    x = torch.randn(37, 64, generator=rng)
    y = torch.full((37, 64), torch.nan)
    kernel[(37,)](x, y, 1e-6, 64)
    expect(y.isfinite().all(), "every element of y has to be written")
    expect_close(y, x / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt(), "y")


@checker
def check_2(kernel):
    V = 50  # no multiple of 32: the last program has columns that do not exist
    few = [x if x is not by_head[2] else x[..., :V].contiguous() for x in by_head]
    room = torch.full((H * T * V + 64,), 7.0)
    kernel[(H, 2)](*few, room, T, K**-0.5, K, V, 32)
    expect((room[H * T * V :] == 7).all(), "nothing may be written behind the end of o")
    expect_close(room[: H * T * V].view(H, T, V), exact[..., :V].float(), "o")


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_3(kernel):
    A = torch.tril(torch.rand(5, 16, 16, generator=rng), -1)
    X = torch.full((5, 16, 16), torch.nan)
    kernel[(5,)](A, X, 16)
    expect_close(X, torch.linalg.inv(torch.eye(16).double() + A.double()), "the inverse of I + A")


# %% [markdown]
# **1.** The front end's norm as a kernel: program $i$ reads row $i$ of $x$ ([rows, K]), and writes $x/\sqrt{\sum
# x^2+\varepsilon}$ to row $i$ of $y$. (`tl.sum(x, axis=0)`, `tl.rsqrt`.)


# %% tags=["exercise"]
@triton.jit
def normalise(x, y, eps, K: tl.constexpr):
    raise NotImplementedError


check_1(normalise)


# %% tags=["answer"] jupyter={"source_hidden": true}
@triton.jit
def normalise_rows(x, y, eps, K: tl.constexpr):
    at = tl.program_id(0) * K + tl.arange(0, K)
    row = tl.load(x + at)
    tl.store(y + at, row * tl.rsqrt(tl.sum(row * row, axis=0) + eps))


@triton.jit
def normalise_without_square(x, y, eps, K: tl.constexpr):
    at = tl.program_id(0) * K + tl.arange(0, K)
    row = tl.load(x + at)
    tl.store(y + at, row * tl.rsqrt(tl.abs(tl.sum(row, axis=0)) + eps))


assert check_1(normalise_rows)
assert not check_1(normalise_without_square)

# %% [markdown]
# **2.** `recurrence` needs V to be a multiple of BV. Write it for any V: the arguments are those of `recurrence`,
# the last program's columns may lie past the end. (`tl.load(pointer, mask=.., other=0.0)`, `tl.store(pointer, x,
# mask=..)`.)


# %% tags=["exercise"]
@triton.jit
def recurrence_any_V(q, k, v, g, beta, o, T, scale, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    raise NotImplementedError


check_2(recurrence_any_V)


# %% tags=["answer"] jupyter={"source_hidden": true}
@triton.jit
def recurrence_masked(q, k, v, g, beta, o, T, scale, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    head, columns = tl.program_id(0), tl.program_id(1) * BV + tl.arange(0, BV)
    channels = tl.arange(0, K)
    S = tl.zeros([K, BV], tl.float32)
    for t in range(T):
        row = head * T + t
        k_t = tl.load(k + row * K + channels)
        S = tl.exp(tl.load(g + row * K + channels))[:, None] * S
        v_t = tl.load(v + row * V + columns, mask=columns < V, other=0.0)
        u_t = tl.load(beta + row) * (v_t - tl.sum(S * k_t[:, None], axis=0))
        S = S + k_t[:, None] * u_t[None, :]
        q_t = tl.load(q + row * K + channels) * scale
        tl.store(o + row * V + columns, tl.sum(S * q_t[:, None], axis=0), mask=columns < V)


assert check_2(recurrence_masked)
assert not check_2(recurrence)  # its last columns are the next token's first

# %% [markdown]
# **3.** Stage 3 for tiles: program $i$ inverts $I+A_i$ for a strictly lower $A_i$ ([tiles, n, n]). Rows follow from
# the rows above, $X_i=e_i-\sum_{j<i}A_{ij}X_j$. Hint: hold all of $X$ as a matrix, start with the identity, and in
# turn $i$ take row $i$ out of $A$ with `tl.sum(tl.where(rows[:, None] == i, A, 0.0), axis=0)`.


# %% tags=["exercise"]
@triton.jit
def invert(A, X, n: tl.constexpr):
    raise NotImplementedError


check_3(invert)


# %% tags=["answer"] jupyter={"source_hidden": true}
@triton.jit
def substitute(A, X, n: tl.constexpr):
    row, column = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    a = tl.load(A + tl.program_id(0) * n * n + row * n + column)
    x = tl.where(row == column, 1.0, 0.0)
    for i in range(1, n):
        a_i = tl.sum(tl.where(row == i, a, 0.0), axis=0)
        x -= tl.where(row == i, tl.sum(a_i[:, None] * x, axis=0)[None, :], 0.0)
    tl.store(X + tl.program_id(0) * n * n + row * n + column, x)


@triton.jit
def two_terms(A, X, n: tl.constexpr):
    row, column = tl.arange(0, n)[:, None], tl.arange(0, n)[None, :]
    at = tl.program_id(0) * n * n + row * n + column
    tl.store(X + at, tl.where(row == column, 1.0, 0.0) - tl.load(A + at))


assert check_3(substitute)
assert not check_3(two_terms)
