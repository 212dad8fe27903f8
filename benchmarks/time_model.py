"""What the Triton kernels ought to cost on an H200, beside what they were measured to cost.

    python benchmarks/time_model.py        prints the table of the porting guide

    parallel kernel    waves x (bytes / (SHARE copy) + matrix flops / MATRIX + elementwise / LANES)
    serial kernel      rounds x chunks of the longest segment x STEP
    decode             bytes / copy + START

A wave is as many programs as fit on the card at once; the last one counts whole. Bytes and operations are counted
from the kernels' code (`kernels`), copy is the bandwidth of a copy in the run that is compared with. STEP was
measured with the serial kernel alone, SHARE is fitted to the row of FITTED_TO, START to the first row of decoding;
every other row is a prediction.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
MULTIPROCESSORS = 132
MATRIX = 700e12  # flop/s of a large bf16 product on the card that was measured; 990e12 in its data sheet
LANES = MULTIPROCESSORS * 128 * 1.75e9  # elementwise operations a second: lanes times clock under load
REGISTERS = 65536  # of a multiprocessor
LAUNCH = 2e-6  # s between two kernels of a stream
K = V = 128
C, TILE = 64, 16
HALF, FULL = 2, 4  # bytes

SHARE = 1.13  # of a copy's bandwidth: above 1, since some of what a kernel writes is in the cache for the next
# s a chunk of the serial kernel, by value channels of a slice: SLICE_US of triton_kernels/chunk_plan.py
STEP = {16: 1.05e-6, 32: 1.22e-6, 64: 1.38e-6, 128: 2.39e-6}
START = 3.4e-6  # s: launch and first bytes of a decoding step; fitted to batch 1
FITTED_TO = (("B=1 T=8192 H=32", "bounded"),)

# Elementwise operations a token and key channel, counted in the source: the front end, decays, conversions.
ELEMENTWISE = {"softplus": 43, "bounded": 30}
TILE_REGISTERS = {"softplus": 253, "bounded": 168}  # of the Triton that was measured, 3.6
CHUNK_REGISTERS = 168


@dataclass(frozen=True)
class Kernel:
    """One kernel's work for a token of one value head, and how many programs of it the card holds."""

    name: str
    reads: int  # bytes
    writes: int
    flops: int  # of matrix products
    elementwise: int
    tokens: int  # of a program
    slots: int  # programs at once


@dataclass(frozen=True)
class Call:
    """A shape as the records name it."""

    B: int
    T: int
    H: int
    segments: int = 1

    @property
    def sequences(self) -> int:
        return max(self.B, self.segments)

    @property
    def tokens(self) -> int:
        """Tokens times value heads."""
        return self.B * self.T * self.H


def parse(shape: str) -> Call:
    """A call from `B=1 T=8192 H=32 packed x8`."""
    match = re.fullmatch(r"B=(\d+) T=(\d+) H=(\d+)(?: packed x(\d+))?", shape)
    if match is None:
        raise ValueError(f"shape must be like 'B=1 T=8192 H=32 packed x8'; got {shape!r}")
    B, T, H, segments = (int(x or 1) for x in match.groups())
    return Call(B, T, H, segments)


def kernels(gate: str) -> list[Kernel]:
    """The two parallel kernels; sizes as in `Workspace` of triton_kernels/chunk_workspace.py."""
    rows = K * HALF
    per_tile = TILE * HALF  # a row of T or Aqk inside its tile
    decays, strength = K * FULL // TILE, FULL
    return [
        Kernel(
            "tiles",
            reads=3 * rows + HALF,  # q, k, g, beta
            writes=3 * rows + 2 * per_tile + decays + strength,
            flops=(2 + 3) * 2 * TILE * K + 6 * 2 * TILE * TILE,
            elementwise=ELEMENTWISE[gate] * K,
            tokens=TILE,
            slots=slots(TILE_REGISTERS[gate], warps=1),
        ),
        Kernel(
            "chunks",
            reads=3 * rows + V * HALF + 2 * per_tile + decays + strength,
            writes=3 * rows + (V + C) * HALF + K * FULL // C,  # kg, wq, u, Aqk, chunk_decay
            flops=4 * 2 * C * K + 4 * 2 * C * C + 2 * C * (K + V),
            elementwise=10 * K,
            tokens=C,
            slots=slots(CHUNK_REGISTERS, warps=4),
        ),
    ]


def slots(registers: int, warps: int) -> int:
    """Programs that the card holds, where registers decide."""
    return MULTIPROCESSORS * (REGISTERS // (registers * 32 * warps))


def parallel_seconds(kernel: Kernel, call: Call, copy: float) -> float:
    """A kernel whose programs do not depend on each other."""
    programs = call.tokens / kernel.tokens
    waves = math.ceil(programs / kernel.slots) / (programs / kernel.slots)
    memory = (kernel.reads + kernel.writes) / (SHARE * copy)
    return call.tokens * waves * (memory + kernel.flops / MATRIX + kernel.elementwise / LANES)


def serial_seconds(call: Call) -> float:
    """The state kernel: one program a multiprocessor, the fastest of its widths."""
    chunks = math.ceil(call.B * call.T / call.sequences / C)
    heads = call.sequences * call.H
    return chunks * min(math.ceil(heads * V // block / MULTIPROCESSORS) * step for block, step in STEP.items())


def forward_seconds(call: Call, gate: str, copy: float) -> float:
    """`chunk_kda` with the front end fused and the final state written."""
    parallel = sum(parallel_seconds(kernel, call, copy) + LAUNCH for kernel in kernels(gate))
    return parallel + serial_seconds(call) + LAUNCH


def decode_seconds(batch: int, heads: int, copy: float) -> float:
    """`decode_step`, one token: every state is read and written."""
    return START + batch * heads * 2 * K * V * FULL / copy


def forward_rows() -> list[tuple[str, str, float, float]]:
    """Shape, gate, predicted and measured ms of every recorded row of ours."""
    record = json.loads((RESULTS / "gpu.json").read_text())
    copy = record["copy_TBps"] * 1e12
    ours = [row for row in record["times"] if row["candidate"] == "ours"]
    return [
        (row["shape"], row["gate"], forward_seconds(parse(row["shape"]), row["gate"], copy) * 1e3, row["ms"])
        for row in ours
    ]


def decode_rows() -> list[tuple[str, float, float]]:
    """Batch, predicted and measured us of every recorded row."""
    text = (RESULTS / "decode.txt").read_text()
    copy = float(re.search(r"copy ([\d.]+) TB/s", text)[1]) * 1e12
    rows = re.findall(r"^batch +(\d+): +([\d.]+) us", text, flags=re.M)
    return [(f"{batch}", decode_seconds(int(batch), 32, copy) * 1e6, float(us)) for batch, us in rows]


def table() -> str:
    """Model beside measurement, as Markdown."""
    lines = ["| forward | gate | model, ms | measured, ms | off by |", "|---|---|--:|--:|--:|"]
    for shape, gate, model, measured in forward_rows():
        note = " (fitted)" if (shape, gate) in FITTED_TO else ""
        lines.append(f"| {shape} | {gate} | {model:.3f} | {measured:.3f} | {model / measured - 1:+.0%}{note} |")
    lines += ["", "| decode, batch | model, us | measured, us | off by |", "|--:|--:|--:|--:|"]
    for batch, model, measured in decode_rows():
        lines.append(f"| {batch} | {model:.1f} | {measured:.1f} | {model / measured - 1:+.0%} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
