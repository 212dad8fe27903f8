"""Drawn inputs: the Triton tiers in fp32 are as near the fp64 recurrence as rounding allows."""

import pytest
import torch
from hypothesis import given, settings
from triton_inputs import DEVICE

from cases import cases, draw_inputs
from judge import assert_within_envelope, bounds_of
from kimi_linear.reference.chunked import chunk_kda as reference_chunk_kda
from kimi_linear.reference.naive import recurrent_kda
from kimi_linear.triton_kernels import chunk_kda, fused_recurrent_kda

MAX_T = 70  # two chunks; the interpreter takes a second a case


@settings(max_examples=6)
@given(case=cases(max_T=MAX_T, chunk_size=64, H=1))
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, where a device gives inf
def test_triton_tiers_agree_with_the_recurrence_on_drawn_inputs(case):
    x = draw_inputs(case)
    exact = x.call(recurrent_kda)
    bounds = bounds_of(exact, lambda: x.call(reference_chunk_kda), lambda: x.call(recurrent_kda))
    on_device = type(x)(
        **{name: None if y is None else y.to(DEVICE) for name, y in vars(x.to(torch.float32)).items()}
    )
    for op in (chunk_kda, fused_recurrent_kda):
        assert_within_envelope([y.cpu() for y in on_device.call(op)], exact, bounds)
