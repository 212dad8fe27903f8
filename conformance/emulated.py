"""A chunked KDA kernel as a GPU runs it, in plain PyTorch: named steps, rounded where hardware rounds.

Every step is a method, so that a bug is a subclass that overrides one (`kimi_linear.conformance.mutants`). It
shares no code with the reference: `kimi_linear.reference` is what these kernels are judged by.

Here is the host's side: what a call is cut into, and what becomes of the results. The steps of one chunk are in
`emulated_chunk.py`, those of decoding in `emulated_decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from .adapter import Call, Capabilities, Contract
from .by_autograd import gradients_of
from .emulated_checks import REFUSES, HostChecks
from .emulated_chunk import ChunkSteps
from .emulated_conv import CONV, ConvSteps
from .emulated_decode import POOL, DecodeSteps
from .emulated_front import FRONT_ENDS
from .gold import Results
from .precision import DTYPES, to_format


@dataclass
class Emulated(HostChecks, ChunkSteps, DecodeSteps, ConvSteps):
    """An adapter of an emulated kernel; `rebased` chooses the form of the decays."""

    contract: Contract = field(default_factory=lambda: Contract(chunk_size=32))
    rebased: bool = True
    name: str = "emulated"

    def capabilities(self) -> Capabilities:
        return Capabilities(
            operations=("chunk", "decode", "backward", "short_conv"),
            contracts=(self.contract,),
            front_ends=FRONT_ENDS,
            packed_dtype="int64",
            pool=POOL,
            short_conv=CONV,
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


class EmulatedRecurrent(Emulated):
    """The token-by-token kernel: fp32 arithmetic, the state rounded to its format after every token."""

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), operations=("recurrent", "decode", "backward", "short_conv"))

    def segment(self, rows: list[Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
        outputs = [rows[2][:, :0]]
        for t in range(rows[0].shape[1]):
            o, S = self.token([x[:, t] for x in rows], S)
            S = to_format(S, self.contract.state)
            outputs.append(o[:, None])
        return torch.cat(outputs, 1), S
