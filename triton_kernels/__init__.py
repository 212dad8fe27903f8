"""The Triton tier of KDA: the operator in kernels, and the steps around it that serving needs.

chunk               a prompt in chunks of 64 tokens, front end fused
recurrent           token by token, front end fused
decode              the same step on a pool of states, in place, with drafts
short_conv          the convolution before KDA; `short_conv_update` is its one-token form
"""

from .chunk import chunk_kda
from .decode import decode_step
from .recurrent import fused_recurrent_kda
from .short_conv import causal_conv1d, causal_conv1d_ref
from .short_conv_update import causal_conv1d_update, causal_conv1d_update_ref

__all__ = [
    "causal_conv1d",
    "causal_conv1d_ref",
    "causal_conv1d_update",
    "causal_conv1d_update_ref",
    "chunk_kda",
    "decode_step",
    "fused_recurrent_kda",
]
