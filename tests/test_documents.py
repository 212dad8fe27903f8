"""The README and the documents say what is so."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = [*(folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in ("build", ".venv"))]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in folder.rglob("*.md"))])
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]*))?\)")


def test_the_readme_example_runs_and_its_tiers_agree():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    error = (names["o"] - names["o_slow"]).abs().max()
    assert 0 < error < 1e-3 * names["o"].abs().max()
    assert names["state"].shape == (1, 4, 64, 64)
    assert len(code.strip().splitlines()) <= 12


def prose(document):
    """The text without code: what stands in a fence is no link."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)


def anchors(document):
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *#*$", prose(document), flags=re.M)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    """Files and anchors have to be there; of other sites only the address's form is checked."""
    for path, anchor in LINK.findall(prose(document)):
        if ":" in path:
            assert re.fullmatch(r"https://[\w.-]+\.\w+(/[^\s<>\"]*)?", path), f"{document.name}: odd address {path}"
            continue
        target = document.parent / path if path else document
        assert target.exists(), f"{document.name} links to {path}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{document.name} links to {path}#{anchor}"


def test_a_dead_anchor_would_be_seen():
    assert "rules" in anchors(ROOT / "CONTRIBUTING.md")
    assert "no-such-heading" not in anchors(ROOT / "CONTRIBUTING.md")
    assert len(DOCUMENTS) > 5


@pytest.mark.parametrize("target", ["verify", "test", "bench", "format", "docs", "clean"])
def test_commands_named_in_the_documents_exist(target):
    text = "".join(path.read_text() for path in DOCUMENTS)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"make {target}\b", text)
    assert re.search(rf"^{target}:", makefile, flags=re.M)


def test_the_kernels_names_in_the_notation_are_those_of_their_workspace():
    from kimi_linear.triton_kernels.chunk_workspace import Workspace

    section = (ROOT / "docs" / "notation.md").read_text().split("## The kernels")[1].split("## The judge")[0]
    named = set(re.findall(r"`(\w+)` \| \[chunks", section))
    assert named <= set(Workspace._fields), named - set(Workspace._fields)
    assert len(named) > 5


@pytest.mark.parametrize(
    ("said", "where"),
    [
        ("has no backward, and an input requires a gradient", "triton_kernels/support.py"),
        ("a log decay, <= 0 and not NaN", "reference/contract.py"),
        ("--stream-layers", "cli/texts.py"),
    ],
)
def test_what_troubleshooting_quotes_is_what_the_code_says(said, where):
    assert said in (ROOT / "docs" / "troubleshooting.md").read_text()
    assert said in (ROOT / where).read_text()


def test_every_stage_in_the_notation_is_a_field_of_the_record():
    from kimi_linear.reference.chunked import ChunkStages, Decays

    fields = {*ChunkStages._fields, *(f"decays.{name}" for name in Decays._fields)}
    section = (ROOT / "docs" / "notation.md").read_text().split("## The chunk form")[1].split("## What others")[0]
    named = set(re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| \d .*$", section, flags=re.M))))
    assert named <= fields, named - fields
    assert len(named) > 10
