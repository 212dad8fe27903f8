"""A kernel in a process of its own, so that a crash or a hang in compiled code fails one case and no more.

The judge stays here; each call of the kernel travels to a worker that lives as long as the kernel lets it. A worker
that dies, or is silent for too long and is killed, is a reason for the case to fail; the next call starts another.
Linux and macOS; a limit on memory needs Linux.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .adapter import Adapter, BadAdapterError, Call, Capabilities, ConvCall, load_adapter
from .guard import KernelFailure
from .limits import CASE_SECONDS

LOAD_SECONDS = 600.0  # a kernel may be compiled while it loads
GRACE_SECONDS = 5.0  # the worker interrupts Python code itself; this much later it is killed
PR_SET_PDEATHSIG = 1  # prctl: the signal that a process gets when its parent dies
KIB_PER_GIB = 2**20
FRAME = re.compile(r'File "(.+)", line (\d+) in (\S+)')  # as faulthandler writes it


class Isolated:
    """An adapter by its name, as `load_adapter` takes it, in a worker. Close it at the end.

    `memory` is how many GiB it may take beyond what it holds once loaded; another `python` finds its own packages.
    """

    def __init__(
        self,
        where: str,
        seconds: float = CASE_SECONDS,
        memory: float | None = None,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.where, self.seconds, self.memory = where, seconds, memory
        self.python, self.environment = python, environment
        self._start()

    def capabilities(self) -> Capabilities:
        return self._described("capabilities")

    def identity(self) -> str:
        return self._described("identity")

    def run(self, call: Call, want: frozenset[str]) -> dict[str, Tensor]:
        return self.there(_method, "run", call, want)

    def convolve(self, call: ConvCall, want: frozenset[str]) -> dict[str, Tensor]:
        return self.there(_method, "convolve", call, want)

    def there(self, function: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """function(adapter, *arguments) in the worker. Raises what it raises, or KernelFailure with how it died."""
        if self._worker.poll() is not None:
            self._restart()
        seconds = self.seconds if seconds is None else seconds
        return self._exchange((function, arguments, _fills_new_memory()), seconds)

    def close(self) -> None:
        """End the worker and whatever it started; a later call starts another."""
        if self._worker.poll() is None:
            os.killpg(self._worker.pid, signal.SIGKILL)
        self._worker.wait()
        self._connection.close()
        self._log.close()

    def _described(self, what: str) -> Any:
        try:
            return self.there(_method, what)
        except KernelFailure as failure:
            raise BadAdapterError(f"{self.where}: {what}() {failure}") from None

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the adapter
        files = (theirs.detach(), self._log.fileno())
        command = f"from kimi_linear.conformance.isolation import serve; serve{files}"
        options: dict[str, Any] = {"pass_fds": files, "stdin": subprocess.DEVNULL, "start_new_session": True}
        self._worker = subprocess.Popen([self.python, "-P", "-c", command], env=self.environment, **options)
        os.close(files[0])
        self._connection = Connection(ours.detach())
        path = sys.path if self.python == sys.executable else None
        try:
            self._exchange((self.where, path, torch.get_num_threads(), self.memory), LOAD_SECONDS)
        except KernelFailure as failure:
            raise BadAdapterError(f"{self.where} does not load: {failure}") from None
        except BadAdapterError:
            self.close()
            raise

    def _restart(self) -> None:
        self.close()
        try:
            self._start()
        except BadAdapterError as error:  # it did load once, so the run goes on
            raise KernelFailure(f"once more: {error}") from None

    def _exchange(self, message: Any, seconds: float) -> Any:
        try:
            self._connection.send_bytes(pickle.dumps(message))
            if not self._connection.poll(seconds + GRACE_SECONDS):
                self.close()
                raise KernelFailure(f"hangs: no result after {seconds:g} s")
            answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            raise KernelFailure(self._death()) from None
        except KernelFailure:
            raise
        except BaseException:  # an interrupt: the answer of this call must not be taken for the next one's
            self.close()
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _death(self) -> str:
        """How the worker ended, in words, and in which function."""
        code = self._worker.wait()
        self._log.seek(0)
        frame = FRAME.search(self._log.read().decode(errors="replace"))
        self.close()
        if code >= 0:
            return f"ends its process, with code {code}"
        name = f"killed by signal {-code} ({signal.Signals(-code).name})"
        if -code == signal.SIGKILL:
            return f"{name}, as the system does when memory runs out"
        return name if frame is None else f"{name} in {frame[3]}, {frame[1]}:{frame[2]}"


@contextmanager
def opened(
    where: str, isolate: bool = False, seconds: float = CASE_SECONDS, memory: float | None = None
) -> Iterator[Adapter]:
    """An adapter by its name, here or in a process of its own."""
    if memory is not None and not isolate:
        raise BadAdapterError("a limit on memory needs a process of its own: --isolate")
    if not isolate:
        yield load_adapter(where)
        return
    with closing(Isolated(where, seconds, memory)) as adapter:
        yield adapter


def serve(connection: int, log: int) -> None:
    """The worker: load an adapter, then run functions on it until nobody asks any more."""
    faulthandler.enable(log)
    _die_with_parent()
    pipe = Connection(connection)
    where, path, threads, memory = pickle.loads(pipe.recv_bytes())
    sys.path[:] = path or sys.path
    torch.set_num_threads(threads)
    try:
        adapter = load_adapter(where)
        _limit_memory(memory)
        pipe.send_bytes(pickle.dumps(None))
    except BadAdapterError as error:
        pipe.send_bytes(_packed(error))
        return
    while True:
        try:
            function, arguments, fill = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        pipe.send_bytes(_packed(_answer(adapter, function, arguments, fill)))


def _answer(adapter: Adapter, function: Callable[..., Any], arguments: tuple[Any, ...], fill: bool) -> Any:
    if fill != _fills_new_memory():
        torch.use_deterministic_algorithms(fill, warn_only=True)
    try:
        return function(adapter, *arguments)
    except Exception as error:
        return error


def _packed(answer: Any) -> bytes:
    """Bytes of a result or an exception; those that cannot travel become one that can."""
    try:
        packed = pickle.dumps(answer)
        pickle.loads(packed)
    except Exception:
        packed = pickle.dumps(RuntimeError(f"{type(answer).__name__}: {answer}"))
    return packed


def _method(adapter: Any, name: str, *arguments: Any) -> Any:
    return getattr(adapter, name)(*arguments)


def _fills_new_memory() -> bool:
    """Whether torch.empty gives NaN here: it has to there too."""
    return torch.are_deterministic_algorithms_enabled()


def _die_with_parent() -> None:
    """On Linux, so that a kernel that hangs does not outlive a judge that was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory(gib: float | None) -> None:
    if gib is None:
        return
    if sys.platform != "linux":
        raise BadAdapterError("a limit on memory needs Linux")
    import resource

    held = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert held is not None
    most = (int(held[1]) + int(gib * KIB_PER_GIB)) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
