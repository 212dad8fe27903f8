"""`chunk_kda`: the stages put together, and a record of every intermediate for those who port them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from ..contract import check_chunk_size
from ..front_end import FrontEnd
from ..operands import Operands, prepare
from .halving import Decays, cumulative_gate, invert_unit_lower
from .layout import ChunkLayout, chunk_layout
from .stages import chunk_output, key_products, query_products, state_pass, wy_vectors

CHUNK_SIZE = 64  # tokens; a [64, 64] inverse costs less than the state it saves reading
WINDOW = 2**21  # elements of a tensor of rows at a time: past that, allocation costs more than arithmetic


class ChunkInputs(NamedTuple):
    """The operator's inputs cut into chunks, with the factors that only scale a row folded in."""

    q: Float[Tensor, "HV N C K"]  # scale * q
    k: Float[Tensor, "HV N C K"]
    v: Float[Tensor, "HV N C V"]
    beta: Float[Tensor, "HV N C 1"]
    beta_k: Float[Tensor, "HV N C K"]
    beta_v: Float[Tensor, "HV N C V"]
    g: Float[Tensor, "HV N C K"]


class ChunkStages(NamedTuple):
    """Every intermediate of the chunk form by name, for comparison stage by stage.

    Tensors are [HV, N, C, ..] in the order of `layout`; `by_token` and `by_chunk` give the orders that
    kernels usually write.
    """

    layout: ChunkLayout
    inputs: ChunkInputs
    decays: Decays  # stage 1
    A: Float[Tensor, "HV N C C"]  # stage 2
    Aqk: Float[Tensor, "HV N C C"]  # stage 2
    T: Float[Tensor, "HV N C C"]  # stage 3
    w: Float[Tensor, "HV N C K"]  # stage 4
    u: Float[Tensor, "HV N C V"]  # stage 4
    S: Float[Tensor, "HV N K V"]  # stage 5: the state at each chunk's start
    v_new: Float[Tensor, "HV N C V"]  # stage 5
    left: list[Tensor]  # stage 5: states of segments that ended, in the order of `StatePass`
    o_inter: Float[Tensor, "HV N C V"]  # stage 6
    o_intra: Float[Tensor, "HV N C V"]  # stage 6

    @property
    def G(self) -> Float[Tensor, "HV N C K"]:
        """Stage 1: the cumulative gate, natural log."""
        return self.decays.G

    @property
    def final_state(self) -> Float[Tensor, "segments HV K V"]:
        """Stage 5: each segment's last state."""
        return self.layout.segment_order(self.left)

    @property
    def o(self) -> Float[Tensor, "HV N C V"]:
        """Stage 6: the output."""
        return self.o_inter + self.o_intra

    def by_token(self, name: str) -> Float[Tensor, "B T HV D"]:
        """A stage that has a row for each token (G, A, Aqk, T, w, u, v_new, o, ..) as [B, T, HV, *]."""
        return self.layout.join(getattr(self, name))

    def by_chunk(self, name: str) -> Float[Tensor, "N HV *rest"]:
        """A stage as [N, HV, ..], chunks in the order of the segments and then of time."""
        most = int(self.layout.index.max()) + 1 if len(self.layout.index) else 1
        by_time = torch.argsort(self.layout.segment * most + self.layout.index)
        return getattr(self, name).transpose(0, 1)[by_time]


def chunk_kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    *,
    front_end: FrontEnd | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Float[Tensor, "B T HV V"], Float[Tensor, "N HV K V"] | None]:
    """Kimi Delta Attention in chunks of matrix products: the function of `recurrent_kda`, O(T C) work.

    Shapes, dtypes and errors as in `kimi_linear.reference.contract`; g is in natural log. Computes in fp32,
    or in fp64 for fp64 inputs; o has the dtype of v. chunk_size is 16, 32, 64 or 128 and changes the result
    by rounding only. Exact for every gate <= 0, -inf included, in values and gradients.

    Finite inputs after a token never change its output by a bit. A NaN or inf does reach earlier rows of
    its own chunk, head and segment, through 0 * NaN in the matrix products, and nothing else.

    Section 3, arXiv:2510.26692; stages in `kimi_linear.reference.chunked.stages`.
    """
    check_chunk_size(chunk_size)
    x = prepare(
        q,
        k,
        v,
        g,
        beta,
        front_end=front_end,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    layout = chunk_layout(x.dims.B, x.dims.T, x.offsets, chunk_size, x.q.device)
    o, final_state = run_windows(x, layout)
    return layout.join(o).to(v.dtype), final_state if output_final_state else None


def chunk_stages(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    *,
    front_end: FrontEnd | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> ChunkStages:
    """All intermediates of `chunk_kda` for the same arguments, by name."""
    check_chunk_size(chunk_size)
    x = prepare(
        q,
        k,
        v,
        g,
        beta,
        front_end=front_end,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
    )
    return run_all_stages(x, chunk_size)


def run_all_stages(x: Operands, chunk_size: int) -> ChunkStages:
    """The six stages over all chunks at once."""
    layout = chunk_layout(x.dims.B, x.dims.T, x.offsets, chunk_size, x.q.device)
    return run_stages(x, layout, layout.longest_first(x.h0), layout.steps)


def run_windows(
    x: Operands, layout: ChunkLayout
) -> tuple[Float[Tensor, "HV N C V"], Float[Tensor, "segments HV K V"]]:
    """The six stages over a window of chunks at a time: memory for one window, time linear in T."""
    chunks = WINDOW // (x.dims.HV * layout.chunk_size * max(x.dims.K, x.dims.V))
    S, left = layout.longest_first(x.h0), []
    outputs = [x.v.new_zeros(x.dims.HV, 0, layout.chunk_size, x.dims.V)]
    for steps in layout.windows(chunks):
        stages = run_stages(x, layout, S, steps)
        outputs.append(stages.o)
        *ended, S = stages.left
        left += ended
    return torch.cat(outputs, dim=1), layout.segment_order([*left, S])


def run_stages(
    x: Operands, layout: ChunkLayout, S: Float[Tensor, "HV segments K V"], steps: Sequence[slice]
) -> ChunkStages:
    """The six stages in order over the chunks of some steps, from the states S before the first of them."""
    start, stop = (steps[0].start, steps[-1].stop) if steps else (0, 0)
    y = cut_inputs(x, layout, slice(start, stop))
    decays = cumulative_gate(y.g)  # stage 1
    A = key_products(y.beta_k, y.k, decays)  # stage 2
    Aqk = query_products(y.q, y.k, decays)  # stage 2
    T = invert_unit_lower(A)  # stage 3
    w, u = wy_vectors(T, y.beta_k, y.beta_v, decays)  # stage 4
    own_steps = [slice(step.start - start, step.stop - start) for step in steps]
    starts, v_new, left = state_pass(w, u, y.k, decays, S, own_steps)  # stage 5
    o_inter, o_intra = chunk_output(y.q, Aqk, starts, v_new, decays)  # stage 6
    return ChunkStages(layout, y, decays, A, Aqk, T, w, u, starts, v_new, left, o_inter, o_intra)


def cut_inputs(x: Operands, layout: ChunkLayout, chunks: slice) -> ChunkInputs:
    """Cut the operands into chunks and fold scale and beta into the rows they multiply."""
    q, k, v, g, beta = (layout.split(y, chunks) for y in (x.q, x.k, x.v, x.g, x.beta))
    beta = rearrange(beta, "h n c -> h n c 1")
    return ChunkInputs(x.scale * q, k, v, beta, beta * k, beta * v, g)
