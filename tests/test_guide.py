"""What the documents compute, claim and promise is what the code does."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import guide_tables as tables
import precision
import time_model

ROOT = Path(__file__).parent.parent


def test_the_guides_tables_are_what_the_code_says():
    assert tables.page() == tables.PAGE.read_text(), "run python docs/guide_tables.py"
    assert {name for _, name, _ in tables.MARKER.findall(tables.PAGE.read_text())} == set(tables.TABLES)


@pytest.mark.parametrize(("shape", "gate", "model", "measured"), time_model.forward_rows())
def test_the_model_of_time_is_within_a_third_of_every_recorded_forward(shape, gate, model, measured):
    assert 0.7 < model / measured < 1.3


def test_the_model_of_time_is_within_a_third_of_decoding_and_would_notice_a_lost_factor():
    rows = time_model.decode_rows()
    assert len(rows) == 4
    assert all(0.7 < model / measured < 1.3 for _, model, measured in rows)
    call = time_model.parse("B=1 T=8192 H=32")
    assert time_model.forward_seconds(call, "bounded", 2e12) > 1.3 * time_model.forward_seconds(call, "bounded", 4e12)
    with pytest.raises(ValueError, match="shape must be like"):
        time_model.parse("8192 tokens")


def test_the_model_counts_the_workspace_that_the_kernels_share():
    """Bytes that the two parallel kernels write are those of the workspace, a token and head."""
    import torch

    from kimi_linear.triton_kernels.chunk_workspace import workspace_layout

    chunks = 8
    layout = workspace_layout(1, chunks, 2, 128, 128, torch.bfloat16, torch.float16)
    written = sum(kernel.writes for kernel in time_model.kernels("bounded"))
    assert written == pytest.approx(layout.size / (chunks * 64 * 2), rel=0.01)


def test_costs_of_precision_can_be_measured_again():
    recorded = json.loads(precision.RECORD.read_text())
    assert recorded.keys() == precision.CHOICES.keys()
    for choice in ("the usual: bf16 operands, the rest fp32", "inverse by doubling products, fp32"):
        again = precision.cost(precision.CHOICES[choice](), "keys of cosine 0.97")
        assert again == pytest.approx(recorded[choice]["keys of cosine 0.97"], rel=0.25)


def test_pictures_are_drawn_from_the_code_as_it_is(tmp_path):
    subprocess.run([sys.executable, ROOT / "docs" / "figures" / "draw.py", tmp_path], check=True, timeout=120)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    kept = {path.name: path.read_text() for path in (ROOT / "docs" / "figures").glob("*.svg")}
    assert drawn.keys() == kept.keys()
    for name, picture in drawn.items():
        assert picture == kept[name], f"run python docs/figures/draw.py: {name} changed"
        assert len(picture) < 60_000


def test_every_adapter_line_of_the_guide_can_be_declared():
    from kimi_linear.conformance.adapter import checked_capabilities
    from kimi_linear.conformance.capabilities import Capabilities, Contract, FrontForm, Pool

    names = {kind.__name__: kind for kind in (Capabilities, Contract, FrontForm, Pool)}
    lines = re.findall(r"\| `(Capabilities\(.*?\))` \|", tables.PAGE.read_text())
    assert len(lines) >= 8
    for line in lines:
        caps = eval(line, names)
        functions = {"capabilities": lambda self, caps=caps: caps, "run": lambda self, call, want: {}}
        adapter = type("Adapter", (), functions)()
        assert checked_capabilities(adapter) is caps


MAY_IMPORT = {
    "reference": set(),
    "reference/naive": {"reference"},
    "reference/chunked": {"reference"},
    "reference/model": {"reference", "reference/naive", "reference/chunked"},
    "triton_kernels": {"reference"},
    "conformance": {"reference", "reference/naive", "reference/chunked"},
    "conformance/adapters": {
        *("conformance", "triton_kernels"),
        *(
            "reference",
            "reference/naive",
            "reference/chunked",
            "reference/model",
        ),  # whose short convolution is judged
    },
    "conformance/findings": {"conformance", "conformance/adapters", "reference", "reference/naive", "triton_kernels"},
}
EVERYTHING = {"cli"}


def folder_of(path):
    """The longest folder of MAY_IMPORT or EVERYTHING that a path lies in."""
    inside = path.relative_to(ROOT).as_posix()
    return max((name for name in {*MAY_IMPORT, *EVERYTHING} if f"{inside}/".startswith(f"{name}/")), key=len)


def imports_of(path):
    """Folders of this repository that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1]
            target = base.joinpath(*(node.module or "").split("."))
            names = [target] if node.module else [base / alias.name for alias in node.names]
            for name in names:
                yield folder_of(name if name.is_dir() else name.parent)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kimi_linear."):
            yield folder_of(ROOT.joinpath(*node.module.split(".")[1:]))


def test_imports_go_the_way_that_the_architecture_page_says():
    seen = set()
    for top in ("reference", "triton_kernels", "conformance"):
        for path in (ROOT / top).rglob("*.py"):
            here = folder_of(path)
            for target in imports_of(path):
                seen.add((here, target))
                allowed = MAY_IMPORT[here] | {here}
                assert target in allowed, f"{path.relative_to(ROOT)} imports {target}, not one of {sorted(allowed)}"
    assert ("triton_kernels", "reference") in seen
    assert ("conformance", "reference") in seen


@pytest.mark.parametrize("page", ["architecture.md", "../CONTRIBUTING.md"])
def test_the_tables_of_folders_name_every_folder(page):
    text = (ROOT / "docs" / page).read_text()
    for folder in ("reference/", "reference/naive/", "triton_kernels/", "conformance/", "cli/"):
        assert f"`{folder}`" in text
