"""The documentation site builds without a warning, and shows what the repository holds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load_script

ROOT = Path(__file__).parent.parent


def load(name):
    return load_script(ROOT / "docs" / f"{name}.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it."""
    where = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(where)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return where


def test_the_site_has_the_front_page_the_sources_and_the_api(site):
    assert "Kimi Delta Attention" in (site / "index.html").read_text()
    assert 'href="source/reference/contract.py.html"' in (site / "index.html").read_text()
    assert "ValueError for a shape" in (site / "source" / "reference" / "contract.py.html").read_text()
    api = (site / "api" / "chunked.html").read_text()
    assert 'id="kimi_linear.reference.chunked.forward.chunk_kda"' in api


def test_the_site_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loads = re.findall(r'<(?:script|img|link|iframe)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loads, f"{page.name} loads {loads}"


def test_a_formula_becomes_mathml():
    hooks = load("build_site")
    page = hooks.on_page_content(r'<p>with <span class="arithmatex">\(a &lt; T^{-1}\)</span></p>')
    assert "<math" in page
    assert "<mo>&#x0003C;</mo>" in page
    assert "arithmatex" not in page
    block = hooks.mathml(r"\begin{aligned} S &= A \\ o &= B \end{aligned}", block=True)
    assert block.count("<mtr>") == 2
    assert "&<" not in block


def test_links_lead_to_pages_but_stay_as_they_are_in_code():
    rewritten = load("build_site").rewritten
    here = ROOT / "docs" / "notation.md"
    text = "[a](../CONTRIBUTING.md#rules) [b](../reference/gates.py)\n\n```\n[c](../README.md)\n```\n"
    wanted = "[a](contributing.md#rules) [b](source/reference/gates.py.md)\n\n```\n[c](../README.md)\n```\n"
    assert rewritten(text, here, "notation.md") == wanted


def test_columns_of_a_docstring_become_code_and_prose_does_not():
    with_columns = load("docstring_columns").with_columns
    prose = "One sentence of two\nlines.\n"
    assert with_columns(prose) == prose
    assert with_columns("q, k   queries\nv      values,\n       and more\n").startswith("    q, k   queries\n    v")


def test_what_a_tutorial_prints_and_draws_is_on_its_page():
    shown, pages = load("build_site").shown, {}
    assert shown({"output_type": "stream", "text": "four\n"}, "p.png", pages) == "\n```text\nfour\n```\n"
    assert shown({"data": {"text/markdown": "*see*", "text/plain": "<Markdown>"}}, "p.png", pages) == "\n*see*\n"
    assert "](p.png)" in shown({"data": {"image/png": "aGk=", "text/plain": "<Figure>"}}, "p.png", pages)
    assert pages == {"tutorials/p.png": b"hi"}
    sentence = {"data": {"text/markdown": "*So.*", "text/plain": "<Markdown>"}}
    assert shown(sentence, "p.png", pages) == "\n*So.*\n"


def test_answers_of_exercises_are_folded(site):
    page = (site / "tutorials" / "01_from_softmax_to_a_state.html").read_text()
    assert "<details" in page
    assert page.index("<details") > page.index("Exercise")
