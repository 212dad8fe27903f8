"""What the Triton tier takes on top of the contract, and how a kernel is launched.

A call that a kernel does not support is refused by name. Nothing here falls back to another implementation:
the caller would measure, or trust, something else than what it asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..reference.contract import Dims, check_inputs
from ..reference.front_end import FrontEnd

MAX_K = 256  # a program holds all K rows of its value columns in registers
MIN_BLOCK = 16  # the smallest tile side: less leaves threads of a warp with the same element
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INTERPRETED = bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run on the CPU, for tests

LIBRARY = torch.library.Library("kimi_linear_triton", "FRAGMENT")


MOST_REMEMBERED = 1024  # entries of a table; past that it starts anew
_passed: dict[Any, Dims] = {}
_numbers: dict[Any, int] = {}
_unused = itertools.count()


def metadata(*tensors: Tensor | None) -> tuple[Any, ...]:
    """All that decides how a call is checked and launched, but for contents and addresses."""
    return tuple([None if x is None else (type(x), x.dtype, x.device, x.shape, x.stride()) for x in tensors])


def number_of(*tensors: Tensor | None) -> int:
    """A number for these tensors' metadata, the same for the same: a cheap key, where metadata takes 3 us to hash."""
    key = metadata(*tensors)
    number = _numbers.get(key)
    if number is None:
        number = next(_unused)
        remember(_numbers, key, number)
    return number


def remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    """Add an entry; a table never grows without end."""
    if len(table) >= MOST_REMEMBERED:
        table.clear()
    table[key] = value


class Launch(NamedTuple):
    """One kernel launch, ready to run, or to be compiled for a machine that is not there."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    num_warps: int
    num_stages: int = 1
    maxnreg: int | None = None  # most registers a thread may hold, so that programs share a multiprocessor

    def run(self) -> Any:
        """Launch where the first argument lives, unless there is nothing to do: 0 programs is a driver's error.

        Returns Triton's compiled kernel, None in the interpreter.
        """
        if 0 in self.grid:
            return None
        device = next(iter(self.arguments.values())).device
        # Triton launches on the current device; switching costs more than looking.
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self._launch()
        return self._launch()

    def options(self) -> dict[str, int]:
        """What Triton is told beside the arguments."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        if self.maxnreg is not None and torch.version.hip is None:
            options["maxnreg"] = self.maxnreg
        return options

    def _launch(self) -> Any:
        return self.kernel[self.grid](**self.arguments, **self.options())


class Configuration(NamedTuple):
    """A launch by name, for reports and compile tests; its tensors may be on the meta device."""

    name: str
    launch: Launch


def checked_dims(*tensors: Tensor, **options: Any) -> Dims:
    """As `checked_call`, without the number."""
    return checked_call(*tensors, **options)[0]


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    front_end: FrontEnd | None,
    scale: float | None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Dims, int | None]:
    """The contract's checks, which read no contents: what has passed once is looked up, in a third of the time.

    Returns the sizes and the `number_of` all tensors of the call in the order of the contract, the gate's A_log and
    dt_bias after beta; None inside a compiler.
    """

    def check() -> Dims:
        options: dict[str, Any] = {
            "front_end": front_end,
            "scale": scale,
            "initial_state": initial_state,
            "cu_seqlens": cu_seqlens,
        }
        return check_inputs(q, k, v, g, beta, **options)

    if torch.compiler.is_compiling():
        return check(), None
    try:
        gate = None if front_end is None else front_end.gate
        A_log, dt_bias = (None, None) if gate is None else (gate.A_log, gate.dt_bias)
        number = number_of(q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens)
        key = (number, type(scale), scale, type(front_end), type(gate))
        dims = _passed.get(key)
    except (AttributeError, TypeError):  # something is no tensor, or no number: the contract says so by name
        return check(), None
    if dims is None:
        dims = check()
        remember(_passed, key, dims)
    return dims, number


def check_supported(op: str, q: Tensor, dims: Dims) -> None:
    """Refuse, by name, what the contract allows and the Triton kernels do not."""
    check_tensor_supported(op, "q", q)
    if dims.K > MAX_K:
        raise ValueError(f"q must be [B, T, H, K] with K <= {MAX_K} in {op}; got K={dims.K}")


def check_tensor_supported(op: str, name: str, x: Tensor) -> None:
    """Refuse a dtype or device that the kernels do not run with."""
    if x.dtype not in DTYPES:
        hint = "; the reference computes in float64" if x.dtype == torch.float64 else ""
        raise TypeError(f"{name} must be float16, bfloat16 or float32 in {op}; got {x.dtype}{hint}")
    if x.device.type == "cpu" and not INTERPRETED:
        hint = "use kimi_linear.reference there, or set TRITON_INTERPRET=1 before triton is imported"
        raise ValueError(f"{name} must be on a GPU in {op}; got {x.device}; {hint}")


def adjacent_channels(*tensors: Tensor) -> list[Tensor]:
    """The tensors, copied where channels do not lie side by side: a compiler lays such a one out differently in
    registers, and then sums it in another order."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def check_no_gradient(op: str, *tensors: Tensor | None, instead: str) -> None:
    """Refuse a call whose gradient would silently be lost."""
    if torch.is_grad_enabled() and any([x is not None and x.requires_grad for x in tensors]):
        raise RuntimeError(f"{op} has no backward, and an input requires a gradient: {instead}")


def define_op(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register an operator that torch.compile takes as one opaque step; return what a call goes through.

    Outside a compiler that is the implementation itself: the dispatcher would cost 10 us a call on the host, and
    `torch.library.custom_op` 40. There it is also told what the caller `known`, which is no part of the operator.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, implementation, "CUDA")
    LIBRARY.impl(name, implementation, "CPU")  # reached under the interpreter only: see check_tensor_supported
    torch.library.register_fake(f"kimi_linear_triton::{name}", fake, lib=LIBRARY)
    operator = getattr(torch.ops.kimi_linear_triton, name).default

    def call(*arguments: Any, **known: Any) -> Any:
        return operator(*arguments) if torch.compiler.is_compiling() else implementation(*arguments, **known)

    return call


def next_power_of_2(n: int) -> int:
    """The smallest power of two >= n. Triton's own, made for kernels too, costs 2 us on the host."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)
