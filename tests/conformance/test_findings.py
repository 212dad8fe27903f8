"""Every finding has its row, and says what it needs where that is not there."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "conformance" / "findings"
HELPERS = {"fla_chunk_interpreted.py", "fla_kernels.py", "gpu_products.py", "own_kernels.py"}
SCRIPTS = sorted(path.name for path in FINDINGS.glob("*.py") if path.name not in HELPERS)
NO_FLA = pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="fla is installed")


def test_every_script_has_a_row_and_is_named_where_its_failure_is():
    rows = re.findall(r"^\| \[(\w+\.py)\]", (FINDINGS / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == SCRIPTS
    document = (ROOT / "docs" / "conformance-matrix.md").read_text()
    assert [name for name in SCRIPTS if f"findings/{name}" not in document] == []


def refused(name, monkeypatch):
    """What a script says when it ends before it began."""
    monkeypatch.syspath_prepend(str(FINDINGS))
    monkeypatch.delitem(sys.modules, "fla_kernels", raising=False)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FINDINGS / name))
    return str(end.value)


@NO_FLA
@pytest.mark.parametrize("name", [name for name in SCRIPTS if name.startswith("fla_")])
def test_a_script_without_fla_says_what_to_install(name, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert re.search("needs fla 0.6.0, and `No module named 'fla'`: pip install", refused(name, monkeypatch))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_script_without_a_gpu_says_how_to_run_it(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "set TRITON_INTERPRET=1" in refused("fla_chunk_reflections.py", monkeypatch)
