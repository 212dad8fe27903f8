"""What every KDA tier accepts: shapes, dtypes and values, checked once at the public boundary.

    op(q, k, v, g, beta, *, front_end=None, scale=None, initial_state=None,
       output_final_state=False, cu_seqlens=None) -> (o, final_state | None)

| name          | shape         | dtype                      | meaning                                              |
|---------------|---------------|----------------------------|------------------------------------------------------|
| q, k          | [B, T, H, K]  | fp16, bf16, fp32 or fp64   | queries, keys                                        |
| v             | [B, T, HV, V] | as q                       | values; HV a multiple of H                           |
| g             | [B, T, HV, K] | as q, or fp32              | log decay, natural log, <= 0, -inf allowed           |
| beta          | [B, T, HV]    | as q, or fp32              | write strength                                       |
| initial_state | [N, HV, K, V] | fp32 (fp64 for fp64 q)     | N = B, or the number of packed segments              |
| cu_seqlens    | [N + 1]       | int32 or int64             | segment offsets of a packed batch (B = 1)            |

Value head hv reads q/k head hv // (HV // H). fp64 inputs are fp64 throughout: a gate that was rounded to
fp32 on its way would make the result look exact and be wrong.

Every error names the argument, what was wanted and what came: ValueError for a shape or value, TypeError
for a type or dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from types import UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .front_end import FrontEnd

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CHUNK_SIZES = (16, 32, 64, 128)


class Dims(NamedTuple):
    """Sizes of one call: batch, tokens, q/k heads, value heads, key and value channels, segments."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The reference computes in fp32, or in fp64 where the inputs are fp64. It has no other option."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    front_end: FrontEnd | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Dims:
    """Check all that can be told without reading a tensor's contents, and return the sizes."""
    _check_tensors(q=q, k=k, v=v, g=g, beta=beta)
    dims = _check_shapes(q, k, v, g, beta)
    _check_dtypes(q, k, v, g, beta)
    _check_devices(q, k=k, v=v, g=g, beta=beta)
    if scale is not None:
        _check_scale(scale)
    if cu_seqlens is not None:
        dims = dims._replace(N=_check_packing(cu_seqlens, dims.B))
    if initial_state is not None:
        _check_state("initial_state", initial_state, q, dims)
    if front_end is not None:
        _check_front_end(front_end, q, dims)
    return dims


def check_values(g: Tensor, offsets: Sequence[int] | None, front_end: FrontEnd | None) -> None:
    """Check what only the contents tell: segment offsets, and a log decay that is given as it is.

    Rows past the last offset do not count. A raw gate (`front_end.gate` set) may hold anything: no
    input of it gives a positive decay.
    """
    if offsets is not None:
        check_offsets(offsets, g.shape[1])
        g = g[:, : offsets[-1]]
    if front_end is not None and front_end.gate is not None:
        return
    highest = g.detach().amax().item() if g.numel() else -math.inf
    if not highest <= 0:
        hint = "; a raw gate needs front_end=FrontEnd(gate=...)" if highest > 0 else ""
        _reject("g", f"a log decay, <= 0 and not NaN{hint}", f"a highest value of {highest}")


def check_offsets(offsets: Sequence[int], T: int) -> None:
    """Check the contents of cu_seqlens, read to the host: from 0, never decreasing, at most T."""
    if offsets[0] != 0:
        _reject("cu_seqlens", "offsets that start at 0", f"{offsets[0]}")
    for n, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            _reject("cu_seqlens", "offsets that never decrease", f"{start} then {end} at index {n + 1}")
    if offsets[-1] > T:
        _reject("cu_seqlens", f"offsets of at most T={T}", f"{offsets[-1]}")


def check_output_grads(do: Tensor, dht: Tensor | None, q: Tensor, dims: Dims) -> None:
    """Check the cotangents that an adjoint is given: do like o, dht like final_state."""
    _check_tensors(do=do)
    _check_shape("do", do, "[B, T, HV, V]", (dims.B, dims.T, dims.HV, dims.V))
    if not do.is_floating_point():
        _reject_type("do", "a floating point dtype", f"{do.dtype}")
    _check_devices(q, do=do)
    if dht is not None:
        _check_state("dht", dht, q, dims)


def check_chunk_size(chunk_size: int) -> None:
    """Chunks are powers of two, because every stage halves them."""
    _check_number("chunk_size", chunk_size, int, f"one of {CHUNK_SIZES}")
    if chunk_size not in CHUNK_SIZES:
        _reject("chunk_size", f"one of {CHUNK_SIZES}", f"{chunk_size!r}")


def check_gate_parameters(A_log: Tensor, dt_bias: Tensor) -> None:
    """Check a gate's parameters as far as they can be told apart from the heads they belong to."""
    _check_tensors(A_log=A_log, dt_bias=dt_bias)
    if A_log.dim() != 1 and not (A_log.dim() == 4 and A_log.numel() == A_log.shape[2]):
        _reject("A_log", "[HV] or [1, 1, HV, 1]", f"{list(A_log.shape)}")
    if dt_bias.dim() not in (1, 2):
        _reject("dt_bias", "[HV, K] or [HV * K]", f"{list(dt_bias.shape)}")
    for name, parameter in (("A_log", A_log), ("dt_bias", dt_bias)):
        if parameter.dtype not in (torch.float32, torch.float64):
            hint = "load it without a cast: a rounded decay rate shows in the logits"
            _reject_type(name, "float32 (float64 for float64 inputs)", f"{parameter.dtype}; {hint}")


