"""Known bugs of KDA kernels, each an emulated kernel with one step replaced."""

from . import delta, front, front_gradients, gates, gradients, host, serving, state
from .registry import MUTANTS, Mutant, build

__all__ = [
    "MUTANTS",
    "Mutant",
    "build",
    "delta",
    "front",
    "front_gradients",
    "gates",
    "gradients",
    "host",
    "serving",
    "state",
]
