# %% [markdown]
# # 10. Port your own kernel
#
# *You have written KDA for a new machine. On your test it gives the right numbers. Is it right?*
#
# The machine will be NumPy, which is enough to make every mistake that people made elsewhere. You need notebook 5
# (the stages) and 6 (why there is no one tolerance). At the end stands a kernel, a report that says it is right,
# and an idea of how you would get there with one of your own.

# %%
from itertools import pairwise

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor

from kimi_linear.conformance.adapter import Call, Capabilities, Contract
from kimi_linear.conformance.museum import bug_named
from kimi_linear.conformance.suite import run_suite
from kimi_linear.reference.naive import recurrent_kda
from tools import checker, expect, show

torch.set_num_threads(1)  # of small tensors
Array = np.ndarray
C = 16  # tokens a chunk

# %% [markdown]
# ## The kernel
#
# One head, one chunk, the six stages in the order of notebook 5. `decays` and `inverse` come from what notebook 6
# taught: decays are products of decays, row by row, so nothing overflows; the inverse is forward substitution.


# %%
def decays(g: Array) -> Array:
    """D_ij = exp(g_{j+1} + .. + g_i) for j <= i, else 0: [C, C, K]."""
    D = np.zeros((len(g), *g.shape), np.float32)
    for i in range(len(g)):
        if i > 0:
            D[i] = np.exp(g[i]) * D[i - 1]
        D[i, i] = 1
    return D


def substitute(A: Array) -> Array:
    """(I + A)^-1 for strictly lower A, row by row."""
    T = np.eye(len(A), dtype=np.float32)
    for i in range(1, len(A)):
        T[i] -= A[i, :i] @ T[:i]
    return T


# %%
class Chunks:
    """The device: one chunk of one head. Every step that a mistake can sit in is a method."""

    def chunk(self, q: Array, k: Array, v: Array, g: Array, beta: Array, S: Array) -> tuple[Array, Array]:
        """o [C, V] and the state after the chunk; q is scaled already."""
        D, start = decays(g), np.exp(np.cumsum(g, axis=0))  # stage 1
        A = np.tril(beta[:, None] * np.einsum("ik,jk,ijk->ij", k, k, D), -1)  # stage 2
        Aqk = np.einsum("ik,jk,ijk->ij", q, k, D)
        T = self.inverse(A)  # stage 3
        w, u = T @ (beta[:, None] * k * self.seen_by(start)), T @ (beta[:, None] * v)  # stage 4
        v_new = u - w @ S  # stage 5
        S_next = start[-1][:, None] * S + (k * D[-1]).T @ v_new
        return (q * start) @ S + Aqk @ v_new, S_next  # stage 6

    def inverse(self, A: Array) -> Array:
        return substitute(A)

    def seen_by(self, start: Array) -> Array:
        """The decay in w: what a token's prediction sees of the state at the chunk's start."""
        return start


# %% [markdown]
# Around it stands what is called the host code. It is dull, and half of all bugs are in it: packed segments one
# after the other in one row, heads, chunks that are not full, states in and out.


# %%
class Host(Chunks):
    """The host: segments, heads and chunks, and who starts from which state."""

    def forward(self, q, k, v, g, beta, scale, h0, offsets) -> tuple[Array, Array]:
        """Segments in one row: q, k [T, H, K], v [T, HV, V]; h0 [N, HV, K, V] or None. Returns o and the states."""
        (_, H, K), (T, HV, V) = q.shape, v.shape
        o, states = np.zeros((T, HV, V), np.float32), np.zeros((len(offsets) - 1, HV, K, V), np.float32)
        for n, (first, end) in enumerate(pairwise(offsets)):
            for hv in range(HV):
                h, S = hv // (HV // H), self.first_state(states, h0, n, hv)
                for t in range(first, end, C):
                    rows = self.rows(t, end)
                    gates, strengths = g[rows, self.gate_head(hv)], self.strength(beta[rows, hv])
                    o[rows, hv], S = self.chunk(scale * q[rows, h], k[rows, h], v[rows, hv], gates, strengths, S)
                states[n, hv] = self.last_state(S)
        return o, states

    def rows(self, t: int, end: int) -> slice:
        return slice(t, min(t + C, end))


