"""Two adapters that stand for a kernel by way of files: one writes down its calls, one reads its answers."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .adapter import Call, Capabilities, ConvCall
from .bench import Bench
from .guard import KernelFailure
from .plain import from_plain
from .precision import DTYPES
from .suite import Check
from .verdict import Verdict

INPUTS, OUTPUTS = "in.safetensors", "out.safetensors"
DEPENDS = "its inputs depend on the kernel's own results"


@dataclass
class Exported:
    """What an export wrote: calls, their bytes, and the checks that a folder cannot carry, by reason."""

    calls: int = 0
    bytes: int = 0
    skipped: dict[str, str] = field(default_factory=dict)


class ByFile:
    """An adapter that knows which check is calling, how often, and why a call cannot go by file."""

    def __init__(self, caps: Capabilities, identity: str) -> None:
        self.caps, self.name = replace(caps, stages=(), arrays="torch"), identity
        self.start("")

    def start(self, check: str) -> None:
        """What follows is called by this check."""
        self.check, self.seen, self.reason = check, Counter[str](), ""

    def capabilities(self) -> Capabilities:
        return self.caps

    def identity(self) -> str:
        return self.name

    def run(self, call: Call, want: frozenset[str]) -> dict[str, Tensor]:
        self.reason = self.reason or why_not_by_file(call)
        if self.reason:
            raise KernelFailure(self.reason)
        key = key_of(call, want)
        self.seen[key] += 1  # the same call again is another run of the kernel
        return self.answer(call, want, f"{key}.{self.seen[key]}")

    def convolve(self, call: ConvCall, want: frozenset[str]) -> dict[str, Tensor]:
        self.reason = "a short convolution does not travel by file"
        raise KernelFailure(self.reason)

    def answer(self, call: Call, want: frozenset[str], key: str) -> dict[str, Tensor]:
        raise NotImplementedError

    def judged(self, check: Check, bench: Bench) -> Verdict:
        """The verdict of a check; skipped where a file cannot say."""
        self.start(check.id)
        if check.family == "refusals" and check.why_not(bench) is None:
            return Verdict(check.id, check.tier, "skip", "errors do not travel by file", contract=bench.contract)
        verdict = check(bench)
        return replace(verdict, status="skip", reason=self.reason, place=None) if self.reason else verdict


class Recorder(ByFile):
    """Writes each call to a folder of its own and answers with zeros."""

    def __init__(self, folder: Path, caps: Capabilities) -> None:
        super().__init__(caps, "a recorder of calls")
        self.folder, self.calls = folder, dict[str, dict[str, Any]]()
        self.done = Exported()

    def answer(self, call: Call, want: frozenset[str], key: str) -> dict[str, Tensor]:
        results = zeros_for(call, want, self.caps)
        if key not in self.calls:
            self.calls[key] = self._written(call, results, key)
        if self.check not in self.calls[key]["checks"]:
            self.calls[key]["checks"].append(self.check)
        return results

    def _written(self, call: Call, results: dict[str, Tensor], key: str) -> dict[str, Any]:
        number = sum(entry["checks"][0] == self.check for entry in self.calls.values()) + 1
        name = f"{self.check}.{number}"
        file = self.folder / name / INPUTS
        file.parent.mkdir(parents=True)
        save_file({name: x.contiguous() for name, x in call.tensors().items()}, file)
        self.done.calls, self.done.bytes = self.done.calls + 1, self.done.bytes + file.stat().st_size
        offsets = None if call.cu_seqlens is None else call.cu_seqlens.tolist()
        return {
            "folder": name, "key": key, "checks": [], "operation": call.operation, "contract": asdict(call.contract),
            "front": None if call.front is None else asdict(call.front), "scale": call.scale, "cu_seqlens": offsets,
            "inputs": described(call.tensors()), "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
            "outputs": described(results),
        }  # fmt: skip


class Replay(ByFile):
    """Answers with what somebody wrote beside the inputs."""

    def __init__(self, folder: Path, manifest: dict[str, Any], identity: str) -> None:
        super().__init__(from_plain(Capabilities, manifest["capabilities"], "capabilities"), identity)
        self.folder, self.calls = folder, {entry["key"]: entry for entry in manifest["calls"]}
        self.foreign = False  # a check's first call depends on no result, so it has to be there

    def answer(self, call: Call, want: frozenset[str], key: str) -> dict[str, Tensor]:
        entry = self.calls.get(key)
        if entry is None:
            self.foreign = self.foreign or sum(self.seen.values()) == 1
            self.reason = DEPENDS
            raise KernelFailure(DEPENDS)
        return results_in(self.folder / entry["folder"] / OUTPUTS, want)


def results_in(file: Path, want: frozenset[str]) -> dict[str, Tensor]:
    """The tensors of an output file; KernelFailure with what is wrong with it."""
    name = f"{file.parent.name}/{file.name}"
    if not file.is_file():
        raise KernelFailure(f"{name} is missing")
    try:
        results = load_file(file)
    except (SafetensorError, OSError) as error:
        raise KernelFailure(f"{name} cannot be read: {error}") from None
    for wanted in sorted(want - set(results)):
        raise KernelFailure(f"{name} has no tensor {wanted!r}; it has {', '.join(sorted(results)) or 'none'}")
    return results


def why_not_by_file(call: Call) -> str:
    """Why a call means nothing outside this process."""
    if call.operation == "decode":
        return "a pool that advances in place does not travel by file"
    if not all(x.is_contiguous() for x in call.tensors().values()):
        return "strides do not travel by file"
    if torch.are_deterministic_algorithms_enabled():
        return "new memory is filled in this process alone"
    return ""


def key_of(call: Call, want: frozenset[str]) -> str:
    """A digest of everything that a call says."""
    said = {"scale": call.scale, "operation": call.operation, "contract": str(asdict(call.contract))}
    said |= {"front": str(call.front), "want": str(sorted(want)), "inputs": str(described(call.tensors()))}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for _, x in sorted(call.tensors().items()):
        digest.update(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:24]


def described(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Dtype and shape of each tensor."""
    return {
        name: {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape)} for name, x in tensors.items()
    }


def zeros_for(call: Call, want: frozenset[str], caps: Capabilities) -> dict[str, Tensor]:
    """Results of the right shapes and dtypes, of zeros."""
    HV, V = call.v.shape[2:]
    N = len(call.v) if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    K = call.q.shape[-1]
    shape = (N, HV, K, V) if caps.state_layout == "KV" else (N, HV, V, K)
    wide = torch.float64 if call.contract.io == "fp64" else torch.float32
    like = {"dq": call.q, "dk": call.k, "dv": call.v, "dg": call.g, "dbeta": call.beta}
    like |= {name: x for name, x in (("dA_log", call.A_log), ("ddt_bias", call.dt_bias)) if x is not None}
    zeros = {name: torch.zeros_like(x) for name, x in like.items()}
    zeros["o"] = torch.zeros(call.v.shape, dtype=DTYPES[call.contract.io])
    zeros["final_state"] = torch.zeros(shape, dtype=wide if wide == torch.float64 else DTYPES[caps.state_dtype])
    zeros["dh0"] = torch.zeros(shape, dtype=wide)
    return {name: zeros[name] for name in sorted(want)}
