"""Time one decoding step on the GPU that is there, against what a copy of the same card reaches.

    python benchmarks/decode.py [--heads 32] [--dtype float32|bfloat16] [--tokens 1]

Calls are captured in CUDA graphs over slots that change from call to call, so that no state is still in L2 from
the call before. Bytes: every state read once and written once.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import triton

from kimi_linear.reference import FrontEnd, SoftplusGate
from kimi_linear.triton_kernels import decode_step

K = V = 128
SLOTS = 512  # 1 GiB of fp32 states at 32 heads: far more than any L2
COPY_ELEMENTS = 2**25  # 134 MB a piece, read and written
REPEATS = 30


def seconds_a_call(calls: list[Callable[[], object]]) -> list[float]:
    """Capture the calls in one graph; times of its replays, a call."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return times


def copy_bandwidth() -> float:
    """Bytes a second that a device-to-device copy reads and writes."""
    source = torch.randn(8, COPY_ELEMENTS, device="cuda")
    target = torch.empty_like(source)
    times = seconds_a_call([lambda i=i: target[i].copy_(source[i]) for i in range(8)])
    return 2 * COPY_ELEMENTS * source.element_size() / statistics.median(times)


def step_times(B: int, T: int, heads: int, pool: torch.Tensor) -> list[float]:
    """Times of a step of B sequences, T tokens each, on slots that no two neighbouring calls share."""
    sets = max(2, min(64, SLOTS // (4 * B)))
    shape = (B, T, heads, K)
    q, k, v, g = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    beta = torch.randn(shape[:3], device="cuda", dtype=torch.bfloat16)
    front_end = FrontEnd(SoftplusGate(torch.zeros(heads, device="cuda"), torch.zeros(heads, K, device="cuda")))
    slots = torch.randperm(SLOTS, device="cuda").int()[: sets * B].view(sets, B)
    calls = [
        lambda i=i: decode_step(q, k, v, g, beta, front_end=front_end, state_pool=pool, slot_indices=slots[i])
        for i in range(sets)
    ]
    return seconds_a_call(calls)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tokens", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy {copy / 1e12:.2f} TB/s; H={arguments.heads} K=V={K} {arguments.dtype} states, T={arguments.tokens}")
    pool = torch.randn(SLOTS, arguments.heads, K, V, device="cuda").to(getattr(torch, arguments.dtype))
    for B in (1, 16, 64, 256):
        times = step_times(B, arguments.tokens, arguments.heads, pool)
        low, median, high = min(times), statistics.median(times), max(times)
        rate = 2 * B * pool[0].numel() * pool.element_size() / median
        spread = f"({low * 1e6:.2f} to {high * 1e6:.2f})"
        print(f"batch {B:3}: {median * 1e6:8.2f} us {spread}, {rate / 1e12:.2f} TB/s, {rate / copy:4.0%} of a copy")


if __name__ == "__main__":
    main()
