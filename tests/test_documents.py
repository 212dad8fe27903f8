"""The README and the documents say what is so."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tutorials/*.md")]


def test_the_readme_example_runs_and_its_tiers_agree():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    error = (names["o"] - names["o_slow"]).abs().max()
    assert 0 < error < 1e-3 * names["o"].abs().max()
    assert names["state"].shape == (1, 4, 64, 64)
    assert len(code.strip().splitlines()) <= 12


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_files_lead_somewhere(document):
    links = re.findall(r"\]\((?!https?://)([^)#]+)", document.read_text())
    for link in links:
        assert (document.parent / link).exists(), f"{document.name} links to {link}"


@pytest.mark.parametrize("target", ["verify", "test", "bench", "format", "clean"])
def test_commands_named_in_the_documents_exist(target):
    text = "".join(path.read_text() for path in DOCUMENTS)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(rf"make {target}\b", text)
    assert re.search(rf"^{target}:", makefile, flags=re.M)


def test_every_stage_in_the_notation_is_a_field_of_the_record():
    from kimi_linear.reference.chunked import ChunkStages, Decays

    fields = {*ChunkStages._fields, *(f"decays.{name}" for name in Decays._fields)}
    section = (ROOT / "docs" / "notation.md").read_text().split("## The chunk form")[1].split("## What others")[0]
    named = set(re.findall(r"`([\w.]+)`", "".join(re.findall(r"^\| \d .*$", section, flags=re.M))))
    assert named <= fields, named - fields
    assert len(named) > 10
