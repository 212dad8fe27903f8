"""transformers' Kimi Linear as an oracle: the same weights, loaded from the released checkpoint's layout."""

import contextlib
import json

import pytest
import torch
from safetensors.torch import save_file

from model_cases import random_tensors

transformers = pytest.importorskip(
    "transformers", minversion="5.24", reason="Kimi Linear is in its tree from 5.24 on"
)


def oracle(config, folder, dtype=torch.float64, seed=0):
    """transformers' model with `random_tensors(config, seed)`."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    save_file(random_tensors(config, seed), folder / "model.safetensors", metadata={"format": "pt"})
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}  # fp64 has no other kernels
    model = transformers.KimiLinearForCausalLM.from_pretrained(folder, dtype=dtype, **plain)
    return model.to(dtype).eval()


@contextlib.contextmanager
def fp64_throughout():
    """Let transformers' code, which casts to fp32 by name, cast to fp64: an oracle without rounding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
