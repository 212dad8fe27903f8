"""Bugs of the backward; the forward is untouched. A term is dropped by detaching what it flows through."""

# mypy: disable-error-code="no-untyped-def, override"

from __future__ import annotations

from functools import cached_property

import torch

from ..emulated import Emulated
from .registry import mutant


@mutant("backward", "dh0 is dropped")
class GradStateDropped(Emulated):
    def host_gradients(self, grads, call):
        return {**grads, "dh0": 0 * grads["dh0"]}


@mutant("backward", "no dg through A")
class GradGateOfKeys(Emulated):
    def key_products(self, k, beta, G):
        return super().key_products(k, beta, G.detach())


@mutant("backward", "no dg through Aqk")
class GradGateOfQueries(Emulated):
    def query_products(self, q, k, G):
        return super().query_products(q, k, G.detach())


@mutant("backward", "no dk through A")
class GradKeysOfKeys(Emulated):
    def key_products(self, k, beta, G):
        return super().key_products(k.detach(), beta, G)


@mutant("backward", "no dbeta through A")
class GradBetaOfKeys(Emulated):
    def key_products(self, k, beta, G):
        return super().key_products(k, beta.detach(), G)


@mutant("backward", "no dk through Aqk")
class GradKeysOfQueries(Emulated):
    def query_products(self, q, k, G):
        return super().query_products(q, k.detach(), G)


@mutant("backward", "no dbeta through w")
class GradBetaOfW(Emulated):
    def w_vectors(self, T, k, beta, G):
        return super().w_vectors(T, k, beta.detach(), G)


@mutant("backward", "no dk through w")
class GradKeysOfW(Emulated):
    def w_vectors(self, T, k, beta, G):
        return super().w_vectors(T, k.detach(), beta, G)


@mutant("backward", "no dg through w")
class GradGateOfW(Emulated):
    def w_vectors(self, T, k, beta, G):
        return super().w_vectors(T, k, beta, G.detach())


@mutant("backward", "no gradient through the inverse")
class GradInverse(Emulated):
    def inverse(self, A):
        return super().inverse(A).detach()


@mutant("backward", "no dk through the state update")
class GradKeysOfState(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        return super().next_state(S, k.detach(), v_new, G, G_last)


@mutant("backward", "no dg through the decay of the whole chunk")
class GradGateOfState(Emulated):
    def next_state(self, S, k, v_new, G, G_last):
        return super().next_state(S, k, v_new, G, G_last.detach())


@mutant("backward", "no dg through the queries of earlier chunks")
class GradGateOfOutput(Emulated):
    def output(self, q, Aqk, S, v_new, G):
        return super().output(q, Aqk, S, v_new, G.detach())


@mutant("backward", "no gradient through the prediction")
class GradPrediction(Emulated):
    def writes(self, u, w, S):
        return super().writes(u, w.detach(), S.detach())


@mutant("backward", "dht is ignored", link="FlashQLA #28")
class GradFinalStateIgnored(Emulated):
    def cotangents(self, call):
        return call.do, 0 * call.dht


@mutant(
    "backward",
    "dg's diagonal terms cancel only up to rounding",
    on="fp32",
    link="attention-gym #461",
)
class GradDiagonal(Emulated):
    def pair_decay(self, G):
        future = torch.triu(torch.ones(G.shape[1], G.shape[1], dtype=torch.bool), 1)[None, :, :, None]
        return self.exp((G[:, :, None] - G[:, None]).masked_fill(future, -torch.inf))


@mutant("backward", "gradients of a ragged tail are not written", link="FlashQLA #28")
class GradTail(Emulated):
    def host_gradients(self, grads, call):
        T = call.q.shape[1] // self.contract.chunk_size * self.contract.chunk_size
        kept = torch.arange(call.q.shape[1]) < T
        whole = ("dh0", "dA_log", "ddt_bias")  # have no tokens
        return {
            name: x if name in whole else x * kept.reshape(1, -1, *[1] * (x.dim() - 2)) for name, x in grads.items()
        }


@mutant("backward", "gradients past the last segment are whatever was there", link="FlashQLA #28")
class GradPastEnd(Emulated):
    def host_gradients(self, grads, call):
        if call.cu_seqlens is not None:
            grads["dv"][:, int(call.cu_seqlens[-1]) :] = 1.0
        return grads


@mutant("backward", "gradients are added to what the buffer held")
class GradDirty(Emulated):
    @cached_property
    def held(self):
        return {}

    def host_gradients(self, grads, call):
        shape = tuple(call.k.shape)
        self.held[shape] = grads["dk"] + self.held.get(shape, 0)
        return {**grads, "dk": self.held[shape]}


@mutant("backward", "dg is not summed from the chunk's end")
class GradGateLocal(Emulated):
    def cumulative(self, g):
        G = super().cumulative(g)
        return G.detach() + g - g.detach()


@mutant("backward", "dq and dk of the value heads in a group are not summed")
class GradGroups(Emulated):
    def heads(self, call):
        q, k, v, g, beta = super().heads(call)
        first = (torch.arange(q.shape[2]) % (call.v.shape[2] // call.q.shape[2]) == 0)[:, None]
        q, k = (torch.where(first, x, x.detach()) for x in (q, k))
        return q, k, v, g, beta


@mutant("backward", "dq without the scale")
class GradScale(Emulated):
    def host_gradients(self, grads, call):
        return {**grads, "dq": grads["dq"] / call.scale}


@mutant("backward", "dg in log2 units")
class GradLog2(Emulated):
    def host_gradients(self, grads, call):
        return {**grads, "dg": grads["dg"] * 0.6931471805599453}


@mutant("backward", "dbeta for the logit")
class GradSigmoid(Emulated):
    def host_gradients(self, grads, call):
        return {**grads, "dbeta": grads["dbeta"] * call.beta * (1 - call.beta)}


@mutant("backward", "gradients are clipped at 1")
class GradClipped(Emulated):
    def host_gradients(self, grads, call):
        return {name: x.clamp(-1.0, 1.0) for name, x in grads.items()}


@mutant("backward", "dv is rounded to bf16", on="fp32")
class GradValuesBf16(Emulated):
    def host_gradients(self, grads, call):
        return {**grads, "dv": grads["dv"].to(torch.bfloat16).float()}