# %%
class Kernel(Host):
    """The rest of the host, as small as it can be."""

    def first_state(self, states: Array, h0: Array | None, n: int, hv: int) -> Array:
        return np.zeros_like(states[n, hv]) if h0 is None else h0[n, hv]

    def last_state(self, S: Array) -> Array:
        return S

    def gate_head(self, hv: int) -> int:
        return hv

    def strength(self, beta: Array) -> Array:
        return beta


# %% [markdown]
# ## The smallest test, which everybody writes
#
# Random inputs, a comparison with PyTorch, a tolerance of a percent.


# %%
def everyday_test(kernel: Kernel) -> bool:
    rng = torch.Generator().manual_seed(10)
    q, k = (torch.nn.functional.normalize(torch.randn(1, 64, 1, 32, generator=rng), dim=-1) for _ in "qk")
    v, g = torch.randn(1, 64, 1, 32, generator=rng), -0.05 * torch.rand(1, 64, 1, 32, generator=rng)
    beta = torch.rand(1, 64, 1, generator=rng)
    want, _ = recurrent_kda(q, k, v, g, beta)
    arrays = (x[0].numpy() for x in (q, k, v, g, beta))
    o, _ = kernel.forward(*arrays, 32**-0.5, None, [0, 64])
    return bool(np.allclose(o, want[0].numpy(), atol=1e-2, rtol=1e-2))


assert everyday_test(Kernel())
print("the everyday test passes. Ship it?")

# %% [markdown]
# ## Mistakes that people really made
#
# Eight of them, each in a few lines, each after a public report against code that was in use.


# %%
class GateOfTheFirstHead(Kernel):
    def gate_head(self, hv):
        return 0


class StateLeaks(Kernel):
    """A packed segment starts from the state of the one before."""

    def first_state(self, states, h0, n, hv):
        return states[n - 1, hv] if h0 is None and n > 0 else super().first_state(states, h0, n, hv)


# %%
class EmptySegmentIsStale(Kernel):
    """A segment without tokens runs no chunk, and stores as its state what lies in the buffer."""

    def chunk(self, *inputs):
        o, self.buffer = super().chunk(*inputs)
        return o, self.buffer

    def last_state(self, S):
        return getattr(self, "buffer", S)


# %%
class StateTransposed(Kernel):
    def last_state(self, S):
        return S.T if S.shape[0] == S.shape[1] else S


class InverseByDoubling(Kernel):
    """(I - A)(I + A^2)(I + A^4)(I + A^8) in fp16: notebook 6."""

    def inverse(self, A):
        eye, power = np.eye(C, dtype=np.float16), np.zeros((C, C), np.float16)
        power[: len(A), : len(A)] = A
        X = eye - power
        for _ in range(3):
            power = power @ power
            X = X @ (eye + power)
        return X[: len(A), : len(A)].astype(np.float32)


# %%
class TailIsNotMasked(Kernel):
    """The last chunk of a segment reads on into the next one."""

    def rows(self, t, end):
        return slice(t, t + C)


class SecondSigmoid(Kernel):
    def strength(self, beta):
        return 1 / (1 + np.exp(-beta))


class StrengthInBf16(Kernel):
    def strength(self, beta):
        return torch.from_numpy(np.ascontiguousarray(beta)).bfloat16().float().numpy()


# %% [markdown]
# What happened to the people who met them is written down in `kimi_linear.conformance.museum`, with a reason why
# the tests of that project were green, where the report gives one.

