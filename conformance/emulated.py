"""A chunked KDA kernel as a GPU runs it, in plain PyTorch: named steps, rounded where hardware rounds.

Every step is a method, so that a bug is a subclass that overrides one (`kimi_linear.conformance.mutants`). It
shares no code with the reference: `kimi_linear.reference` is what these kernels are judged by.

    for each segment, for each chunk (padded to C rows):              tensors [H, C, ..], fp32
        G     = cumsum(g)                     cumulative
        A     = beta_i <k_i, k_j e^(G_i-G_j)> key_products            operands rounded
        Aqk   = <q_i, k_j e^(G_i-G_j)>        query_products          operands rounded
        T     = (I + A)^-1                    inverse                 fp32, forward substitution
        w, u  = T (beta k e^G), T (beta v)    w_vectors, u_vectors    stored rounded
        v_new = u - w S                       writes
        o     = (q e^G) S + Aqk v_new         output
        S     = e^(G_C) S + (k e^(G_C-G))^T v_new     next_state

Decays between tokens: "rebased" takes sub-chunks of 16 rows with the gate at their first row as reference (matrix
products off the diagonal blocks, differences on them), "pairwise" takes all differences one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from .adapter import Call, Capabilities, Contract
from .by_autograd import gradients_of
from .emulated_checks import REFUSES, HostChecks
from .emulated_decode import POOL, DecodeSteps
from .emulated_front import FRONT_ENDS
from .gold import Results
from .precision import DTYPES, to_format

SUBCHUNK = 16  # rows that share one reference gate


@dataclass
class Emulated(HostChecks, DecodeSteps):
    """An adapter of an emulated kernel; `rebased` chooses the form of the decays."""

    contract: Contract = field(default_factory=lambda: Contract(chunk_size=32))
    rebased: bool = True
    name: str = "emulated"

    def capabilities(self) -> Capabilities:
        return Capabilities(
            operations=("chunk", "decode", "backward"),
            contracts=(self.contract,),
            front_ends=FRONT_ENDS,
            packed_dtype="int64",
            pool=POOL,
            refuses=REFUSES,
        )

    def identity(self) -> str:
        return f"{self.name} ({self.contract})"

    def run(self, call: Call, want: frozenset[str]) -> Results:
        self.check(call)
        if call.operation == "decode":
            return {"o": self.decode(call)}
        if call.do is None:
            with torch.no_grad():
                return self.results(call)
        return self.backward(call)

    def results(self, call: Call) -> Results:
        o, S = self.forward(call)
        return {"o": o, "final_state": S}

    def backward(self, call: Call) -> Results:
        """Gradients by autograd through the same steps, rounded where the forward rounds."""
        do, dht = self.cotangents(call)
        grads = gradients_of(replace(call, do=do, dht=dht), self.results)
        return self.host_gradients(grads, call)

    def cotangents(self, call: Call) -> tuple[Tensor, Tensor]:
        assert call.do is not None
        assert call.dht is not None
        return call.do, call.dht

    def host_gradients(self, grads: Results, call: Call) -> Results:
        return grads

    # Host: layout, segments, heads

    def forward(self, call: Call) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = self.heads(call)
        o = self.allocate(v)
        states: list[Tensor] = []
        for n, (b, start, end) in enumerate(self.segments(call)):
            S = self.initial_state(call, v, n, states)
            rows = [x[b, start:end].transpose(0, 1) for x in (q, k, v, g, beta)]
            o_n, S = self.segment(rows, S)
            o = self.write_rows(o, o_n, b, start, end)
            states.append(S)
        final = torch.stack(states) if states else v.new_zeros(0, v.shape[2], k.shape[-1], v.shape[-1])
        return o.to(DTYPES[self.contract.io]), self.final_state(final, call)

    def heads(self, call: Call) -> tuple[Tensor, ...]:
        group = call.v.shape[2] // call.q.shape[2]
        q, k, v, g, beta = self.front_end(call)
        q, k = (x.repeat_interleave(group, 2) for x in (q, k))
        return self.scale_queries(q, call, v), k, v, self.gate(g), self.strength(beta)

    def scale_queries(self, q: Tensor, call: Call, v: Tensor) -> Tensor:
        return q * call.scale

    def gate(self, g: Tensor) -> Tensor:
        return g

    def strength(self, beta: Tensor) -> Tensor:
        return beta

    def segments(self, call: Call) -> list[tuple[int, int, int]]:
        """Batch item, first token, end of each segment."""
        B, T = call.q.shape[:2]
        if call.cu_seqlens is None:
            return [(b, 0, T) for b in range(B)]
        ends = call.cu_seqlens.tolist()
        return [(0, start, end) for start, end in pairwise(ends)]

    def initial_state(self, call: Call, v: Tensor, n: int, states: list[Tensor]) -> Tensor:
        if call.initial_state is None:
            return v.new_zeros(v.shape[2], call.q.shape[-1], v.shape[-1])
        return call.initial_state[n].float()

    def allocate(self, v: Tensor) -> Tensor:
        return torch.zeros_like(v)

    def write_rows(self, o: Tensor, o_n: Tensor, b: int, start: int, end: int) -> Tensor:
        index = torch.arange(start, end)
        rows = torch.zeros_like(o).index_put((torch.tensor(b), index), o_n.transpose(0, 1))
        kept = torch.ones_like(o[..., :1]).index_put((torch.tensor(b), index), torch.tensor(0.0))
        return o * kept + rows

    def final_state(self, S: Tensor, call: Call) -> Tensor:
        return S

    def segment(self, rows: list[Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
        """One segment, [H, T, ..], chunk after chunk."""
        C, T = self.contract.chunk_size or 1, rows[0].shape[1]
        outputs = [rows[2][:, :0]]
        for start in range(0, T, C):
            length = min(C, T - start)
            chunk = [self.pad(x[:, start : start + length], C) for x in rows]
            o, S = self.chunk(chunk, S, length)
            S = to_format(S, self.contract.state)
            outputs.append(o[:, :length])
        return torch.cat(outputs, 1), S

    def pad(self, x: Tensor, C: int) -> Tensor:
        return torch.cat([x, x.new_zeros(x.shape[0], C - x.shape[1], *x.shape[2:])], 1)

    # Device: one chunk

    def chunk(self, rows: list[Tensor], S: Tensor, length: int) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = rows
        G = self.cumulative(g)
        A = self.key_products(k, beta, G)
        Aqk = self.query_products(q, k, G)
        T = self.inverse(A)
        w = self.stored(self.w_vectors(T, k, beta, G))
        u = self.stored(self.u_vectors(T, v, beta))
        v_new = self.writes(u, w, S)
        o = self.output(q, Aqk, S, v_new, G)
        return o, self.next_state(S, k, v_new, G, self.last_gate(G, length))

    def cumulative(self, g: Tensor) -> Tensor:
        return g.cumsum(1)

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def last_gate(self, G: Tensor, length: int) -> Tensor:
        return G[:, -1:]

    def key_products(self, k: Tensor, beta: Tensor, G: Tensor) -> Tensor:
        return torch.tril(beta[..., None] * self.decayed(k, k, G), -1)

    def query_products(self, q: Tensor, k: Tensor, G: Tensor) -> Tensor:
        return torch.tril(self.decayed(q, k, G))

    def decayed(self, x: Tensor, y: Tensor, G: Tensor) -> Tensor:
        """<x_i, y_j exp(G_i - G_j)> for j <= i; what stands above the diagonal does not matter."""
        C = x.shape[1]
        if not self.rebased or C <= SUBCHUNK:
            return self.pairwise(x, y, G)
        bands = []
        for start in range(0, C, SUBCHUNK):
            own = slice(start, start + SUBCHUNK)
            reference = G[:, start : start + 1]
            left = x[:, own] * self.exp(G[:, own] - reference)
            right = y[:, :start] * self.exp(reference - G[:, :start])
            before = self.product(left, right.transpose(1, 2))
            inside = self.pairwise(x[:, own], y[:, own], G[:, own])
            after = x.new_zeros(x.shape[0], SUBCHUNK, C - start - SUBCHUNK)
            bands.append(torch.cat([before, inside, after], -1))
        return torch.cat(bands, 1)

    def pairwise(self, x: Tensor, y: Tensor, G: Tensor) -> Tensor:
        return (x[:, :, None] * y[:, None] * self.pair_decay(G)).sum(-1)

    def pair_decay(self, G: Tensor) -> Tensor:
        """exp(G_i - G_j), masked before the exponential; the diagonal is 1 and has no gradient."""
        future = torch.triu(torch.ones(G.shape[1], G.shape[1], dtype=torch.bool), 1)[None, :, :, None]
        itself = torch.eye(G.shape[1], dtype=torch.bool)[None, :, :, None]
        apart = (G[:, :, None] - G[:, None]).masked_fill(itself, 0.0)
        return self.exp(apart.masked_fill(future, -torch.inf))

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return to_format(x, self.contract.operand) @ to_format(y, self.contract.operand)

    def stored(self, x: Tensor) -> Tensor:
        return to_format(x, self.contract.operand)

    def inverse(self, A: Tensor) -> Tensor:
        eye = torch.eye(A.shape[-1]).expand_as(A)
        return torch.linalg.solve_triangular(eye + A, eye, upper=False, unitriangular=True)

    def w_vectors(self, T: Tensor, k: Tensor, beta: Tensor, G: Tensor) -> Tensor:
        return self.product(T, beta[..., None] * k * self.exp(G))

    def u_vectors(self, T: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return self.product(T, beta[..., None] * v)

    def writes(self, u: Tensor, w: Tensor, S: Tensor) -> Tensor:
        return u - self.product(w, S)

    def output(self, q: Tensor, Aqk: Tensor, S: Tensor, v_new: Tensor, G: Tensor) -> Tensor:
        return self.product(q * self.exp(G), S) + self.product(Aqk, v_new)

    def next_state(self, S: Tensor, k: Tensor, v_new: Tensor, G: Tensor, G_last: Tensor) -> Tensor:
        k_to_end = k * self.exp(G_last - G)
        return self.exp(G_last).transpose(1, 2) * S + self.product(k_to_end.transpose(1, 2), v_new)


class EmulatedRecurrent(Emulated):
    """The token-by-token kernel: fp32 arithmetic, the state rounded to its format after every token."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), operations=("recurrent", "decode", "backward"))

    def segment(self, rows: list[Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [rows[2][:, :0]]
        for t in range(rows[0].shape[1]):
            o, S = self.token([x[:, t] for x in rows], S)
            S = to_format(S, self.contract.state)
            outputs.append(o[:, None])
        return torch.cat(outputs, 1), S
