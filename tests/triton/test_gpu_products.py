"""The products of a GPU in Triton's interpreter, by which the findings show what tensor cores do to a kernel."""

import pytest
import torch
import triton
import triton.language as tl
from scripts import FINDINGS, load_script

N = 16

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has its own products")


@pytest.fixture(scope="module")
def gpu_products():
    return load_script(FINDINGS / "gpu_products.py").gpu_products


@triton.jit
def multiply(x, y, o, N: tl.constexpr, precision: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(o + at, tl.dot(tl.load(x + at), tl.load(y + at), input_precision=precision))


@triton.jit
def square_and_sum(x, o, total, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.where(a > 1, a * a - a, (1.3 * a.to(tl.float32)).to(a.dtype))
    tl.store(o + i, -b)
    tl.store(total, tl.sum(b, 0))


def matrices():
    return torch.randn(2, N, N, generator=torch.Generator().manual_seed(3))


def multiplied(x, y, precision):
    o = torch.empty(N, N)
    multiply[(1,)](x, y, o, N, precision)
    return o


def cut(x):
    return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)


def test_tf32_operands_lose_their_last_bits(gpu_products):
    x, y = matrices()
    with gpu_products():
        got = multiplied(x, y, "tf32")
    torch.testing.assert_close(got, cut(x) @ cut(y), rtol=0, atol=1e-5)
    assert (got - x @ y).abs().max() > 1e-3


@pytest.mark.parametrize("whole", ["tf32", "multiply"])
def test_operands_stay_whole_where_that_is_asked(gpu_products, whole):
    x, y = matrices()
    with gpu_products(whole):
        got = multiplied(x, y, "tf32")
    torch.testing.assert_close(got, x @ y, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("precision", "bits"), [("tf32x3", 22), ("bf16x3", 15)])
def test_split_operands_are_nearly_as_good_as_whole_ones(gpu_products, precision, bits):
    x, y = matrices()
    with gpu_products():
        error = (multiplied(x, y, precision).double() - x.double() @ y.double()).abs()
    size = x.double().abs() @ y.double().abs()
    assert 2.0 ** -(bits + 4) < (error / size).max() < 2.0**-bits


def test_bf16_is_computed_in_fp32_and_rounded(gpu_products):
    x = torch.linspace(-3, 3, N).bfloat16()
    o, total = torch.empty(N).bfloat16(), torch.empty(1).bfloat16()
    with gpu_products():
        square_and_sum[(1,)](x, o, total, N)
    want = torch.where(x > 1, x * x - x, (1.3 * x.float()).bfloat16())
    assert torch.equal(o, -want)
    assert torch.equal(total, want.float().sum().bfloat16()[None])


def test_outside_the_interpreter_is_as_it_was(gpu_products):
    x, y = matrices()
    before = multiplied(x, y, "tf32")
    with gpu_products():
        pass
    assert torch.equal(multiplied(x, y, "tf32"), before)
    torch.testing.assert_close(before, x @ y, rtol=0, atol=1e-5)
