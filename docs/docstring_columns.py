"""Columns in docstrings stay columns on the API pages.

A paragraph whose every line is a name, two or more spaces and its meaning becomes a code block; left alone, Markdown
would run its lines together.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

PARAGRAPH = re.compile(r"(?:^(?!    |\|).+\n?)+", re.M)
ROW = re.compile(r"\S+(,? \S+)* {2,}\S")


def with_columns(text: str) -> str:
    """A docstring with its tables of names indented, which is how Markdown writes code."""
    return PARAGRAPH.sub(lambda match: _indented(match[0]), text)


def _indented(paragraph: str) -> str:
    lines = paragraph.splitlines()
    starts = [line for line in lines if not line.startswith(" ")]
    if len(starts) < 2 or not all(ROW.match(line) for line in starts):
        return paragraph
    return "".join(f"    {line}\n" for line in lines)


class Columns(Extension):
    """Applied to every docstring that the API pages show."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_columns(obj.docstring.value)
