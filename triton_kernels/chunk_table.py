"""Which chunk holds which tokens, found on the device: cu_seqlens is never read by the host.

Every segment is cut into chunks of 64 tokens; chunks never cross segments. They are numbered in the order of
the segments and then of time:

    first_chunk[n]   number of segment n's first chunk            n = 0 .. N - 1
    first_chunk[N]   that of the tail: rows past the last offset, whose only stage is to become zero
    first_chunk[N+1] the number of chunks in all

There are at most T // 64 + N + 1 of them, which is what the grids hold; programs past the end leave at once.
"""

import triton
import triton.language as tl

CHUNK = 64  # tokens of a chunk: a [64, 64] inverse costs less than the state it saves reading
TILE = 16  # tokens of a tile: the least that a matrix unit takes
SCAN_BLOCK = 1024  # segments that one step of the table's scan takes


@triton.jit
def kda_chunk_table_kernel(cu_seqlens, first_chunk, N, T, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """first_chunk = exclusive running sum of ceil(length / CHUNK), by one program."""
    before = 0
    for n0 in range(0, N + 1, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        start = load_offset(cu_seqlens, n, n <= N, T)
        end = tl.where(n < N, load_offset(cu_seqlens, n + 1, n < N, T), T)
        chunks = tl.where(n <= N, (tl.maximum(end - start, 0) + CHUNK - 1) // CHUNK, 0)
        through = before + tl.cumsum(chunks, 0)
        tl.store(first_chunk + n, through - chunks, mask=n <= N)
        before += tl.sum(chunks, 0)
    tl.store(first_chunk + N + 1, before)


@triton.jit
def load_offset(cu_seqlens, n, mask, T):
    """A segment's offset, kept inside the tensor whatever it says: contents cannot be checked before launch."""
    offset = tl.load(cu_seqlens + n, mask=mask, other=0).to(tl.int32)
    return tl.minimum(tl.maximum(offset, 0), T)


@triton.jit
def locate_chunk(
    chunk, cu_seqlens, first_chunk, T, N, PACKED: tl.constexpr, STEPS: tl.constexpr, CHUNK: tl.constexpr
):
    """Return (batch row, segment, first token, token after the segment's last) of a chunk.

    Segment N is the tail, segment N + 1 none at all: the chunk does not exist.
    """
    if PACKED:
        low = tl.zeros_like(chunk)
        high = low + N + 2
        for _ in range(STEPS):  # the last segment whose first chunk is not after this one
            middle = (low + high) // 2
            after = tl.load(first_chunk + tl.minimum(middle, N + 1)) > chunk
            high = tl.where(after, middle, high)
            low = tl.where(after | (middle >= N + 2), low, middle)
        segment = low
        start = load_offset(cu_seqlens, tl.minimum(segment, N), True, T)
        end = tl.where(segment < N, load_offset(cu_seqlens, tl.minimum(segment + 1, N), True, T), T)
        token = start + (chunk - tl.load(first_chunk + segment)) * CHUNK
        row = tl.zeros_like(chunk)
    else:
        per_row = tl.cdiv(T, CHUNK)
        segment = chunk // per_row
        token = (chunk % per_row) * CHUNK
        end = tl.zeros_like(chunk) + T
        row = segment
    return row, segment, token, end


def chunk_count(B: int, T: int, N: int, packed: bool) -> int:
    """Chunks that a grid must hold, for any contents of cu_seqlens."""
    return T // CHUNK + N + 1 if packed else B * triton.cdiv(T, CHUNK)


def search_steps(N: int) -> int:
    """Halvings that find one of N + 2 entries."""
    return (N + 2).bit_length()
