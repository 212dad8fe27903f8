"""What the site needs beside Markdown: pages from outside docs/, notebooks, formulas, links that work twice.

A document links to files of the repository by their paths, so that it reads well where it lies. On the site such a
link leads to a page made from that file:

    docs/X.md                     X.md
    README.md, CONTRIBUTING.md    index.md, contributing.md
    tutorials/NN_X.py             tutorials/NN_X.md, with outputs where `make notebooks` ran
    other .md files, pictures     their path
    other files                   source/PATH.md, the file in a code block

Formulas ($..$, $$..$$) become MathML while the site is built: no script, nothing to download.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import os
import re
import textwrap
from pathlib import Path, PurePosixPath
from typing import Any

import jupytext
import latex2mathml.converter
import nbformat
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PACKAGES = ("reference", "triton_kernels", "conformance", "cli", "integrations")
PICTURES = (".png", ".svg")
LINK = re.compile(r"(\]\()(?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.M | re.S)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


def on_startup(**_: Any) -> None:
    """Show the packages under the names that users import, for the API pages."""
    tree = ROOT / "build" / "api" / "kimi_linear"
    tree.mkdir(parents=True, exist_ok=True)
    for name in PACKAGES:
        if (ROOT / name).is_dir():
            with contextlib.suppress(FileExistsError):  # from an earlier build, or from one that runs beside this
                (tree / name).symlink_to(ROOT / name)


def on_config(config: Any) -> Any:
    """List the tutorials after the page that introduces them, and under Port the pages that the menu leaves out."""
    sections = {title: pages for entry in config.nav for title, pages in entry.items()}
    sections["Learn"] += [uri_of(path) for path in tutorials()]
    named = str(config.nav)
    sections["Port"] += [path.name for path in sorted((ROOT / "docs").glob("*.md")) if f"'{path.name}'" not in named]
    return config


def tutorials() -> list[Path]:
    """Their sources, in reading order."""
    return sorted((ROOT / "tutorials").glob("[0-9][0-9]_*.py"))


def on_files(files: Files, config: Any) -> Files:
    """Add the pages made from files outside docs/: those that the nav names, and all that documents link to."""
    waiting = [path for path in (ROOT / "docs").rglob("*.md")] + [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    waiting += [
        ROOT / "CHANGELOG.md",
        ROOT / "tutorials" / "README.md",
        *sorted((ROOT / "tutorials").glob("[0-9]*.py")),
    ]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if not path.is_relative_to(ROOT / "docs"):
            for uri, content in page_of(path).items():
                files.append(File.generated(config, uri, content=content))
        if path.suffix == ".md":
            waiting += [target for target in linked(path) if target.is_file()]
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the site's pages."""
    here = path_of(page.file.src_uri)
    return markdown if here is None or here.suffix != ".md" else rewritten(markdown, here, page.file.src_uri)


def on_page_content(html: str, **_: Any) -> str:
    """Formulas to MathML."""
    return FORMULA.sub(lambda match: mathml(match[2], block=match[1] == "div"), html)


@functools.cache
def mathml(formula: str, block: bool) -> str:
    """A formula in LaTeX, as it stands in the page's HTML, in MathML."""
    display = "block" if block else "inline"
    known = html.unescape(formula).replace("{aligned}", "{align*}")  # GitHub's name for it, and the converter's
    return latex2mathml.converter.convert(known, display=display)


def uri_of(path: Path) -> str:
    """The page on the site that a file of the repository becomes."""
    inside = PurePosixPath(path.relative_to(ROOT).as_posix())
    top = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
    if str(inside) in top:
        return top[str(inside)]
    if inside.parts[0] == "docs" and inside.suffix in (".md", *PICTURES):
        return str(inside.relative_to("docs"))
    if re.fullmatch(r"tutorials/\d\d_\w+\.py", str(inside)):
        return str(inside.with_suffix(".md"))
    if inside.suffix in (".md", *PICTURES):
        return str(inside)
    return f"source/{inside}.md"


def path_of(uri: str) -> Path | None:
    """The Markdown file of the repository that became a page, if one did."""
    top = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
    found = [ROOT / top.get(uri, uri), ROOT / "docs" / uri]
    return next((path for path in found if path.is_file() and uri_of(path) == uri), None)


def page_of(path: Path) -> dict[str, str | bytes]:
    """The pages and pictures made from a file, by their place on the site."""
    uri = uri_of(path)
    if path.suffix in PICTURES:
        return {uri: path.read_bytes()}
    if path.suffix == ".md":
        return {uri: path.read_text()}
    if uri.startswith("tutorials/"):
        return notebook(path, uri)
    language = path.suffix.removeprefix(".").replace("py", "python")
    return {uri: f"# {path.relative_to(ROOT)}\n\n````{language}\n{path.read_text()}\n````\n"}


def notebook(path: Path, uri: str) -> dict[str, str | bytes]:
    """A tutorial as a page, with its pictures; outputs only where it has been run."""
    executed = ROOT / "build" / "notebooks" / f"{path.stem}.ipynb"
    content = nbformat.read(executed, as_version=4) if executed.is_file() else jupytext.read(path)
    pages: dict[str, str | bytes] = {}
    parts: list[str] = []
    for number, cell in enumerate(content.cells):
        if cell.cell_type == "markdown":
            parts.append(rewritten(cell.source, path, uri))
            continue
        text = f"```python\n{cell.source}\n```\n"
        for output in cell.get("outputs", []):
            text += shown(output, f"{path.stem}_{number}_{len(pages)}.png", pages)
        folded = "answer" in cell.metadata.get("tags", [])
        parts.append(f'??? example "Answer"\n\n{textwrap.indent(text, "    ")}' if folded else text)
    return {uri: "\n\n".join(parts), **pages}


def shown(output: Any, picture: str, pages: dict[str, str | bytes]) -> str:
    """What a cell printed or drew; a picture goes to `pages`."""
    data = output.get("data", {})
    if "image/png" in data:
        pages[f"tutorials/{picture}"] = base64.b64decode(data["image/png"])
        return f"\n![what the cell draws]({picture})\n"
    if "text/markdown" in data:
        return f"\n{data['text/markdown']}\n"
    text = output.get("text") or data.get("text/plain", "")
    return f"\n```text\n{text.rstrip()}\n```\n" if text.strip() else ""


def linked(path: Path) -> list[Path]:
    """Files that a document links to."""
    text = FENCE.sub("", path.read_text())
    return [Path(os.path.normpath(path.parent / match[2])) for match in LINK.finditer(text)]


def rewritten(markdown: str, here: Path, uri: str) -> str:
    """Links of a document at `here`, as they lead from its page."""

    def lead(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(here.parent / match[2]))
        if target.is_dir():
            target /= "README.md"
        if not target.is_file():
            return match[0]
        to = os.path.relpath(uri_of(target), PurePosixPath(uri).parent)
        return f"{match[1]}{to}{match[3] or ''}{match[4]}"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(lead, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(lead, markdown[end:])])
