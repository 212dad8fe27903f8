"""Every shape in a signature holds, in every kind of call, under a checker that is shown to be on."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CALLS = f"""
    import sys
    sys.path.insert(0, {str(TESTS)!r})
    from jaxtyping import TypeCheckError, install_import_hook
    install_import_hook("kimi_linear.reference", "beartype.beartype")

    import torch
    from model_cases import CONFIGS, K3_CONFIGS, random_tokens, small_model
    from kimi_linear.reference.model import short_convolution
    from kimi_linear.reference.model.generate import generate
    from kimi_linear.reference.model.sampling import Sampling

    ids = random_tokens(2, 7)
    mask = torch.tensor([[False] * 3 + [True] * 4, [True] * 7])
    for name, config in {{**CONFIGS, **K3_CONFIGS}}.items():
        for dtype in (torch.float64, torch.bfloat16):
            model = small_model(config, dtype).requires_grad_(False)
            cache = model(ids, attention_mask=mask).cache
            model(ids[:, :1], cache=cache)
            model(ids.flatten()[None], cu_seqlens=torch.tensor([0, 4, 14]), cache=cache.select([1, 0]))
            generate(model, [[1, 2, 3], [4]], max_new_tokens=2, sampling=Sampling(1.0, 0.9))
    print("held")
    try:
        short_convolution(torch.zeros(2, 5, 3), torch.zeros(4, 1, 4), torch.zeros(2, 3, 3))
    except TypeCheckError:
        print("refused")
"""


@pytest.mark.slow
def test_every_annotated_shape_of_the_model_holds():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    code = textwrap.dedent(CALLS)
    done = subprocess.run([sys.executable, "-I", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["held", "refused"]
