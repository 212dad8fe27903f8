"""Like a kernel on a GPU: after an illegal access at seven key channels, nothing works in its process any more."""

from kimi_linear.conformance.panel import chunk_kernel

kernel = chunk_kernel(16, "fp32")
capabilities, identity, convolve = kernel.capabilities, kernel.identity, kernel.convolve
lost = []


def run(call, want):
    if lost or (call.q.shape[-1] == 7 and call.q.shape[1] > 5):
        lost.append(True)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return kernel.run(call, want)
