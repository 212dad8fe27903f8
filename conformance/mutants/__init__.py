"""Known bugs of KDA kernels, each an emulated kernel with one step replaced."""

from . import delta, gates, gradients, host, state
from .registry import MUTANTS, Mutant, build

__all__ = ["MUTANTS", "Mutant", "build", "delta", "gates", "gradients", "host", "state"]
