"""Kernels that end or stop their process in compiled code; `kda` chooses by the number of key channels."""

import ctypes
import os
import signal
import time

from kimi_linear.conformance.panel import chunk_kernel

kernel = chunk_kernel(16, "fp32")
capabilities, identity, convolve = kernel.capabilities, kernel.identity, kernel.convolve
libc = ctypes.CDLL(None)


def hang():
    """A sleep in C that no signal interrupts, but SIGKILL."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGINT})
    libc.sleep(1000)


def hoard():
    return bytearray(2**33)


MISBEHAVIOUR = {
    7: lambda: ctypes.string_at(0),
    24: lambda: os._exit(3),
    12: hang,
    40: lambda: os.kill(os.getpid(), signal.SIGKILL),
    60: hoard,
}


def run(call, want):
    if call.q.shape[1] > 5:  # the first call, which looks for the reference, may pass
        MISBEHAVIOUR.get(call.q.shape[-1], lambda: None)()
    return kernel.run(call, want)


class Slow:
    """Correct, and never done."""

    capabilities, identity = staticmethod(kernel.capabilities), staticmethod(kernel.identity)
    convolve = staticmethod(kernel.convolve)

    @staticmethod
    def run(call, want):
        time.sleep(0.3)
        return kernel.run(call, want)
