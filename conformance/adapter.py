"""How a kernel is plugged in: three functions, and what they promise.

    capabilities() -> Capabilities          what the kernel can do, in which precision
    run(call, want) -> dict[str, Tensor]    compute the results named in `want` for one call
    identity() -> str                       which code ran: symbol, version, build

`want` holds names of results: "o", "final_state"; "dq", "dk", "dv", "dg", "dbeta", "dh0" where "backward" is
declared; stages ("G", "A", ..) where they are declared. What is not declared is skipped and listed; what is
declared and fails, fails. A module, a class instance or any object with the three functions is an adapter.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from .precision import DTYPES, MANTISSA

OPERATIONS = ("chunk", "recurrent", "backward")
RESULTS = ("o", "final_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
STAGES = ("G", "A", "Aqk", "T", "w", "u", "v_new")  # of ChunkStages, as [B, T, HV, *]
DECAY_FORMS = ("differences", "sums")


class BadAdapterError(Exception):
    """An adapter that cannot be judged: it does not load, or contradicts itself."""


@dataclass(frozen=True)
class Contract:
    """The precision of one way to call the kernel; errors are judged against what it allows.

    io           q, k, v and o
    operand      operands of matrix products
    accumulate   sums, elementwise arithmetic, the triangular inverse
    state        the state between chunks (between tokens where chunk_size is None)
    chunk_size   tokens a chunk; None computes token by token
    decay        "differences" of a cumulative gate, which lose digits after a strong gate, or "sums" of gates
    """

    io: str = "bf16"
    operand: str = "bf16"
    accumulate: str = "fp32"
    state: str = "fp32"
    chunk_size: int | None = 64
    decay: str = "differences"

    def __str__(self) -> str:
        form = "recurrent" if self.chunk_size is None else f"chunk {self.chunk_size}"
        return f"{form}, {self.io} in and out, {self.operand} operands, {self.state} state"


@dataclass(frozen=True)
class Capabilities:
    """What a kernel can do. Conventions differ in the field, so the oracle speaks the kernel's own.

    K, V            allowed channels (None: any); a case is fitted to the nearest allowed size
    square          K and V must be equal
    groups          HV may be a multiple of H
    free_scale      the scale may be other than K ** -0.5
    log_base        of the gate it takes: "e", or "2" for g / ln 2
    beta            "probability", or "logit" for a sigmoid inside
    beta_above_one  beta up to 2 (negative eigenvalues)
    state_layout    "KV" or "VK", of initial and final state
    state_dtype     of initial and final state
    packed          cu_seqlens
    overwrites      inputs that it may overwrite
    stages          intermediates that `run` can return, named as in ChunkStages, [B, T, HV, *]
    """

    operations: tuple[str, ...] = ("chunk",)
    contracts: tuple[Contract, ...] = (Contract(),)
    K: tuple[int, ...] | None = None
    V: tuple[int, ...] | None = None
    square: bool = False
    groups: bool = True
    free_scale: bool = True
    log_base: str = "e"
    beta: str = "probability"
    beta_above_one: bool = True
    state_layout: str = "KV"
    state_dtype: str = "fp32"
    packed: bool = True
    overwrites: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Call:
    """One call, in the kernel's own conventions. Tensors as in `kimi_linear.reference.contract`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    do: Tensor | None = None
    dht: Tensor | None = None
    operation: str = "chunk"
    contract: Contract = field(default_factory=Contract)

    def tensors(self) -> dict[str, Tensor]:
        """Every input tensor by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def forward_options(self) -> dict[str, Any]:
        """The keyword arguments of the reference's operators."""
        return {"scale": self.scale, "initial_state": self.initial_state, "cu_seqlens": self.cu_seqlens}


@runtime_checkable
class Adapter(Protocol):
    """The three functions of this module's docstring."""

    def capabilities(self) -> Capabilities: ...

    def run(self, call: Call, want: frozenset[str]) -> dict[str, Tensor]: ...

    def identity(self) -> str: ...


def load_adapter(where: str) -> Adapter:
    """An adapter from `package.module`, `package.module:object` or `path/to/file.py[:object]`."""
    source, _, attribute = where.partition(":")
    try:
        module = _module_from_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
        found = getattr(module, attribute) if attribute else module
    except Exception as error:  # whatever a stranger's module does while it is imported
        raise BadAdapterError(f"{where} does not load: {type(error).__name__}: {error}") from error
    found = found() if isinstance(found, type) else found
    for name in ("capabilities", "run", "identity"):
        if not callable(getattr(found, name, None)):
            raise BadAdapterError(f"{where} must have a function {name}(); it has none")
    return found


def checked_capabilities(adapter: Adapter) -> Capabilities:
    """The adapter's capabilities, refused where they contradict each other or mean nothing."""
    caps = adapter.capabilities()
    if not isinstance(caps, Capabilities):
        raise BadAdapterError(f"capabilities() must return Capabilities; got {type(caps).__name__}")
    for complaint in _contradictions(caps):
        raise BadAdapterError(f"capabilities: {complaint}")
    return caps


def _contradictions(caps: Capabilities) -> list[str]:
    found = []
    if not {"chunk", "recurrent"} & set(caps.operations):
        found.append(f'operations must name "chunk" or "recurrent"; got {caps.operations}')
    choices: list[tuple[str, str, tuple[str, ...]]] = [("operations", name, OPERATIONS) for name in caps.operations]
    choices += [("stages", name, STAGES) for name in caps.stages]
    choices += [
        ("log_base", caps.log_base, ("e", "2")),
        ("beta", caps.beta, ("probability", "logit")),
        ("state_layout", caps.state_layout, ("KV", "VK")),
        ("state_dtype", caps.state_dtype, tuple(DTYPES)),
    ]
    found += [f"{name} must be one of {known}; got {value!r}" for name, value, known in choices if value not in known]
    if not caps.contracts:
        found.append("contracts must name at least one")
    if caps.beta == "logit" and caps.beta_above_one:
        found.append('beta="logit" gives at most 1, so beta_above_one must be False')
    if "backward" in caps.operations and (caps.log_base, caps.beta) != ("e", "probability"):
        found.append('gradients are judged for log_base="e" and beta="probability" only; leave "backward" out')
    if caps.square and caps.K and caps.V and not set(caps.K) & set(caps.V):
        found.append(f"square needs a size common to K={caps.K} and V={caps.V}")
    return found + [complaint for contract in caps.contracts for complaint in _complaints(contract, caps)]


def _complaints(contract: Contract, caps: Capabilities) -> list[str]:
    found = []
    if contract.io not in DTYPES:
        found.append(f"io must be one of {tuple(DTYPES)}; got {contract.io!r}")
    for name in ("operand", "accumulate", "state"):
        if getattr(contract, name) not in MANTISSA:
            found.append(f"{name} must be one of {tuple(MANTISSA)}; got {getattr(contract, name)!r}")
    if contract.decay not in DECAY_FORMS:
        found.append(f"decay must be one of {DECAY_FORMS}; got {contract.decay!r}")
    if contract.chunk_size is None and "recurrent" not in caps.operations:
        found.append('a contract without chunk_size needs the operation "recurrent"')
    if contract.chunk_size is not None and contract.chunk_size not in (16, 32, 64, 128):
        found.append(f"chunk_size must be 16, 32, 64, 128 or None; got {contract.chunk_size!r}")
    if contract.chunk_size is not None and "chunk" not in caps.operations:
        found.append('a contract with chunk_size needs the operation "chunk"')
    return found


def _module_from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
