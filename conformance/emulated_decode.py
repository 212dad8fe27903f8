"""The decoding step of the emulated kernels: fp32 arithmetic, a state rounded where the pool stores it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .adapter import Call, Pool
from .emulated_front import FrontSteps
from .precision import DTYPES

POOL = Pool(dtypes=("fp32", "bf16"), index="int64", nobody=(-1, 1 << 20), drafts=2)


class DecodeSteps(FrontSteps):
    """One step of sequences whose states lie in a pool; a bug is a subclass that overrides a part of it."""

    def heads(self, call: Call) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def exp(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def decode(self, call: Call) -> Tensor:
        rows = [x.transpose(1, 2) for x in self.heads(replace(call, contract=self.contract))]
        assert call.state_pool is not None
        o = torch.zeros_like(rows[2])
        table = self.slot_table(call)
        for n, slots in enumerate(table):
            slot = slots[self.first_column(call, n)]
            if self.is_nobody(slot, call.state_pool):
                o[n] = self.padding_rows(o[n])
                continue
            S = self.read(call.state_pool, slot)
            for t in range(o.shape[2]):
                o[n, :, t], S = self.token([x[n, :, t] for x in rows], S)
                if len(slots) > 1 or t == o.shape[2] - 1:
                    self.write(call.state_pool, slots[min(t, len(slots) - 1)], S)
        return o.transpose(1, 2).to(DTYPES[self.contract.io])

    def slot_table(self, call: Call) -> list[list[int]]:
        assert call.slot_indices is not None
        slots = call.slot_indices
        return (slots if slots.dim() == 2 else slots[:, None]).tolist()

    def first_column(self, call: Call, n: int) -> int:
        return 0 if call.accepted is None else int(call.accepted[n]) - 1

    def is_nobody(self, slot: int, pool: Tensor) -> bool:
        return not 0 <= slot < len(pool)

    def padding_rows(self, o: Tensor) -> Tensor:
        return torch.zeros_like(o)

    def read(self, pool: Tensor, slot: int) -> Tensor:
        return pool[slot].float()

    def write(self, pool: Tensor, slot: int, S: Tensor) -> None:
        if not self.is_nobody(slot, pool):
            pool[slot] = S.to(pool.dtype)

    def token(self, rows: list[Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = rows
        S = self.exp(g)[..., None] * S
        u = beta[..., None] * (v - (S * k[..., None]).sum(1))
        S = S + k[..., None] * u[:, None]
        return (S * q[..., None]).sum(1), S
