"""Exact results and allowed errors beside exported calls, for a program that compares by itself."""

from __future__ import annotations

from safetensors.torch import save_file
from torch import Tensor

from . import fitting
from .bench import Bench
from .by_file import Recorder, key_of
from .catalogue import CASES
from .gold import envelopes_of, truth_of
from .guard import STATES, wanted
from .problem import in_layout, problems_of
from .suite import Check
from .verdict import limit_of

GOLD = "gold.safetensors"
ENVELOPE = "envelope_"  # before the name of a result


def write_gold(recorder: Recorder, check: Check, bench: Bench) -> None:
    """The exact results of a case beside its calls, and their limits in the manifest; other checks have none."""
    case = next((case for case in CASES if case.id == check.id), None)
    if case is None or case.has("acceptable") or fitting.why_not(case, bench.caps, bench.contract) is not None:
        return
    for problem in problems_of(case, bench.caps, bench.contract):
        want = wanted(problem)
        entry = recorder.calls[f"{key_of(problem.call, want)}.1"]
        tensors: dict[str, Tensor] = {}
        for name in sorted(want):
            exact = truth_of(problem)[name]
            tensors[name] = in_layout(exact, bench.caps) if name in STATES else exact
            tensors[ENVELOPE + name] = envelopes_of(problem)[name].float()
        file = recorder.folder / entry["folder"] / GOLD
        save_file({name: x.contiguous() for name, x in tensors.items()}, file)
        limits = {name: 0.0 if case.has("exact") else limit_of(name) for name in sorted(want)}
        entry["gold"] = {"file": GOLD, "limits": limits}
        recorder.done.bytes += file.stat().st_size
