"""KDA in chunks: the stages of a fast kernel in plain PyTorch, and their adjoint."""

from .backward import chunk_kda_backward
from .forward import ChunkStages, chunk_kda, chunk_stages
from .halving import Decays, Level, cumulative_gate, decayed_products, invert_unit_lower
from .layout import ChunkLayout, chunk_layout
from .stages import StatePass, chunk_output, key_products, query_products, state_pass, wy_vectors

__all__ = [
    "ChunkLayout",
    "ChunkStages",
    "Decays",
    "Level",
    "StatePass",
    "chunk_kda",
    "chunk_kda_backward",
    "chunk_layout",
    "chunk_output",
    "chunk_stages",
    "cumulative_gate",
    "decayed_products",
    "invert_unit_lower",
    "key_products",
    "query_products",
    "state_pass",
    "wy_vectors",
]
