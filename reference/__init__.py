"""Kimi Delta Attention in plain PyTorch: the contract, the gates, and two tiers that agree.

naive      the recurrence, token by token: the definition
chunked    the same function in numbered stages of matrix products
"""

from .activations import softplus
from .contract import Dims, check_inputs, check_values
from .front_end import FrontEnd, l2norm
from .gates import BoundedGate, SoftplusGate
from .operands import KDAGradients

__all__ = [
    "BoundedGate",
    "Dims",
    "FrontEnd",
    "KDAGradients",
    "SoftplusGate",
    "check_inputs",
    "check_values",
    "l2norm",
    "softplus",
]
