"""Work of `kimi-linear verify` in processes beside it, with a GPU.

There a kernel compiles for seconds at each new size and gate, on one core of the CPU, and truth and limits are fp64
on a CPU as well: one after another, that is minutes in which the GPU has nothing to do. Without a GPU the cores have
enough to do, and all happens in this process.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import torch

Submit = Callable[..., Callable[[], Any]]  # submit(function, *arguments) gives a function that waits for the result


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def work_beside(device: str) -> Iterator[Submit]:
    """Where to hand in work: with a GPU a process a core, else this process, once the result is asked for."""
    if device == "cpu":
        yield lambda function, *arguments: lambda: function(*arguments)
        return
    with processes(cores()) as submit:
        yield submit


@contextmanager
def processes(count: int) -> Iterator[Submit]:
    """A pool; functions have to be importable, and what they take and give travels by value."""
    with ProcessPoolExecutor(count, get_context("spawn"), torch.set_num_threads, (1,)) as pool:

        def submit(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
            future: Future[bytes] = pool.submit(_by_value, pickle.dumps((function, arguments)))
            return lambda: pickle.loads(future.result())

        try:
            yield submit
        finally:
            pool.shutdown(cancel_futures=True)


def _by_value(packed: bytes) -> bytes:
    """Bytes, because tensors would travel in shared memory, of which a container may have little."""
    function, arguments = pickle.loads(packed)
    return pickle.dumps(function(*arguments))
