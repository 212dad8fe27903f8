"""Relations: what holds between a kernel's own results, bit by bit, with no truth to compare with.

Each names a way in which kernels go wrong. A relation raises RelationBroken with what does not hold.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .bench import TOKEN_TENSORS, Bench, changed, joined, must_equal, tokens
from .draws import DEAD
from .relation import relation

RERUNS = 3
STRESS = 20


@relation("causality", "a gate reference, mask or tile that looks ahead")
def causality(bench: Bench) -> None:
    """Outputs before a token are the same bits whatever comes from it on."""
    case = bench.case()
    x, other = bench.inputs(case), bench.inputs(replace(case, seed=2, gate="typical"))
    o = bench.run(case, x)["o"]
    for t in sorted({1, bench.C // 4, bench.C // 2 + 1, bench.C - 1, bench.C, bench.C + 3}):
        mixed = joined(tokens(x, slice(0, t)), tokens(other, slice(t, None)))
        must_equal(bench.run(case, mixed)["o"][:, :t], o[:, :t], f"o before token {t}, with other tokens from {t} on")


@relation("batch_order", "an index that mixes batch items")
def batch_order(bench: Bench) -> None:
    """Batch items in reverse give results in reverse."""
    case = bench.case(B=3, T="C+3")
    x = bench.inputs(case)
    flipped = {name: getattr(x, name).flip(0) for name in (*TOKEN_TENSORS, "h0")}
    want, got = bench.run(case, x), bench.run(case, changed(x, **flipped))
    for name in want:
        must_equal(got[name].flip(0), want[name], f"{name} of a batch in reverse order")


@relation("alone", "a neighbour in the batch that changes a result")
def alone(bench: Bench) -> None:
    """A batch item alone gives the bits that it gives in company."""
    case = bench.case(T="C+3")
    x = bench.inputs(case)
    want = bench.run(case, x)
    one = {name: getattr(x, name)[1:] for name in (*TOKEN_TENSORS, "h0")}
    got = bench.run(replace(case, B=1), changed(x, **one))
    for name in want:
        must_equal(got[name], want[name][1:], f"{name} of the second batch item alone")


@relation("head_order", "an index that mixes heads, or gives a value head the wrong key head")
def head_order(bench: Bench) -> None:
    """Heads in reverse order, with the key heads they belong to, give results in reverse order."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    flipped = {name: getattr(x, name).flip(2) for name in TOKEN_TENSORS}
    want = bench.run(case, x)
    got = bench.run(case, changed(x, **flipped, h0=None if x.h0 is None else x.h0.flip(1)))
    must_equal(got["o"].flip(2), want["o"], "o of heads in reverse order")
    must_equal(got["final_state"].flip(1), want["final_state"], "final_state of heads in reverse order")


@relation("batch_neighbours", "an index that mixes heads or batch items, or a multiplication as a mask")
def batch_neighbours(bench: Bench) -> None:
    """NaN in another batch item and in another head leaves a head alone."""
    case = bench.case(T="C+3")
    x = bench.inputs(case)
    want = bench.run(case, x)
    bad = {name: getattr(x, name).clone() for name in ("q", "k", "v", "beta", "h0")}
    for y in bad.values():
        y[1] = torch.nan
    for name in ("q", "k", "v", "beta"):
        bad[name][0, :, -1] = torch.nan
    bad["h0"][0, -1] = torch.nan
    got = bench.run(case, changed(x, **bad), finite=False)
    must_equal(got["o"][0, :, 0], want["o"][0, :, 0], "o of a head beside heads of NaN")
    must_equal(got["final_state"][0, 0], want["final_state"][0, 0], "final_state of a head beside heads of NaN")


@relation("scaled_values", "a rounding or a threshold that depends on size; a state that is added twice", "scaling")
def scaled_values(bench: Bench) -> None:
    """4 v and 4 h0 give 4 o and 4 S; -v and -h0 give -o and -S."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    want = bench.run(case, x)
    for factor in (4.0, -1.0, 2.0**-10):
        assert x.h0 is not None
        got = bench.run(case, changed(x, v=factor * x.v, h0=factor * x.h0))
        for name in want:
            must_equal(got[name], factor * want[name], f"{name} of values and state times {factor:g}")


@relation("scaled_queries", "a query that enters elsewhere than in the output", "scaling", "plain")
def scaled_queries(bench: Bench) -> None:
    """q / 2 gives o / 2 and the same state."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    want, got = bench.run(case, x), bench.run(case, changed(x, q=x.q / 2))
    must_equal(got["o"], want["o"] / 2, "o of half the queries")
    must_equal(got["final_state"], want["final_state"], "final_state of half the queries")


