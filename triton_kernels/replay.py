"""Launching what was launched before without Triton's binder, which costs the host 40 us a launch.

A kernel is compiled for dtypes, constants, and what its integers and addresses are multiples of. A server calls
with the same few shapes, so the compiled kernel is looked up by just that and started directly:

    kernels   one launch's specialisation      its compiled kernel
    calls     the metadata of a whole call     all its launches, with holes where addresses go

Where a short cut could differ from the long way (the interpreter, AMD, a profiler's hooks, another current
device, an address that is no multiple of 16) the launch goes through Triton as usual.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from .support import INTERPRETED, Launch, remember

ALIGNMENT = 16  # bytes: the only multiple that Triton tells addresses and integers apart by

_kernels: dict[Any, Any] = {}


def can_replay(device: torch.device) -> bool:
    """Whether a launch may go past Triton's own entry here and now."""
    if device.type != "cuda" or INTERPRETED or torch.version.hip is not None:
        return False
    return device.index == torch.cuda.current_device() and not _hooked()


def _hooked() -> bool:
    """A profiler listens: it wants what only Triton's entry tells it."""
    runtime = triton.knobs.runtime
    hooks = (runtime.launch_enter_hook, runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)


def specialisation(launch: Launch) -> tuple[Any, ...]:
    """What Triton would compile this launch for: two launches with the same answer share a compiled kernel."""
    constants, others = _parameters(launch.kernel)
    arguments = launch.arguments
    kinds = [_kind(arguments[name], specialise) for name, specialise in others]
    return (launch.kernel, *launch[3:], *kinds, *[arguments[name] for name in constants])


@functools.cache
def _parameters(kernel: Any) -> tuple[list[str], list[tuple[str, bool]]]:
    """Names of a kernel's constants, and of its other arguments with whether Triton specialises on their value."""
    constants = [x.name for x in kernel.params if x.is_constexpr]
    return constants, [(x.name, not x.do_not_specialize) for x in kernel.params if not x.is_constexpr]


def _kind(value: Any, specialise: bool) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, value.device, value.data_ptr() % ALIGNMENT == 0
    if isinstance(value, int):
        width = -(2**31) <= value < 2**31, value < 2**63
        return (type(value), *width, value == 1, value % ALIGNMENT == 0) if specialise else (type(value), *width)
    if isinstance(value, tuple):
        return tuple([_kind(x, specialise) for x in value])
    return value if value is None else type(value)


def run_launch(launch: Launch, device: torch.device) -> Any:
    """Run one launch; return its compiled kernel, or None where it cannot be replayed."""
    if not can_replay(device):
        launch.run()
        return None
    key = specialisation(launch)
    compiled = _kernels.get(key)
    if compiled is None:
        compiled = launch.run()
        if hasattr(compiled, "packed_metadata"):
            remember(_kernels, key, compiled)
        return compiled
    _start(compiled, launch.grid, _stream(device), [launch.arguments[name] for name in launch.kernel.arg_names])
    return compiled


def _stream(device: torch.device) -> int:
    return triton.runtime.driver.active.get_current_stream(device.index)


def _start(compiled: Any, grid: tuple[int, ...], stream: int, arguments: Sequence[Any]) -> None:
    x, y, z = (*grid, 1, 1)[:3]
    compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


class Replay:
    """A launch without its tensors: which of its arguments is which address, and all others."""

    def __init__(self, launch: Launch, compiled: Any, places: dict[str, int]) -> None:
        self.compiled, self.grid = compiled, launch.grid
        self.fixed: list[Any] = []
        picks = []
        for name in launch.kernel.arg_names:
            value = launch.arguments[name]
            if isinstance(value, Tensor):
                picks.append(places[name])
            else:
                picks.append(len(places) + len(self.fixed))
                self.fixed.append(value)
        self.arguments = operator.itemgetter(*picks)  # of the addresses, and then the others

    def run(self, stream: int, pointers: list[int]) -> None:
        _start(self.compiled, self.grid, stream, self.arguments(pointers + self.fixed))


class Calls:
    """The calls of one operator that were seen before.

    `names` are the kernels' names of the tensors of a call. A kernel's other tensors are parts of the call's
    `memory`; how far into it each lies is for the caller to say, by name.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.known: dict[Any, list[Replay]] = {}

    def run(
        self,
        key: Any,
        tensors: Sequence[Tensor | None],
        launches: Callable[[], list[Launch]],
        memory: Tensor | None = None,
        offsets: dict[str, int] | None = None,
    ) -> None:
        """Run the launches of this call; they are not even built where a call with this key was seen.

        The key must hold everything that they depend on, but for the tensors' addresses.
        """
        device = tensors[0].device if tensors[0] is not None else torch.device("cpu")
        pointers = [0 if x is None else x.data_ptr() for x in tensors]
        replayable = can_replay(device) and not any([p % ALIGNMENT for p in pointers])
        known = self.known.get(key) if replayable else None
        if known is None:
            built = [launch for launch in launches() if 0 not in launch.grid]
            compiled = [run_launch(launch, device) for launch in built]
            if replayable and None not in compiled:
                places = {name: i for i, name in enumerate((*self.names, *(offsets or ())))}
                remember(self.known, key, [Replay(*both, places) for both in zip(built, compiled, strict=True)])
            return
        if memory is not None and offsets is not None:
            base = memory.data_ptr()
            pointers += [base + offset for offset in offsets.values()]
        stream = _stream(device)
        for replay in known:
            replay.run(stream, pointers)
