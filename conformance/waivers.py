"""Known failures, each with its reason: a file that may shrink, and shouts when it should.

    # comments and empty lines are free
    keys.cosine_0.999: the inverse runs in fp16 until release 2, tracked upstream
    gradients.bound @ chunk 64: under contracts that begin with these words alone

A line without a reason, or for a check that does not exist, is an error. A waived check that passes fails the
run: the waiver has to go.
"""

from __future__ import annotations

from pathlib import Path

from .suite import all_checks


def read_waivers(path: Path) -> dict[str, str]:
    """Reasons by check id. Raises ValueError with the line that is wrong."""
    known = {check.id for check in all_checks()}
    waivers = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        id, _, reason = (part.strip() for part in line.partition(":"))
        if id.partition(" @ ")[0] not in known:
            raise ValueError(f"{path}:{number}: no check is called {id.partition(' @ ')[0]!r}")
        if not reason:
            raise ValueError(f"{path}:{number}: {id} needs a reason: `{id}: why, and where it is tracked`")
        waivers[id] = reason
    return waivers