# %%
REPORTS = {
    GateOfTheFirstHead: "flash-linear-attention #1115",
    StateLeaks: "flash-linear-attention #1184",
    EmptySegmentIsStale: "FlashKDA #24",
    StateTransposed: "vllm #41292",
    InverseByDoubling: "tt-metal #54813",
    TailIsNotMasked: "flash-linear-attention #1142",
    SecondSigmoid: "sglang #17508",
    StrengthInBf16: "sglang #40362",
}
passed = {kind.__name__: everyday_test(kind()) for kind in REPORTS}
for kind, report in REPORTS.items():
    bug = bug_named(report)
    print(f"{kind.__name__}: everyday test {'PASSES' if passed[kind.__name__] else 'fails'}; {report}")
    print(f"    effect: {bug.effect}" + (f"; missed: {bug.missed}" if bug.missed else ""))

# %% [markdown]
# A single segment of one head, a whole number of chunks, keys that are random, $K=V$, no state in or out, an error
# of a percent allowed: the test looks where only one of these mistakes is. A better test is not a smaller tolerance
# but *other inputs*.
#
# ## Plugging the kernel in
#
# `kimi_linear.conformance` has such inputs. It wants three functions: what the kernel can do and in which
# precision; which code it is; and a call. The precision matters, since what may be wrong is not a constant: the
# judge runs the fp64 code with the roundings that the contract names, on each input, and takes the spread (notebook
# 6).


# %%
class Adapter:
    """A kernel of this notebook for the judge."""

    def __init__(self, kernel: Kernel, **changes) -> None:
        contract = Contract(io="fp32", operand="fp32", chunk_size=C, decay="sums")
        self.kernel, self.caps = kernel, Capabilities(**{"contracts": (contract,), **changes})

    def capabilities(self) -> Capabilities:
        return self.caps

    def identity(self) -> str:
        return f"NumPy, {type(self.kernel).__name__}"

    def run(self, call: Call, want: frozenset[str]) -> dict[str, Tensor]:
        B, T = call.q.shape[:2]
        offsets = [b * T for b in range(B + 1)] if call.cu_seqlens is None else call.cu_seqlens.tolist()
        h0 = None if call.initial_state is None else call.initial_state.numpy()
        return self.results(call, offsets, h0)


# %%
def results(self, call: Call, offsets: list[int], h0: Array | None) -> dict[str, Tensor]:
    arrays = [x.flatten(0, 1).numpy() for x in (call.q, call.k, call.v, call.g, call.beta)]
    with np.errstate(over="ignore", invalid="ignore"):  # the judge puts NaN beside the segments, to see who reads it
        o, states = self.kernel.forward(*arrays, call.scale, h0, offsets)
    return {"o": torch.from_numpy(o).view(call.v.shape), "final_state": torch.from_numpy(states)}


Adapter.results = results
CHECKS = {
    "gate.per_head": "ratio",
    "relation.packed_no_state": "relation",
    "packing.empty_middle": "ratio",
    "values.square_state": "ratio",
    "keys.cosine_0.9": "ratio",
    "exact.packed": "exact",
    "limit.deltanet": "limit",
    "probe.beta_bf16": "probe",
}

# %% [markdown]
# Its checks come in five kinds, of which we take eight examples:
#
# - *exact*: integers so small that every rounding is exact. The bits must be right.
# - *relation*: the kernel against itself. No initial state gives the bits of a state of zeros.
# - *limit*: cases in which KDA is something simpler, with a formula of its own.
# - *ratio*: hard inputs; the error over the envelope must stay below 4.
# - *probe*: is the error *in the direction* of a known slip? It sees errors far below any tolerance.


# %%
def failures(adapter: Adapter, checks=tuple(CHECKS)) -> list[str]:
    report = run_suite(adapter, only=checks)
    assert report.count("skip") == 0
    return [verdict.id for verdict in report.verdicts if verdict.failed]


assert failures(Adapter(Kernel())) == []
found = {kind.__name__: failures(Adapter(kind())) for kind in REPORTS}

# %%
columns = ["everyday test", *CHECKS]
seen = torch.tensor([[not passed[name], *(check in checks for check in CHECKS)] for name, checks in found.items()])
figure, axes = plt.subplots(figsize=(8.5, 4))
axes.imshow(seen, cmap="Blues", vmin=0, vmax=1.4, aspect="auto")
axes.set_xticks(range(len(columns)), columns, rotation=30, ha="right")
axes.set_yticks(range(len(found)), list(found))
for row, column in seen.nonzero().tolist():
    axes.annotate("seen", (column, row), ha="center", va="center", color="white", fontsize=8)
