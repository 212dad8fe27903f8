"""Kernels known to be correct: a suite that fails one of them has a fault of its own."""

from __future__ import annotations

from .adapter import Contract
from .emulated import Emulated, EmulatedRecurrent

PRECISIONS = {
    "bf16": ("bf16", "bf16"),
    "fp16": ("fp16", "fp16"),
    "tf32": ("fp32", "tf32"),
    "fp32": ("fp32", "fp32"),
}


def chunk_kernel(C: int, precision: str, rebased: bool = True, state: str = "fp32") -> Emulated:
    """An emulated chunk kernel by its chunk size and its formats."""
    io, operand = PRECISIONS[precision]
    form = "rebased" if rebased else "pairwise"
    contract = Contract(io=io, operand=operand, state=state, chunk_size=C)
    return Emulated(contract, rebased, f"emulated {form} chunk kernel")


def recurrent_kernel(io: str, state: str = "fp32") -> EmulatedRecurrent:
    """An emulated recurrent kernel."""
    contract = Contract(io=io, operand="fp32", state=state, chunk_size=None)
    return EmulatedRecurrent(contract, name="emulated recurrent kernel")


def panel() -> list[Emulated]:
    """Chunk sizes by formats by form of the decays, recurrent kernels, and states in bf16."""
    return [
        *[chunk_kernel(C, precision) for C in (16, 32, 64) for precision in PRECISIONS],
        chunk_kernel(32, "bf16", rebased=False),
        chunk_kernel(64, "fp32", rebased=False),
        chunk_kernel(32, "bf16", state="bf16"),
        recurrent_kernel("fp32"),
        recurrent_kernel("bf16"),
        recurrent_kernel("bf16", state="bf16"),
    ]
