"""Running a stranger's kernel so that the run goes on whatever it does.

A kernel may raise, hang, return the wrong thing or its own input, or write where it should read. Each of these
is a reason for one case to fail; none may stop the others or spoil the inputs of the next.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .adapter import GRADIENTS, PARAMETER_GRADIENTS, Adapter, AnyCall, Capabilities, ConvCall
from .arrays import as_asked, as_tensor
from .gold import Results
from .limits import CASE_SECONDS
from .precision import DTYPES
from .problem import Problem, in_layout, result_shapes, state_format

RETRY_SECONDS = 0.5  # a first interrupt may fall into code that ignores it, such as a destructor
CRASH = "raises"  # how the reason of a kernel that raised begins
STATES = ("final_state", "dh0")
_FOLDER = Path(__file__).parent.parent / "reference"
REFERENCE = tuple(
    str(_FOLDER / tier) for tier in ("naive", "chunked", "model/convolution")
)  # what computes, unlike argument checks


class KernelFailure(Exception):  # noqa: N818  # a verdict about someone else's code, no error of ours
    """Why a kernel fails a case before any number is compared."""


@runtime_checkable
class Elsewhere(Protocol):
    """An adapter whose kernel lives in another process."""

    def there(self, function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """function(adapter, *arguments) in that process."""


class _OutOfTime(BaseException):
    """Not an Exception, so that an adapter's `except Exception` does not swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt Python code after so many seconds; where signals are not to be had, wait."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expire(signum: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds, RETRY_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def wanted(problem: Problem) -> frozenset[str]:
    """The results that a case asks for."""
    if not problem.case.has("gradients"):
        return frozenset(("o", "final_state"))
    front = problem.call.front
    return frozenset(GRADIENTS if front is None or front.gate is None else (*GRADIENTS, *PARAMETER_GRADIENTS))


def guarded_run(
    adapter: Adapter,
    problem: Problem,
    caps: Capabilities,
    want: frozenset[str] | None = None,
    seconds: float = CASE_SECONDS,
    finite: bool = True,
) -> Results:
    """The kernel's results, K x V and in its own dtypes; raises KernelFailure with the reason."""
    want = wanted(problem) if want is None else want
    results = raw_run(adapter, problem.call, caps, want, seconds)
    shapes = result_shapes(problem, caps)
    for name in sorted(want & set(shapes)):
        _check_result(name, results[name], shapes[name], problem, caps, finite)
    states: Results = {name: in_layout(results[name], caps) for name in STATES if name in results}
    return {**results, **states}


def raw_run(
    adapter: Adapter,
    call: AnyCall,
    caps: Capabilities,
    want: frozenset[str],
    seconds: float = CASE_SECONDS,
    copy: bool = True,
) -> Results:
    """Call the adapter: it returns in time all it was asked for, and only reads.

    It gets copies of the inputs, or the very tensors, with their strides, where `copy` is False.
    """
    if isinstance(adapter, Elsewhere):
        return _raw_run_there(adapter, call, caps, want, seconds, copy)
    private = {name: x.clone() if copy else x for name, x in call.tensors().items()}
    call = call if copy else with_tensors(call, {name: x.clone() for name, x in private.items()})
    given = with_tensors(call, private)
    try:
        with time_limit(seconds):
            results = _tensors(_entry(adapter, call)(as_asked(given, caps), want), call)
    except _OutOfTime:
        raise KernelFailure(f"hangs: no result after {seconds:g} s") from None
    except KernelFailure:
        raise
    except (Exception, SystemExit) as error:
        raise KernelFailure(f"{CRASH} {type(error).__name__}: {str(error)[:300]}") from error
    _check_returned(results, want)
    _check_only_read(call, private, caps)
    _check_fresh(results, private, caps)
    return {name: x.detach().clone() for name, x in results.items() if isinstance(x, Tensor)}


def with_tensors(call: AnyCall, tensors: dict[str, Tensor]) -> AnyCall:
    """The call with other tensors."""
    return replace(call, **tensors)  # type: ignore[arg-type]