axes.axvline(0.5, color="C1")
axes.set(xlabel="check", ylabel="mistake planted")
axes.grid(False)
show(
    figure,
    "left of the orange line is the test that everybody writes, right of it eight checks that know where to look.",
)

# %%
print(
    f"the everyday test sees {seen[:, 0].sum()} of {len(seen)} mistakes, the eight checks {seen[:, 1:].any(1).sum()}"
)
assert seen[:, 1:].any(1).all()
assert seen[:, 0].sum() <= 2
only_one = [name for name, checks in found.items() if len(checks) == 1]
print("seen by one check alone:", ", ".join(f"{name} ({found[name][0]})" for name in only_one))

# %% [markdown]
# ## Reading the report
#
# A red light is not enough to find a bug. Here is what the judge says about the transposed state, as `kimi-linear
# conformance run my_kernel.py` prints it:

# %%
from kimi_linear.conformance.page import page
from kimi_linear.conformance.report import explain_failures, text

broken = Adapter(StateTransposed())
failed = run_suite(broken, only=["values.square_state"])
explained = explain_failures(failed, broken, "my_kernel.py")
print(text(failed, broken, "my_kernel.py", explained=explained))
html = page(failed, explained, "my_kernel.py")  # the same with pictures: `conformance run .. --report page.html`
print(f"as a page: {len(html) / 1024:.0f} KiB of HTML, nothing loaded from elsewhere")
assert "StateShape" in html

# %% [markdown]
# From the top: what the check is for; by how much which result is off, in units of what rounding may do; the first
# bad row, and how many there are; for a result of tokens, whether the error grows, which tells one wrong read from
# an error that feeds on itself; which of the planted bugs errs *in the same direction*; the smallest case that
# still fails, here one without a single token, since the state alone is enough; and how to see it again.
#
# ## Fixed
#
# Taking the mistakes out again is deleting the subclasses. The kernel itself, before the quick suite:

# %%
import time

start = time.perf_counter()
report = run_suite(Adapter(Kernel()), full=False)
seconds = time.perf_counter() - start
for kind in ("exact", "relation", "limit", "ratio", "probe"):
    verdicts = [verdict for verdict in report.verdicts if verdict.tier == kind]
    print(f"{kind:9} {sum(v.status == 'pass' for v in verdicts):>3} pass, {sum(v.failed for v in verdicts)} fail")
worst = max((v for v in report.verdicts if v.tier == "ratio" and v.status == "pass"), key=lambda v: v.worst)
print(f"nearest to its limit: {worst.id}, {worst.worst:.2f} of {worst.limit:g}")
print(f"not asked, since not declared (a backward, a front end, ..): {report.count('skip')} checks")
assert report.ok

# %% [markdown]
# ## What it cost
#
# The judge is judged the same way: bugs are planted in kernels that are right, and it has to see each one and to
# pass the kernels ([its score](../docs/conformance-score.md)). What you pay is the truth in fp64 and a few rounded
# copies of it, for each case:

# %%
from kimi_linear.conformance.mutants import MUTANTS

print(f"{len(MUTANTS)} bugs are planted to judge the judge")
print(f"{len(report.verdicts)} checks of the quick suite took {seconds:.0f} s here, the kernel's own time included")

# %% [markdown]
# ## Exercises


# %% tags=["checker"] jupyter={"source_hidden": true}
class Mystery(Kernel):
    def last_state(self, S):
        return S

    def gate_head(self, hv):
        return hv ^ 1 if hv else hv

    def strength(self, beta):
        return beta


@checker
def check_1(culprit):
    methods = ("inverse", "seen_by", "rows", "first_state", "last_state", "gate_head", "strength")
    expect(culprit() in methods, f"one of {', '.join(methods)}; got {culprit()!r}")
    expect(culprit() == "gate_head", f"with {culprit()} as in Kernel, Mystery still fails")


