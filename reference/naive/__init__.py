"""The definition: KDA as a recurrence over tokens, and its adjoint written by hand."""

from .backward import recurrent_kda_backward
from .recurrent import kda_scan, kda_step, recurrent_kda

__all__ = ["kda_scan", "kda_step", "recurrent_kda", "recurrent_kda_backward"]
