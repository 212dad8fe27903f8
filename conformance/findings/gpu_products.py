"""Triton's interpreter with the products of a GPU, so that errors of tensor cores show on a CPU.

    with gpu_products():                        fp32 operands are shortened as the kernel asks: tf32, tf32x3, bf16x3
    with gpu_products("tf32", "my_kernel"):     none in that precision, nor in that kernel: is the error still there?

The interpreter takes operands of fp32 whole, whatever precision `tl.dot` is given, and computes with the bits of
bf16 as if they were integers. A tensor core reads 10 bits of the mantissa of a tf32 operand and cuts the rest off;
the "x3" precisions split an operand in two short ones and leave out the product of the rests. There Triton rounds the
first part (`cvt.rna.tf32.f32` in the PTX) and leaves it to the tensor core to cut the rest. Sums are of fp32 in both,
here in NumPy's order. The patches are to the insides of triton 3.9.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps, TensorHandle, interpreter_builder

Array = np.ndarray[Any, Any]
PRECISIONS = ("tf32", "tf32x3", "bf16x3", "ieee")
TF32_BITS = np.uint32(0xFFFFE000)  # sign, exponent and 10 bits of the mantissa
TF32_HALF = np.uint32(0x1000)  # of the last bit that tf32 keeps
COMPARISONS = (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)


@contextmanager
def gpu_products(*whole: str) -> Iterator[None]:
    """Inside, interpreted kernels multiply as on a GPU, but for the precisions and kernels named in `whole`.

    Give it around the first call too: what it patches is read when a kernel runs.
    """
    running = [""]
    enter = GridExecutor.__call__

    def named(self: Any, *arguments: Any, **options: Any) -> Any:
        running[0] = self.fn.__name__
        return enter(self, *arguments, **options)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        name = str(precision).rpartition(".")[2].lower()
        both_fp32 = a.dtype.scalar == b.dtype.scalar == tl.float32
        name = name if both_fp32 and name not in whole and running[0] not in whole else "ieee"
        return TensorHandle(product(numbers(a), numbers(b), name) + d.data, d.dtype.scalar)

    allowed = replace(interpreter_builder.options, allowed_dot_input_precisions=PRECISIONS)
    with ExitStack() as patches:
        patches.enter_context(np.errstate(all="ignore"))  # a GPU says nothing of inf and NaN
        patches.enter_context(patch.object(GridExecutor, "__call__", named))
        patches.enter_context(patch.object(InterpreterBuilder, "create_dot", dot))
        patches.enter_context(patch.object(interpreter_builder, "options", allowed))
        for owner, method, instead in BF16:
            patches.enter_context(patch.object(owner, method, instead))
        yield


def product(x: Array, y: Array, precision: str) -> Array:
    """x @ y of fp32, with operands as short as a tensor core takes them."""
    x, y = x.astype(np.float32), y.astype(np.float32)
    if precision == "ieee":
        return x @ y
    if precision == "tf32":
        return cut_to_tf32(x) @ cut_to_tf32(y)
    first, rest = (rounded_to_bf16,) * 2 if precision == "bf16x3" else (rounded_to_tf32, cut_to_tf32)
    x0, y0 = first(x), first(y)
    return x0 @ y0 + (x0 @ rest(y - y0) + rest(x - x0) @ y0)


def cut_to_tf32(x: Array) -> Array:
    """fp32 with the last 13 bits of the mantissa cut off."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) & TF32_BITS).view(np.float32)


def rounded_to_tf32(x: Array) -> Array:
    """fp32 rounded to the nearest number of tf32, halves away from 0."""
    return cut_to_tf32((np.ascontiguousarray(x, np.float32).view(np.uint32) + TF32_HALF).view(np.float32))


def rounded_to_bf16(x: Array) -> Array:
    """fp32 rounded to the nearest number of bf16."""
    return numbers(TensorHandle(bits(x), tl.bfloat16))


def bits(x: Array) -> Array:
    """Numbers of fp32 as the bits of the nearest ones of bf16, which is how the interpreter keeps them."""
    nearest = torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16()
    return nearest.view(torch.int16).numpy().view(np.uint16).reshape(np.shape(x))


def numbers(handle: Any) -> Array:
    """What a tensor of the interpreter holds; bf16 as fp32."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle.data
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def in_fp32(method: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of the interpreter that takes bf16 as fp32, and rounds a result that is no truth value."""

    def instead(self: Any, x: Any, *rest: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return method(self, x, *rest)
        *others, operation = rest
        found = operation(numbers(x), *map(numbers, others))
        if operation in COMPARISONS:
            return TensorHandle(found, tl.int1)
        return TensorHandle(bits(found), tl.bfloat16)

    return instead


def cast(self: Any, x: Any, to: Any) -> Any:
    """A conversion; the interpreter's own to bf16 cuts bits off."""
    if to.scalar == tl.bfloat16:
        return TensorHandle(bits(numbers(x)), tl.bfloat16)
    if x.dtype.scalar == tl.bfloat16:
        x = TensorHandle(numbers(x), tl.float32)
    return convert(self, x, to)


def summed(self: Any, input: Any) -> Any:
    """A sum along an axis, of bf16 in fp32 and rounded once."""
    if input.dtype.scalar != tl.bfloat16:
        return add_up(self, input)
    total = np.sum(numbers(input.handle), axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(bits(np.asarray(total)), input.dtype)


convert, add_up = InterpreterBuilder.cast_impl, ReduceOps.sum
BF16 = (
    (InterpreterBuilder, "binary_op", in_fp32(InterpreterBuilder.binary_op)),
    (InterpreterBuilder, "unary_op", in_fp32(InterpreterBuilder.unary_op)),
    (InterpreterBuilder, "cast_impl", cast),
    (ReduceOps, "sum", summed),
)
