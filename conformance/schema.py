"""JSON Schemas (draft 2020-12) of every JSON file that the suite writes for others or reads from them.

They travel with the package, in schemas/. Each stands alone, so that a validator of any language needs one file. A
waiver file is text, and has none: `waivers.py` says how it reads.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "schemas"
SCHEMAS = {
    "report": "what `run --json` and `judge --json` write",
    "capabilities": "what `export --capabilities` reads",
    "calls": "manifest.json of a folder of `export`, which `judge` reads",
    "score": "what `score --json` writes",
    "vectors": "manifest.json of the golden vectors",
}


def schema_of(name: str) -> dict[str, Any]:
    """The schema of one kind of file, by a name of SCHEMAS.

    >>> schema_of("report")["title"]
    'Report'
    """
    if name not in SCHEMAS:
        raise ValueError(f"name must be one of {', '.join(SCHEMAS)}; got {name!r}")
    schema: dict[str, Any] = json.loads((FOLDER / f"{name}.schema.json").read_text())
    return schema
