"""The thread that reads weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch


def reading_thread() -> ThreadPoolExecutor:
    """One thread whose tensor copies use no further ones; the caller's number of threads stays what it was.

    A copy that is spread over an OpenMP team ends at a barrier where the team spins. A checkpoint is thousands of
    small copies, and on a machine whose cores are busy each of them waits a time slice: 2 GB took up to 28 s, and
    take 1 s in one thread (0.7 s in two, on an idle machine).
    """
    threads = torch.get_num_threads()
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
    reader.submit(_copy_alone).result()
    torch.set_num_threads(threads)  # what threads that are yet to start will have
    return reader


def _copy_alone() -> None:
    torch.get_num_threads()  # at its first question a new thread takes the common number
    torch.set_num_threads(1)
