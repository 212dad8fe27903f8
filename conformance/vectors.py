"""Golden vectors: inputs, exact results and allowed errors in files, for a kernel that no Python process calls.

A file a case, NAME.safetensors, with the names of the operator's arguments and

    gold.RESULT                     the fp64 recurrence on exactly these inputs; gradients by its adjoint
    stage.NAME                      of STAGED alone: stages of the chunk form (docs/notation.md), by token, in fp64
    envelope.CONTRACT.RESULT        the allowed error of every row, in fp32 (`envelope.py`); CONTRACT of `CONTRACTS`

q, k, v and do are bf16, so that every format takes them as they are; the rest is fp32, cu_seqlens int32. In
manifest.json stands why a case is there, its scale and its front end; SHA256SUMS has every file. Numbers are drawn
by counters (`draws.py`), so that whoever writes them again gets the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from .adapter import Capabilities, Contract, FrontForm
from .by_file import described
from .cases import Case
from .gold import envelopes_of, stage_truth, truth_of
from .limits import FORWARD_RATIO, GRADIENT_RATIO
from .problem import Problem, problem_of

FORMAT = "kimi-linear-vectors/1"
MANIFEST, SUMS = "manifest.json", "SHA256SUMS"
CONTRACTS = {
    "bf16": Contract(),
    "fp32": Contract(io="fp32", operand="fp32"),
    "recurrent": Contract(io="fp32", operand="fp32", chunk_size=None),
}
CAPABILITIES = Capabilities(operations=("chunk", "recurrent", "backward"), contracts=tuple(CONTRACTS.values()))
FRONTS = {
    "l2norm": FrontForm(),
    "softplus": FrontForm(gate="softplus", beta="sigmoid"),
    "bounded": FrontForm(gate="bounded", beta="double_sigmoid"),
}
STAGED, STAGE_CHUNK = "plain", 16  # a whole chunk, and five tokens of the next


def vector(id: str, comment: str, gradients: bool = False, **knobs: Any) -> Case:
    """A small case: an odd number of tokens, two value heads a key head, K != V."""
    raw = {"queries": "raw", "keys": "raw"} if "front" in knobs else {}
    knobs = {"T": 21, "H": 1, "group": 2, "K": 16, "V": 8, **raw, **knobs}
    return Case(id, "vectors", comment, flags=("gradients",) if gradients else (), **knobs)


VECTORS = (
    vector("plain", "mild gates, an initial state; gradients too", gradients=True),
    vector("no_state", "no initial state, and a scale of its own", state="none", scale=0.5, T=7),
    vector("one_token", "a decoding step", T=1),
    vector("two_chunks", "67 tokens: a chunk of 64, and three", T=67, gate="typical"),
    vector("packed", "segments of 9, 0, 1 and 11 tokens, and two rows after the last", gradients=True,
           lengths=(9, 0, 1, 11), past_end=2),
    vector("groups", "a batch of two, two key heads, four value heads each", B=2, H=2, group=4, T=13),
    vector("odd_channels", "K = 20, V = 12: no multiples of 16", K=20, V=12, T=19),
    vector("gate_zero", "g = 0: nothing is forgotten", gate="zero"),
    vector("gate_minus_infinity", "g = -inf here and there: that channel forgets everything", gate="minus_infinity"),
    vector("gate_half_strong", "every other channel at -20", gate="half_strong", gradients=True),
    vector("beta_two", "beta = 2 on one key and its negative: every write reflects", beta="two", keys="flipped",
           gate="slow"),
    vector("repeated_keys", "every key eight times, slow gates, beta = 0.95", beta="high", keys="runs", gate="slow",
           T=29),
    vector("l2norm", "q and k of any length, normalised inside", front="l2norm"),
    vector("softplus", "raw projections: l2norm, softplus gate, sigmoid; gradients of all", gradients=True,
           front="softplus", T=11),
    vector("bounded", "raw projections: l2norm, bounded gate, twice a sigmoid; gradients of all", gradients=True,
           front="bounded", T=11),
)  # fmt: skip


def write_vectors(folder: Path) -> list[Path]:
    """Write every case, the manifest and the sums into a folder; files of these names are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    entries = [write_case(folder, case) for case in VECTORS]
    limits = {"forward": FORWARD_RATIO, "backward": GRADIENT_RATIO}
    conventions = {"log_base": CAPABILITIES.log_base, "state_layout": CAPABILITIES.state_layout}
    contracts = {name: asdict(contract) for name, contract in CONTRACTS.items()}
    manifest = {"format": FORMAT, **conventions, "limits": limits, "contracts": contracts, "cases": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    files = [folder / MANIFEST, *(folder / entry["file"] for entry in entries)]
    (folder / SUMS).write_text("".join(f"{_digest(file)}  {file.name}\n" for file in files))
    return [*files, folder / SUMS]


def write_case(folder: Path, case: Case) -> dict[str, Any]:
    """Write one file; its entry in the manifest."""
    problem = problem_of(case, CAPABILITIES, CONTRACTS["bf16"], front=FRONTS.get(case.front or ""))
    tensors = {name: x.contiguous() for name, x in tensors_of_vector(problem).items()}
    file = folder / f"{case.id}.safetensors"
    save_file(tensors, file)
    call = problem.call
    return {
        "id": case.id, "comment": case.comment, "file": file.name, "sha256": _digest(file), "scale": call.scale,
        "stage_chunk": STAGE_CHUNK if case.id == STAGED else None,
        "cu_seqlens": problem.judge.offsets, "front": None if call.front is None else asdict(call.front),
        "tensors": described(tensors),
    }  # fmt: skip


def tensors_of_vector(problem: Problem) -> dict[str, Tensor]:
    """Inputs as they are given, exact results and stages, and envelopes under each contract."""
    tensors = dict(problem.call.tensors())
    tensors |= {f"gold.{name}": exact for name, exact in truth_of(problem).items()}
    for name, contract in CONTRACTS.items():
        bounds = envelopes_of(replace(problem, contract=_takes(contract, problem)))
        tensors |= {f"envelope.{name}.{result}": bound.float() for result, bound in bounds.items()}
    if problem.case.id == STAGED:
        exact, _ = stage_truth(replace(problem, contract=replace(problem.contract, chunk_size=STAGE_CHUNK)))
        tensors |= {f"stage.{name}": x for name, x in exact.items()}
    return tensors


def _takes(contract: Contract, problem: Problem) -> Contract:
    """Sums of gates where one is -inf: a difference of such sums is no number."""
    return contract if problem.judge.g.isfinite().all() else replace(contract, decay="sums")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
