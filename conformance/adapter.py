"""How a kernel is plugged in: three functions, and what they promise.

    capabilities() -> Capabilities          what the kernel can do, in which precision
    run(call, want) -> dict[str, Tensor]    compute the results named in `want` for one call
    identity() -> str                       which code ran: symbol, version, build

`call.operation` says what is asked, of what the adapter declares:

    "chunk", "recurrent"   "o" and "final_state"; stages where declared; with `call.do`, the gradients of what was
                           given, "dq" .. "dh0", and through a gate inside "dA_log" and "ddt_bias"
    "decode"               "o", for one step of sequences whose states lie in `call.state_pool`, which advances

A short convolution, the operation "short_conv", has a function of its own beside `run`, or in its place:

    convolve(call, want) -> dict[str, Tensor]   "y" and "final_state" for a `ConvCall`

What is not declared is skipped and listed; what is declared and fails, fails. A module, a class instance or any
object with the three functions is an adapter.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast, runtime_checkable

from torch import Tensor

from ..reference.front_end import FrontEnd
from ..reference.gates import BoundedGate, SoftplusGate
from .capabilities import (
    GRADIENTS,
    OPERATIONS,
    PARAMETER_GRADIENTS,
    REFUSALS,
    RESULTS,
    STAGES,
    Capabilities,
    Contract,
    FrontForm,
    Pool,
    ShortConv,
)
from .contradictions import contradictions

__all__ = [
    "GRADIENTS",
    "OPERATIONS",
    "PARAMETER_GRADIENTS",
    "REFUSALS",
    "RESULTS",
    "STAGES",
    "Adapter",
    "AnyCall",
    "BadAdapterError",
    "Call",
    "Capabilities",
    "Contract",
    "ConvCall",
    "FrontForm",
    "Pool",
    "ShortConv",
    "checked_capabilities",
    "load_adapter",
]


class BadAdapterError(Exception):
    """An adapter that cannot be judged: it does not load, or contradicts itself."""


@dataclass(frozen=True)
class Call:
    """One call, in the kernel's own conventions. Tensors as in `kimi_linear.reference.contract`.

    front          the front end that this call goes through, one of those declared: then q and k, g and beta are
                   raw as far as it has a step for them, with A_log [HV] and dt_bias [HV, K] in fp32 for its gate
    state_pool     [slots, HV, K, V] or as declared, for "decode"; instead of initial_state
    slot_indices   [N], or [N, 1 + drafts] where drafts are declared: see `Pool`
    accepted       [N] int32: how many of the last step's tokens hold, from 1; None means 1
    """

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
    front: FrontForm | None = None
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    state_pool: Tensor | None = None
    slot_indices: Tensor | None = None
    accepted: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every input tensor by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """q, k, v, g and beta."""
        return self.q, self.k, self.v, self.g, self.beta

    @property
    def front_end(self) -> FrontEnd | None:
        """The front end as this repository's operators take it."""
        return None if self.front is None else front_end_of(self.front, self.A_log, self.dt_bias)

    def forward_options(self) -> dict[str, Any]:
        """The keyword arguments of the reference's operators; front_end only where there is one."""
        options = {"scale": self.scale, "initial_state": self.initial_state, "cu_seqlens": self.cu_seqlens}
        return options if self.front is None else {**options, "front_end": self.front_end}


@dataclass(frozen=True)
class ConvCall:
    """One call of a short convolution with SiLU.

    "short_conv"           x [B, T, D] or packed; "y" [B, T, D] and "final_state"
    "short_conv_update"    x [N, D], one token a sequence; "y" [N, D], and `state_pool` advances in place
    """

    x: Tensor
    weight: Tensor
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    state_pool: Tensor | None = None
    slot_indices: Tensor | None = None
    operation: str = "short_conv"
    contract: Contract = field(default_factory=Contract)

    def tensors(self) -> dict[str, Tensor]:
        """Every input tensor by name."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}


AnyCall = Call | ConvCall


def front_end_of(form: FrontForm, A_log: Tensor | None, dt_bias: Tensor | None) -> FrontEnd:
    """A front end with its gate's parameters."""
    gate: SoftplusGate | BoundedGate | None = None
    if form.gate is not None and A_log is not None and dt_bias is not None:
        softplus = form.gate == "softplus"
        gate = SoftplusGate(A_log, dt_bias) if softplus else BoundedGate(A_log, dt_bias, form.lower_bound)
    beta = cast(Literal["sigmoid", "double_sigmoid"] | None, form.beta)
    return FrontEnd(gate=gate, l2norm_eps=form.l2norm_eps, beta=beta)


@runtime_checkable
class Convolves(Protocol):
    """What an adapter of a short convolution has beside them."""

    def convolve(self, call: ConvCall, want: frozenset[str]) -> dict[str, Tensor]: ...


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
    entry = "convolve" if callable(getattr(found, "convolve", None)) else "run"
    for name in ("capabilities", entry, "identity"):
        if not callable(getattr(found, name, None)):
            raise BadAdapterError(f"{where} must have a function {name}(); it has none")
    return found


def checked_capabilities(adapter: Adapter) -> Capabilities:
    """The adapter's capabilities, refused where they contradict each other or mean nothing."""
    try:
        caps = adapter.capabilities()
    except Exception as error:  # such as a package or a GPU that is not there
        raise BadAdapterError(f"capabilities() raises {type(error).__name__}: {error}") from error
    if not isinstance(caps, Capabilities):
        raise BadAdapterError(f"capabilities() must return Capabilities; got {type(caps).__name__}")
    entries = {"convolve" if operation == "short_conv" else "run" for operation in caps.operations}
    for name in sorted(entries):
        if not callable(getattr(adapter, name, None)):
            raise BadAdapterError(f"operations={caps.operations} need a function {name}(call, want); there is none")
    for complaint in contradictions(caps):
        raise BadAdapterError(f"capabilities: {complaint}")
    return caps


def package(module: str, install: str) -> Any:
    """A module of a kernel's own package. Raises ModuleNotFoundError, which says what to install, where it is not."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; this adapter needs {install}") from error


def _module_from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
