"""One decoding step for serving: states live in a pool, a call names the slots, the pool is updated in place.

    o = decode_step(q, k, v, g, beta, state_pool=pool, slot_indices=slots, front_end=front_end)

Which slot a sequence reads and writes:

| slot_indices | reads                              | writes                                                       |
|--------------|------------------------------------|--------------------------------------------------------------|
| [N]          | slot_indices[n]                    | the same slot, the state after the last token                |
| [N, M]       | slot_indices[n, accepted[n] - 1]   | slot_indices[n, t], the state after token t (speculation)    |

accepted[n] counts the tokens of the previous step that were kept, from 1 to M; where num_accepted_tokens is
None it is 1. To reject drafts is then to pass a smaller number: no state has to be rolled back.

An index that is `pad_slot`, or outside the pool, means nobody: no state is read or written there, and a
sequence whose first state is nobody's has output rows of 0. All other slots keep their bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..reference.front_end import FrontEnd
from .configurations import CHECKPOINT, describe, empty, example_front_ends, example_inputs
from .decode_kernel import decode_kernel
from .gate import FRONT_END_SCHEMA, front_end_arguments, named_front_end
from .pool import STATE_DTYPES, check_pool, check_slot_contents, check_slots
from .replay import Calls
from .step import token_launch
from .support import (
    MIN_BLOCK,
    Configuration,
    Launch,
    check_no_gradient,
    check_supported,
    checked_dims,
    define_op,
    metadata,
    next_power_of_2,
)

# Value columns and warps a program, for every batch size, so that a sequence's bits do not depend on its batch.
# On an H200 with K = V = 128 the best of 16 tiles from 16 sequences up; for a single one it costs 1 us of 5.
TILE = (64, 4)
MAX_STATE = 128 * 64  # elements a program holds: 64 registers a thread at 4 warps
MIN_STATE_PER_WARP = 512  # less, and threads of a program would hold copies of the same elements


@cache
def tile_of(K: int, V: int, tile: tuple[int, int] = TILE) -> tuple[int, int, int]:
    """BK, BV and warps: the tile, cut to the sizes that there are."""
    BK = max(MIN_BLOCK, next_power_of_2(K))
    BV = min(tile[0], MAX_STATE // BK, max(MIN_BLOCK, next_power_of_2(V)))
    return BK, BV, min(tile[1], max(1, BK * BV // MIN_STATE_PER_WARP))


def decode_launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    o: Tensor,
    pool: Tensor,
    slot_indices: Tensor,
    accepted: Tensor | None,
    cu_seqlens: Tensor | None,
    pad_slot: int,
    scale: float,
    front_end: dict[str, Any],
    tile: tuple[int, int] = TILE,
) -> Launch:
    """The launch that fills o [B, T, HV, V], contiguous, and updates pool [slots, HV, K, V]."""
    per_token = slot_indices.dim() == 2
    slots = {
        "pool": pool,
        "pool_strides": pool.stride(),
        "slots": pool.shape[0],
        "pad_slot": pad_slot,
        "slot_indices": slot_indices,
        "slot_strides": slot_indices.stride() if per_token else (slot_indices.stride(0), 0),
        "accepted": accepted,
        "M": slot_indices.shape[1] if per_token else 0,
    }
    return token_launch(
        decode_kernel,
        *(q, k, v, g, beta, cu_seqlens, scale, tile_of(q.shape[-1], v.shape[-1], tile)),
        **{"o": o, "SEVERAL": q.shape[1] > 1, **slots, **front_end},
    )


CALLS = Calls(
    *("q", "k", "v", "g", "beta", "pool", "slot_indices", "accepted", "cu_seqlens", "A_log", "dt_bias", "o"),
)


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state_pool: Tensor,
    slot_indices: Tensor,
    num_accepted_tokens: Tensor | None,
    cu_seqlens: Tensor | None,
    pad_slot: int,
    scale: float,
    *front_end: Any,
) -> Tensor:
    o = torch.empty_like(v, memory_format=torch.contiguous_format)

    def launches() -> list[Launch]:
        slots = (slot_indices, num_accepted_tokens, cu_seqlens, pad_slot)
        return [decode_launch(q, k, v, g, beta, o, state_pool, *slots, scale, named_front_end(front_end))]

    A_log, dt_bias, *rest = front_end
    inputs = (q, k, v, g, beta, state_pool, slot_indices, num_accepted_tokens, cu_seqlens, A_log, dt_bias)
    CALLS.run((metadata(*inputs), pad_slot, scale, *rest), (*inputs, o), launches)
    return o


def _decode_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


_op = define_op(
    "decode_step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state_pool, Tensor slot_indices, "
    f"Tensor? num_accepted_tokens, Tensor? cu_seqlens, int pad_slot, float scale, {FRONT_END_SCHEMA}) -> Tensor",
    _decode,
    _decode_fake,
)


def decode_step(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    *,
    state_pool: Float[Tensor, "slots HV K V"],
    slot_indices: Int[Tensor, " N"] | Int[Tensor, "N M"],
    front_end: FrontEnd | None = None,
    scale: float | None = None,
    pad_slot: int = -1,
    num_accepted_tokens: Int[Tensor, " N"] | None = None,
    cu_seqlens: Int[Tensor, " N_plus_1"] | None = None,
    check_indices: bool = False,
) -> Float[Tensor, "B T HV V"]:
    """Advance sequences by their next tokens, states in `state_pool` updated in place, and return o.

    q, k, v, g (natural log), beta, front_end and scale are as in `kimi_linear.reference.contract`, and so are
    shapes and errors; the step is Eq. (1), arXiv:2510.26692. N = B sequences of T tokens each, or N packed
    ones of any lengths with cu_seqlens and B = 1. T is 1 in plain decoding, 1 + drafts in speculation. The pool
    is fp32 or bf16, of any strides; arithmetic is fp32, and a state is rounded only where it is stored.

    Indices are int32 or int64. See the module for the slots that are read and written. check_indices=True reads
    them on the host, which waits for the device, and raises ValueError for an index outside the pool, a count
    outside [1, M], a sequence longer than M, or one slot written for two sequences: a race. Without it such a
    call is wrong but stays inside its tensors.
    """
    dims = checked_dims(q, k, v, g, beta, front_end=front_end, scale=scale, cu_seqlens=cu_seqlens)
    check_supported("decode_step", q, dims)
    check_pool("state_pool", state_pool, q, "[slots, HV, K, V]", (dims.HV, dims.K, dims.V))
    check_slots(slot_indices, num_accepted_tokens, q, dims, packed=cu_seqlens is not None)
    if check_indices:
        check_slot_contents(slot_indices, state_pool.shape[0], pad_slot, num_accepted_tokens, cu_seqlens)
    raw = front_end_arguments(front_end)
    check_no_gradient(
        "decode_step", q, k, v, g, beta, state_pool, raw["A_log"], raw["dt_bias"], instead="use torch.no_grad()"
    )
    scale = dims.K**-0.5 if scale is None else float(scale)
    return _op(
        q,
        k,
        v,
        g,
        beta,
        state_pool,
        slot_indices,
        num_accepted_tokens,
        cu_seqlens,
        pad_slot,
        scale,
        *raw.values(),
    )


def configurations() -> list[Configuration]:
    """The checkpoint's sizes, alone and in a batch, both pool dtypes, and drafts; odd sizes; the largest K."""
    cases = [(CHECKPOINT, B, 1, dtype) for B in (1, 64) for dtype in STATE_DTYPES]
    cases += [(CHECKPOINT, 16, 4, torch.float32), ({"H": 2, "HV": 4, "K": 60, "V": 20}, 3, 4, torch.bfloat16)]
    cases += [({"H": 2, "HV": 4, "K": 256, "V": 512}, 64, 1, torch.float32)]
    found = []
    for sizes, B, T, dtype in cases:
        HV, K, V = sizes["HV"], sizes["K"], sizes["V"]
        x = example_inputs(B, T, sizes)
        slots = empty(B, dtype=torch.int32) if T == 1 else empty(B, T, dtype=torch.int32)
        for gate, front_end in example_front_ends(HV, K).items():
            launch = decode_launch(
                **x,
                o=x["v"],
                pool=empty(8, HV, K, V, dtype=dtype),
                slot_indices=slots,
                accepted=None if T == 1 else slots[:, 0].contiguous(),
                cu_seqlens=None,
                pad_slot=-1,
                scale=1.0,
                front_end=front_end_arguments(front_end),
            )
            pool = str(dtype).removeprefix("torch.")
            found.append(Configuration(describe(gate=gate, B=B, T=T, K=K, V=V, pool=pool), launch))
    return found
