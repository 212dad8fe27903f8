"""Kernels for the tests of the judge: a correct one, and ways to misbehave."""

import contextlib
import sys
import time
from dataclasses import replace

import torch

from kimi_linear.conformance.adapter import Capabilities, Contract
from kimi_linear.conformance.emulated import Emulated

CONTRACT = Contract(chunk_size=32)


class Correct(Emulated):
    """The correct kernel; subclasses misbehave."""

    def __init__(self, **fields):
        super().__init__(CONTRACT, name="a kernel of the tests", **fields)


class Raises(Correct):
    def run(self, call, want):
        raise RuntimeError("no such instruction")


class Hangs(Correct):
    def run(self, call, want):
        while True:
            with contextlib.suppress(Exception):  # the interrupt has to get through all the same
                time.sleep(0.01)


class WrongShape(Correct):
    def run(self, call, want):
        results = super().run(call, want)
        return {**results, "o": results["o"][:, :-1]}


class WrongDtype(Correct):
    def run(self, call, want):
        results = super().run(call, want)
        return {**results, "o": results["o"].double()}


class ReturnsNaN(Correct):
    def run(self, call, want):
        results = super().run(call, want)
        results["o"][0, 3] = torch.nan
        return results


class ReturnsInput(Correct):
    def run(self, call, want):
        return {**super().run(call, want), "o": call.v}


class ReturnsNothing(Correct):
    def run(self, call, want):
        return {}


class Overwrites(Correct):
    def run(self, call, want):
        results = super().run(call, want)
        call.k.zero_()
        return results


class WrongFromToken40(Correct):
    """Head 1 of batch item 1 is wrong from token 40 on."""

    def run(self, call, want):
        results = super().run(call, want)
        if call.do is None and results["o"].shape[0] > 1:
            results["o"][1, 40:, 1] *= 1.25
        return results


class Foreign(Correct):
    """A kernel with log2 gates, logits and V x K states."""

    def capabilities(self):
        return Capabilities(
            contracts=(CONTRACT,), log_base="2", beta="logit", beta_above_one=False, state_layout="VK"
        )

    def gate(self, g):
        return g * torch.tensor(2.0).log()

    def strength(self, beta):
        return torch.sigmoid(beta)

    def initial_state(self, call, v, n, states):
        if call.initial_state is None:
            return super().initial_state(call, v, n, states)
        return call.initial_state[n].transpose(-1, -2).float()

    def final_state(self, S, call):
        return S.transpose(-1, -2).contiguous()


class Exits(Correct):
    def run(self, call, want):
        sys.exit(1)


class Unwritten(Correct):
    """The last token's output is never written."""

    def run(self, call, want):
        results = super().run(call, want)
        o = torch.empty_like(results["o"])
        o[:, :-1] = results["o"][:, :-1]
        return {**results, "o": o}


class AssumesContiguous(Correct):
    """Takes q's memory as it lies."""

    def run(self, call, want):
        memory = call.q.as_strided(call.q.shape, torch.empty(call.q.shape).stride())
        return super().run(replace(call, q=memory), want)
