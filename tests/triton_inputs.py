"""Inputs for kernel tests, the fp64 answer beside them, and memory that shows when it is touched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kimi_linear.reference import BoundedGate, FrontEnd, SoftplusGate
from kimi_linear.reference.naive import recurrent_kda

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GATES = ("softplus", "bounded", "given")
# Roundings of one fp32 step that reach a state: decay, prediction, error, write, read, front end; with slack.
ROUNDINGS = 16


def make_call(
    B: int = 2,
    T: int = 5,
    H: int = 1,
    HV: int = 2,
    K: int = 12,
    V: int = 20,
    *,
    N: int | None = None,
    gate: str = "softplus",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of a call with an initial state for each of N sequences (default B)."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    call = {"q": normal(B, T, H, K), "k": normal(B, T, H, K), "v": normal(B, T, HV, V)}
    call |= {"g": normal(B, T, HV, K), "beta": normal(B, T, HV)}
    if gate == "given":
        call["g"] = -call["g"].abs()
    call = {name: x.to(DEVICE, dtype) for name, x in call.items()}
    call["front_end"] = make_front_end(gate, normal(HV).to(DEVICE), normal(HV, K).to(DEVICE))
    call["initial_state"] = normal(B if N is None else N, HV, K, V).to(DEVICE)
    return call


def make_front_end(gate: str, A_log: Tensor, dt_bias: Tensor) -> FrontEnd:
    """A front end with this gate; `given` leaves the log decay as it is."""
    if gate == "softplus":
        return FrontEnd(SoftplusGate(A_log, dt_bias), beta="double_sigmoid")
    if gate == "bounded":
        return FrontEnd(BoundedGate(A_log, dt_bias, lower_bound=-4.0))
    return FrontEnd(None)


def reference(**call: Any) -> tuple[Tensor, Tensor]:
    """o and the final state in fp64 on the CPU, from the values that the kernel was given."""
    exact = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()}
    exact = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in exact.items()}
    if call.get("front_end") is not None:
        exact["front_end"] = front_end_in_fp64(call["front_end"])
    return recurrent_kda(**exact, output_final_state=True)


def front_end_in_fp64(front_end: FrontEnd) -> FrontEnd:
    """The same front end with fp64 parameters on the CPU."""
    if front_end.gate is None:
        return front_end
    gate = front_end.gate
    gate = replace(gate, A_log=gate.A_log.cpu().double(), dt_bias=gate.dt_bias.cpu().double())
    return replace(front_end, gate=gate)


def assert_rounded_only(got: Tensor, exact: Tensor, tokens: int) -> None:
    """Each row of `got` differs from fp64 by roundings of fp32 arithmetic and one of its own dtype.

    Roundings of a token are independent and the step does not amplify a state, so they add up as a random walk:
    ROUNDINGS * eps * sqrt(tokens) of the row, or of the whole where cancellation made the row small.
    """
    bound = ROUNDINGS * torch.finfo(torch.float32).eps * max(tokens, 1) ** 0.5
    if got.dtype != torch.float32:
        bound += torch.finfo(got.dtype).eps
    whole = exact.square().mean().sqrt()
    error = (got.cpu().double() - exact).square().mean(-1).sqrt()
    size = exact.square().mean(-1).sqrt().clamp(min=whole)
    assert whole > 0, "an empty or zero answer proves nothing"
    worst = (error / size).max().item()
    assert worst <= bound, f"row error {worst:.2e} above {bound:.2e}"


def inside_poison(x: Tensor, poison: float, *, transposed: bool = False) -> Tensor:
    """The same values as a slice of a larger buffer full of poison, so that no stride is trivial."""
    if x.dim() == 0:
        return x
    order = list(range(x.dim()))
    if transposed:
        order = order[::-1]
    buffer = torch.full([x.shape[i] + 3 for i in order], poison, dtype=x.dtype, device=x.device)
    room = buffer.permute([order.index(i) for i in range(x.dim())])
    view = room[tuple(slice(1, 1 + size) for size in x.shape)]
    view.copy_(x)
    return view


def poisoned(call: dict[str, Any], poison: float, *, transposed: bool = False) -> dict[str, Any]:
    """A call whose tensors all lie inside poison."""
    return {
        name: inside_poison(x, poison, transposed=transposed)
        if isinstance(x, Tensor) and x.is_floating_point()
        else x
        for name, x in call.items()
    }