@relation("signs", "a transposed state; an absolute value or a clamp where none belongs")
def signs(bench: Bench) -> None:
    """Signs D of the key channels, on q, k and h0, leave o and give D S."""
    case = bench.case(B=1, T="C+3")
    x = bench.inputs(case)
    D = torch.where(torch.arange(x.q.shape[-1]) % 3 == 0, -1.0, 1.0).double()
    assert x.h0 is not None
    want = bench.run(case, x)
    got = bench.run(case, changed(x, q=D * x.q, k=D * x.k, h0=D[:, None] * x.h0))
    must_equal(got["o"], want["o"], "o with the signs of some key channels turned")
    must_equal(got["final_state"], D[:, None] * want["final_state"], "final_state with signs turned")


@relation("reset", "a state or a gate that survives a decay of zero", "plain", "any_gate")
def reset(bench: Bench) -> None:
    """A gate of -1e4 at a chunk's first token makes what follows independent of what came before."""
    case = bench.case(B=1, T="2C+3")
    x = bench.inputs(case)
    g = x.g.clone()
    g[:, bench.C] = DEAD
    x = changed(x, g=g)
    got = bench.run(case, x)
    fresh = changed(tokens(x, slice(bench.C, None)), h0=None)
    want = bench.run(replace(case, state="none"), fresh)
    must_equal(got["o"][:, bench.C :], want["o"], "o after a reset, against a fresh start")
    must_equal(got["final_state"], want["final_state"], "final_state after a reset, against a fresh start")


@relation("lookup", "a write that adds where it has to replace", "plain")
def lookup(bench: Bench) -> None:
    """Unit keys, beta = 1, no gate: asking for the key just written gives back the value, scaled."""
    case = bench.case(keys="signed_one_hot", gate="zero", beta="one", values="small_integers", state="small_integers")
    x = bench.inputs(case)
    x = changed(x, q=x.k)
    want = (x.scale * x.v).to(bench.problem(case, x).call.v.dtype)
    must_equal(bench.run(case, x)["o"], want, "o at the key just written")


@relation("no_state", "a kernel that starts from stale memory")
def no_state(bench: Bench) -> None:
    """No initial state is a state of zeros."""
    case = bench.case(B=1, T="C+3", state="none")
    x = bench.inputs(case)
    zeros = torch.zeros(1, x.v.shape[2], x.q.shape[-1], x.v.shape[-1]).double()
    want, got = bench.run(case, changed(x, h0=zeros)), bench.run(case, x)
    for name in want:
        must_equal(got[name], want[name], f"{name} without an initial state, against one of zeros")


@relation("rerun", "a race, an atomic sum, or a cache with the wrong key")
def rerun(bench: Bench) -> None:
    """The same call gives the same bits, other shapes between."""
    case, other = bench.case(), bench.case(B=1, T=7, K=8, V=20, gate="typical")
    want = bench.run(case)
    for again in range(RERUNS):
        if again % 2 == 0:
            bench.run(other)
        got = bench.run(case)
        for name in want:
            must_equal(got[name], want[name], f"{name} of run {again + 2}")


@relation("overwrite", "a second write that adds to the first", "plain")
def overwrite(bench: Bench) -> None:
    """A key written twice with beta = 1, and no gate, holds the second value and nothing of the first."""
    case = bench.case(keys="cycle", gate="zero", beta="one", values="small_integers", state="none")
    case = replace(case, T=case.K + 9)
    x, K = bench.inputs(case), case.K
    doubled = changed(x, q=x.k, v=torch.cat([x.v[:, :K] * 2, x.v[:, K:]], 1))
    want, got = bench.run(case, changed(x, q=x.k)), bench.run(case, doubled)
    must_equal(got["o"][:, K:], want["o"][:, K:], "o at keys that were written again, whatever they held before")


@relation("interleaved", "a cache or a compiled kernel that forgets a dtype or a mode", "several")
def interleaved(bench: Bench) -> None:
    """Calls under the kernel's other contracts between two equal calls leave the second as the first was."""
    case = bench.case(T="C/2+3")
    want = bench.run(case)
    for contract in bench.caps.contracts:
        other = replace(bench, contract=contract)
        other.run(other.case(T="C/2+3"))
    got = bench.run(case)
    for name in want:
        must_equal(got[name], want[name], f"{name} after calls under other contracts")


@relation("stress", "a race that shows now and then", quick=False)
def stress(bench: Bench) -> None:
    """Twenty runs of the same call, of several sizes, give the same bits."""
    for case in (bench.case(), bench.case(B=1, T="C+1", H=1), bench.case(T="C/4")):
        want = bench.run(case)
        for again in range(2, STRESS + 1):
            got = bench.run(case)
            for name in want:
                must_equal(got[name], want[name], f"{name} of run {again}")


@relation("linear_gradients", "gradients added to what a buffer held; a clamp in the backward", "backward", "scaling")
def linear_gradients(bench: Bench) -> None:
    """Twice the cotangents give twice the gradients."""
    case = bench.case(B=1, T="C+3", flags=("gradients",))
    x = bench.inputs(case)
    assert x.do is not None
    assert x.dht is not None
    want, got = bench.run(case, x), bench.run(case, changed(x, do=2 * x.do, dht=2 * x.dht))
    for name in want:
        must_equal(got[name], 2 * want[name], f"{name} of twice the cotangents")