def check_lower_bound(lower_bound: float) -> None:
    """A bounded gate lies in (lower_bound, 0)."""
    _check_number("lower_bound", lower_bound, int | float, "a finite negative number")
    if not -math.inf < lower_bound < 0:
        _reject("lower_bound", "a finite negative number", f"{lower_bound!r}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that an option is one of those that exist."""
    if value not in choices:
        _reject(name, "one of " + ", ".join(map(repr, choices)), repr(value))


def check_positive(name: str, value: float) -> None:
    """Check a number that must be positive and finite."""
    _check_number(name, value, int | float, "a positive finite number")
    if not 0 < value < math.inf:
        _reject(name, "a positive finite number", f"{value!r}")


def _check_tensors(**tensors: Any) -> None:
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            _reject_type(name, "a torch.Tensor", type(x).__name__)


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Dims:
    _check_rank("q", q, "[B, T, H, K]")
    B, T, H, K = q.shape
    _check_shape("k", k, "[B, T, H, K] like q", (B, T, H, K))
    _check_rank("v", v, "[B, T, HV, V]")
    HV, V = v.shape[2:]
    _check_shape("v", v, "[B, T, HV, V] with B and T of q", (B, T, HV, V))
    if min(H, K, HV, V) < 1:
        _reject("q and v", "at least one head and one channel", f"H={H}, K={K}, HV={HV}, V={V}")
    if HV % H:
        _reject("v", f"[B, T, HV, V] with HV a multiple of H={H}", f"HV={HV}")
    _check_shape("g", g, "[B, T, HV, K], one gate a key channel", (B, T, HV, K))
    _check_shape("beta", beta, "[B, T, HV]", (B, T, HV))
    return Dims(B, T, H, HV, K, V, N=B)


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    if q.dtype not in FLOAT_DTYPES:
        _reject_type("q", "float16, bfloat16, float32 or float64", f"{q.dtype}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            _reject_type(name, f"the dtype of q, {q.dtype}", f"{x.dtype}")
    for name, x in (("g", g), ("beta", beta)):
        if x.dtype not in (q.dtype, compute_dtype(q.dtype)):
            wanted = {str(q.dtype), str(compute_dtype(q.dtype))}
            _reject_type(name, " or ".join(sorted(wanted)), f"{x.dtype}")


def _check_devices(q: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        if x.device != q.device:
            _reject(name, f"on the device of q, {q.device}", f"{x.device}")


def _check_scale(scale: float) -> None:
    _check_number("scale", scale, int | float, "a number, or None for K ** -0.5")
    if not math.isfinite(scale):
        _reject("scale", "a finite number", f"{scale}")


def _check_number(name: str, value: Any, kinds: type | UnionType, want: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        _reject_type(name, want, f"{value!r}, a {type(value).__name__}")


def _check_packing(cu_seqlens: Tensor, B: int) -> int:
    _check_tensors(cu_seqlens=cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        _reject_type("cu_seqlens", "int32 or int64", f"{cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        _reject("cu_seqlens", "[N + 1] offsets of N >= 1 segments", f"{list(cu_seqlens.shape)}")
    if B != 1:
        _reject("cu_seqlens", "None unless B = 1: packed segments lie end to end in one row", f"B={B}")
    return len(cu_seqlens) - 1


def _check_state(name: str, state: Tensor, q: Tensor, dims: Dims) -> None:
    _check_tensors(**{name: state})
    _check_shape(name, state, "[N, HV, K, V]", (dims.N, dims.HV, dims.K, dims.V))
    if state.dtype != compute_dtype(q.dtype):
        _reject_type(name, f"{compute_dtype(q.dtype)} for {q.dtype} inputs", f"{state.dtype}")
    _check_devices(q, **{name: state})


def _check_front_end(front_end: FrontEnd, q: Tensor, dims: Dims) -> None:
    from .front_end import FrontEnd  # that module checks its own arguments here, so it cannot be imported above

    if not isinstance(front_end, FrontEnd):
        _reject_type("front_end", "a FrontEnd or None", type(front_end).__name__)
    if front_end.gate is None:
        return
    A_log, dt_bias = front_end.gate.A_log, front_end.gate.dt_bias
    if A_log.numel() != dims.HV:
        _reject("A_log", f"[HV] or [1, 1, HV, 1] with HV={dims.HV}", f"{list(A_log.shape)}")
    if list(dt_bias.shape) not in ([dims.HV, dims.K], [dims.HV * dims.K]):
        _reject("dt_bias", f"[HV, K] or flat with HV={dims.HV}, K={dims.K}", f"{list(dt_bias.shape)}")
    for name, parameter in (("A_log", A_log), ("dt_bias", dt_bias)):
        if parameter.dtype not in (torch.float32, compute_dtype(q.dtype)):
            _reject_type(name, f"float32 for {q.dtype} inputs", f"{parameter.dtype}")
    _check_devices(q, A_log=A_log, dt_bias=dt_bias)


def _check_rank(name: str, x: Tensor, layout: str) -> None:
    if x.dim() != layout.count(",") + 1:
        _reject(name, layout, f"{x.dim()} dimensions: {list(x.shape)}")


def _check_shape(name: str, x: Tensor, layout: str, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        _reject(name, f"{layout}, that is {list(shape)}", f"{list(x.shape)}")


def _reject(name: str, want: str, got: str) -> NoReturn:
    raise ValueError(f"{name} must be {want}; got {got}")


def _reject_type(name: str, want: str, got: str) -> NoReturn:
    raise TypeError(f"{name} must be {want}; got {got}")
