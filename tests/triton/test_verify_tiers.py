"""`kimi-linear verify` judges the Triton tiers: right ones hold, a wrong one does not."""

import contextlib
import dataclasses

import pytest
import torch
from triton_inputs import DEVICE

from kimi_linear.cli import devices, verify, verify_beside
from kimi_linear.triton_kernels import fused_recurrent_kda


@pytest.fixture
def small(monkeypatch):
    case = next(case for case in verify.verify_cases() if case.name == "integers, exact")
    options = case.options | {"initial_state": case.options["initial_state"][:1]}
    cases = [dataclasses.replace(case, inputs=tuple(x[:1, :40] for x in case.inputs), options=options)]
    monkeypatch.setattr(verify, "verify_cases", lambda: cases)
    monkeypatch.setattr(verify, "tiers", lambda: [])
    monkeypatch.setattr(verify, "work_beside", lambda device: verify_beside.work_beside("cpu"))
    monkeypatch.setattr(verify, "logit_rows", lambda progress: iter(()))
    monkeypatch.setattr(verify, "suite_in_background", lambda: contextlib.nullcontext(lambda progress: iter(())))
    monkeypatch.setattr(devices, "DTYPES", {"fp32": torch.float32, "fp16": torch.float16})  # the interpreter's
    original = devices.device_tiers
    monkeypatch.setattr(verify, "device_tiers", lambda device: original("cuda") if device == "cuda" else [])
    move = devices.on_device
    monkeypatch.setattr(devices, "on_device", lambda op, device: move(op, DEVICE))


def test_the_triton_tiers_hold(small):
    rows = list(verify.verify_rows(lambda _: None, "cuda"))
    names = ["Triton chunk, fp32", "Triton chunk, fp16", "Triton recurrent, fp32", "Triton recurrent, fp16"]
    assert [row.tier for row in rows] == names
    assert all(row.ok for row in rows)


def test_a_triton_tier_with_another_scale_fails(small, monkeypatch):
    def wrong(*inputs, scale, **options):
        return fused_recurrent_kda(*inputs, scale=1.01 * scale, **options)

    monkeypatch.setattr("kimi_linear.triton_kernels.fused_recurrent_kda", wrong)
    rows = list(verify.verify_rows(lambda _: None, "cuda"))
    assert [row.ok for row in rows] == [True, True, False, False]
