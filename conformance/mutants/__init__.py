"""Known bugs of KDA kernels, each an emulated kernel with one step replaced."""

from . import (
    convolution,
    decode,
    delta,
    front,
    front_gradients,
    gates,
    gradients,
    host,
    inverse,
    memory,
    refusal,
    state,
    strength,
)
from .registry import MUTANTS, Mutant, build

# Each adds to MUTANTS.
FILES = (
    convolution,
    decode,
    delta,
    front,
    front_gradients,
    gates,
    gradients,
    host,
    inverse,
    memory,
    refusal,
    state,
    strength,
)

__all__ = ["FILES", "MUTANTS", "Mutant", "build"]