# %% tags=["checker"] jupyter={"source_hidden": true}
@checker
def check_2(inverse):
    inverse(np.zeros((2, 2), np.float32))

    class Theirs(Kernel):
        def inverse(self, A):
            return inverse(A)

    failed = failures(Adapter(Theirs()), ["exact.dense", "keys.cosine_0.99", "keys.runs"])
    expect(not failed, f"the judge says no: {', '.join(failed)}")


# %% tags=["checker"] jupyter={"source_hidden": true}
class Foreign(Kernel):
    """Gates in log2 units, states [V, K], beta as a logit."""

    def forward(self, q, k, v, g, beta, scale, h0, offsets):
        h0 = None if h0 is None else np.swapaxes(h0, 2, 3)
        g, beta = g * np.float32(np.log(2)), 1 / (1 + np.exp(-beta))
        o, states = super().forward(q, k, v, g, beta, scale, h0, offsets)
        return o, np.ascontiguousarray(np.swapaxes(states, 2, 3))


@checker
def check_3(conventions):
    adapter = Adapter(Foreign(), **conventions())
    failed = failures(adapter, ["gate.per_head", "values.square_state", "shape.K=40,V=8"])
    expect(not failed, f"called as declared, it fails {', '.join(failed)}")


# %% [markdown]
# **1.** `Mystery` has one method that is not as it should be. Do not look; ask the judge (the next cell), and name
# the method as a string: `inverse`, `seen_by`, `rows`, `first_state`, `last_state`, `gate_head` or `strength`.

# %%
mystery = Adapter(Mystery())
print(f"everyday test: {'passes' if everyday_test(Mystery()) else 'fails'}")
print(text(run_suite(mystery, only=["exact.packed", "gate.per_head"]), mystery, "mystery.py"))


# %% tags=["exercise"]
def culprit() -> str:
    raise NotImplementedError


check_1(culprit)

# %% tags=["answer"] jupyter={"source_hidden": true}
# Some heads are wrong from their first token on, and worst where heads forget at different speed.
assert check_1(lambda: "gate_head")
assert not check_1(lambda: "strength")

# %% [markdown]
# **2.** Replace forward substitution by blocks: invert the diagonal blocks of 1, 2, 4, 8 rows in turn, and merge
# two neighbours $X$, $Y$ with the block $R$ of $A$ below $X$ by $-YRX$. `A` is [c, c] with c up to 16, and not
# always a power of two: fill it up with zeros first. The judge decides.


# %% tags=["exercise"]
def inverse_by_blocks(A: Array) -> Array:
    raise NotImplementedError


check_2(inverse_by_blocks)


# %% tags=["answer"] jupyter={"source_hidden": true}
def merge_blocks(A: Array) -> Array:
    c = len(A)
    full, X = np.zeros((C, C), np.float32), np.eye(C, dtype=np.float32)
    full[:c, :c] = A
    for h in (1, 2, 4, 8):
        for start in range(0, C, 2 * h):
            left, right = slice(start, start + h), slice(start + h, start + 2 * h)
            X[right, left] = -X[right, right] @ full[right, left] @ X[left, left]
    return X[:c, :c]


assert check_2(merge_blocks)
assert not check_2(lambda A: np.eye(len(A), dtype=np.float32) - A + A @ A)  # a series, cut short

# %% [markdown]
# **3.** A kernel called `Foreign` takes gates in log2 units, keeps states as [V, K], and takes beta as a logit. Do
# not change it: declare it. Return the fields of `Capabilities` that say so, as a dictionary (`help(Capabilities)`;
# a logit gives no beta above 1).


# %% tags=["exercise"]
def conventions() -> dict:
    raise NotImplementedError


check_3(conventions)

# %% tags=["answer"] jupyter={"source_hidden": true}
declared = {"log_base": "2", "state_layout": "VK", "beta": "logit", "beta_above_one": False}
assert check_3(lambda: declared)
assert not check_3(lambda: {**declared, "state_layout": "KV"})
