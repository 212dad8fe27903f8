"""Jobs that may take their process down: one process does them in turn, and a new one takes over where it was lost.

A process with torch, triton and a CUDA context takes seconds to start, so it is kept for as long as it is sound.
After a crash, a hang or an exception it is not: an error of CUDA, for one, fails all that follows in its process.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

START_SECONDS = 300.0  # imports from a cold disk, a CUDA context
EXIT_SECONDS = 5.0  # of a process that is dead or dying; a driver may keep it longer, and is not waited for


class LostError(Exception):
    """A job that gave no result, and its process with it; the text says how."""


class Expendable:
    """A process for jobs, started with the first one, and anew after one that was lost. Close it at the end.

    `start()` runs there before any job, and may take its time; a job that takes longer than `seconds` is killed.
    Jobs, arguments and results are pickled: functions have to be found by name in a module.
    """

    def __init__(self, start: Callable[[], Any], seconds: float) -> None:
        self.start, self.seconds = start, seconds
        self._process: Any = None

    def run(self, job: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """job(*arguments) in the process. Raises LostError, or RuntimeError where no process gets under way."""
        if self._process is None:
            self._begin()
        return self._exchange(job, arguments, self.seconds if seconds is None else seconds)

    def close(self) -> None:
        """End the process; a later job starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join(EXIT_SECONDS)
            self._pipe.close()
            self._process = None

    def _begin(self) -> None:
        spawn = get_context("spawn")  # a CUDA context does not outlive a fork
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._exchange(self.start, (), START_SECONDS)
        except LostError as lost:
            raise RuntimeError(f"no process can be started: {lost}") from None

    def _exchange(self, job: Callable[..., Any], arguments: tuple[Any, ...], seconds: float) -> Any:
        lost = ""
        try:
            self._pipe.send((job, arguments))
            if not self._pipe.poll(seconds):
                lost = f"hangs: no result after {seconds:g} s"
            else:
                result, lost = self._pipe.recv()
        except (EOFError, ConnectionError):
            lost = self._death()
        except BaseException:  # an interrupt: this job's result must not be taken for the next one's
            self.close()
            raise
        if lost:
            self.close()
            raise LostError(lost)
        return result

    def _death(self) -> str:
        self._process.join(EXIT_SECONDS)
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"ends its process, with code {code}"
        return f"is killed by signal {-code} ({signal.Signals(-code).name})"


def serve(pipe: Connection) -> None:
    """The process: do what is asked until nobody asks. An answer is a result, and what was raised instead."""
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = job(*arguments), ""
        except Exception as error:
            answer = None, f"raises {type(error).__name__}: {first_line(error)}"
        pipe.send(answer)


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return str(error).strip().split("\n", 1)[0]
