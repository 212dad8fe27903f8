"""Kimi Linear, the whole model, in plain PyTorch: read `model` from top to bottom, then the layers it names.

config      sizes and constants, from a `config.json`
names       the checkpoint's tensors, and their places in the model
kda, mla    the two token mixers
moe         the experts
segments    padding and packing
cache       what is kept between calls
generate    prompts in, tokens out
checkpoint  from a folder to a model; `writer` makes small ones, `stream` runs those larger than memory
"""

from .cache import Cache, KDAState, MLAState, empty_cache
from .checkpoint import load_model, open_checkpoint
from .config import KimiLinearConfig
from .convolution import ShortConvolution, short_convolution
from .kda import KimiDeltaAttention
from .mla import MultiHeadLatentAttention
from .model import KimiLinearForCausalLM, KimiLinearModel, Output
from .moe import SparseMoE
from .names import checkpoint_shapes, load_tensors, parameter_of
from .sampling import Sampling
from .stream import stream_model
from .writer import make_checkpoint, tiny_config

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
    "Sampling",
    "ShortConvolution",
    "SparseMoE",
    "checkpoint_shapes",
    "empty_cache",
    "load_model",
    "load_tensors",
    "make_checkpoint",
    "open_checkpoint",
    "parameter_of",
    "short_convolution",
    "stream_model",
    "tiny_config",
]