def _entry(adapter: Any, call: AnyCall) -> Callable[..., Any]:
    """The function of an adapter that a call is for."""
    entry: Callable[..., Any] = adapter.convolve if isinstance(call, ConvCall) else adapter.run
    return entry


def _raw_run_there(
    adapter: Elsewhere, call: AnyCall, caps: Capabilities, want: frozenset[str], seconds: float, copy: bool
) -> Results:
    results, overwritten = adapter.there(_run_and_changes, call, caps, want, seconds, copy, seconds=seconds)
    for name, x in overwritten.items():
        call.tensors()[name].copy_(x)
    return results


def _run_and_changes(adapter: Adapter, call: AnyCall, *options: Any) -> tuple[Results, Results]:
    """The results, and what the kernel wrote into its own inputs."""
    before = {name: x.clone() for name, x in call.tensors().items()}
    results = raw_run(adapter, call, *options)
    return results, {name: x for name, x in call.tensors().items() if not same_bits(x, before[name])}


def _tensors(results: Any, call: AnyCall) -> Any:
    """Results as tensors, whichever arrays they came in."""
    if not isinstance(results, dict):
        return results
    half = call.contract.io == "bf16"
    return {name: as_tensor(x, half) for name, x in results.items()}


def _check_returned(results: Any, want: frozenset[str]) -> None:
    if not isinstance(results, dict):
        raise KernelFailure(f"run() must return a dict of tensors; got {type(results).__name__}")
    for name in sorted(want):
        if not isinstance(results.get(name), Tensor):
            raise KernelFailure(f"run() must return a tensor {name!r}; got {type(results.get(name)).__name__}")


def _check_only_read(call: AnyCall, private: dict[str, Tensor], caps: Capabilities) -> None:
    for name, before in call.tensors().items():
        if name not in caps.overwrites and not same_bits(before, private[name]):
            raise KernelFailure(f"overwrites its input {name}, which it does not declare")


def _check_fresh(results: Results, private: dict[str, Tensor], caps: Capabilities) -> None:
    homes = {x.untyped_storage().data_ptr(): name for name, x in private.items() if x.numel()}
    for name, x in results.items():
        home = homes.get(x.untyped_storage().data_ptr()) if isinstance(x, Tensor) and x.numel() else None
        if home is not None and home not in caps.overwrites:
            raise KernelFailure(f"returns its own input {home} as {name}")


def _check_result(
    name: str, x: Tensor, shape: tuple[int, ...], problem: Problem, caps: Capabilities, finite: bool
) -> None:
    if tuple(x.shape) != tuple(shape):
        raise KernelFailure(f"{name} must be {list(shape)}; got {list(x.shape)}")
    if not x.is_floating_point():
        raise KernelFailure(f"{name} must be a floating point tensor; got {x.dtype}")
    dtype = {"o": problem.contract.io, "final_state": state_format(problem.contract, caps)}.get(name)
    if dtype is not None and x.dtype != DTYPES[dtype]:
        raise KernelFailure(f"{name} must be {DTYPES[dtype]}; got {x.dtype}")
    bad = ~x.isfinite()
    if finite and bad.any():
        where = bad.nonzero()[0].tolist()
        raise KernelFailure(
            f"{name} is {x[tuple(where)].item()} at {where}, {int(bad.sum())} of {x.numel()} elements"
        )


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equal bits, so that NaN equals itself."""
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(*(_bytes(z) for z in (x, y)))


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


def runs_the_reference(adapter: Adapter, call: AnyCall, want: frozenset[str], seconds: float) -> str | None:
    """The first function of this repository's reference tiers that a call enters, or None."""
    if isinstance(adapter, Elsewhere):
        with suppress(KernelFailure):
            return adapter.there(runs_the_reference, call, want, seconds, seconds=seconds)
        return None
    entered: list[str] = []

    def watch(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and not entered and frame.f_code.co_filename.startswith(REFERENCE):
            entered.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        with time_limit(seconds):
            _entry(adapter, call)(as_asked(call, adapter.capabilities()), want)
    except (Exception, SystemExit, _OutOfTime):  # the cases will say what is wrong; here only the name matters
        return None
    finally:
        sys.setprofile(before)
    return entered[0] if entered else None
