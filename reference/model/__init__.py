"""Kimi Linear, the whole model, in plain PyTorch: read `model` from top to bottom, then the layers it names.

config      sizes and constants, from a `config.json`
names       the checkpoint's tensors, and their places in the model
kda, mla    the two token mixers
moe         the experts
cache       what is kept between calls
"""

from .cache import Cache, KDAState, MLAState, empty_cache
from .config import KimiLinearConfig
from .convolution import ShortConvolution, short_convolution
from .kda import KimiDeltaAttention
from .mla import MultiHeadLatentAttention
from .model import KimiLinearForCausalLM, KimiLinearModel, Output
from .moe import SparseMoE
from .names import checkpoint_shapes, load_tensors, parameter_of

__all__ = [
    "Cache",
    "KDAState",
    "KimiDeltaAttention",
    "KimiLinearConfig",
    "KimiLinearForCausalLM",
    "KimiLinearModel",
    "MLAState",
    "MultiHeadLatentAttention",
    "Output",
    "ShortConvolution",
    "SparseMoE",
    "checkpoint_shapes",
    "empty_cache",
    "load_tensors",
    "parameter_of",
    "short_convolution",
]
