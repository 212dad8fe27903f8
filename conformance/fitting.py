"""Which cases a kernel has to take, at which of its sizes, through which of its front ends."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from .capabilities import Capabilities, Contract, FrontForm
from .cases import DEFAULT_CHUNK, SUBJECTS, Case, length_of, tensors_of


def why_not(case: Case, caps: Capabilities, contract: Contract) -> str | None:
    """Why a kernel need not take a case, in words; None if it has to."""
    if not caps.whole_sequences:
        return "whole sequences are not declared"
    if case.front is not None and not suitable_fronts(case, caps):
        return f"a front end with {SUBJECTS[case.front]} is not declared"
    if case.has("exact") and caps.forced_front is not None:
        return "every call goes through a front end, and activations are not exact"
    if case.lengths is not None and not caps.packed:
        return "packed segments are not declared"
    if case.has("gradients") and "backward" not in caps.operations:
        return "backward is not declared"
    if case.has("gradients") and case.front is not None and not caps.front_backward:
        return "a backward through the front end is not declared"
    if case.beta in ("two", "up_to_two", "mixed") and not caps.beta_above_one:
        return "beta above 1 is not declared"
    if case.has("exact") and not caps.free_scale and math.log2(_nearest(case.K, caps.K)) % 2:
        return "its scale, K ** -0.5, is no power of two"
    if caps.lowest_gate is not None and (tensors_of(fitted(case, caps, contract)).g < caps.lowest_gate).any():
        return f"gates below {caps.lowest_gate:g} are not declared"
    if case.has("long_sums") and contract.accumulate not in ("fp32", "fp64"):
        return f"sums are declared to be in {contract.accumulate}"
    if case.has("beyond_fp16") and "fp16" in (contract.io, contract.operand, contract.state):
        return "the values leave the range of fp16"
    return None


def suitable_fronts(case: Case, caps: Capabilities) -> list[FrontForm]:
    """The declared front ends that have what the case is about."""
    has: dict[str, Callable[[FrontForm], bool]] = {
        "l2norm": lambda form: form.l2norm_eps is not None,
        "softplus": lambda form: form.gate == "softplus",
        "bounded": lambda form: form.gate == "bounded",
        "beta": lambda form: form.beta is not None,
        "whole": lambda form: None not in (form.l2norm_eps, form.gate, form.beta),
    }
    return [] if case.front is None else [form for form in caps.front_ends if has[case.front](form)]


def fitted(case: Case, caps: Capabilities, contract: Contract) -> Case:
    """The case at sizes that the kernel declares, with lengths in tokens."""
    C = contract.chunk_size or DEFAULT_CHUNK
    K, V = _nearest(case.K, caps.K), _nearest(case.V, caps.V)
    if caps.square:
        common = tuple(sorted(set(caps.K or (K, V)) & set(caps.V or caps.K or (K, V))))
        K = V = _nearest(max(K, V), common or None)
    lengths = None if case.lengths is None else tuple(length_of(n, C) for n in case.lengths)
    T = length_of(case.T, C) if lengths is None else sum(length_of(n, C) for n in lengths) + case.past_end
    group = case.group if caps.groups else 1
    H = case.H if caps.groups else case.H * case.group
    scale = case.scale if caps.free_scale else None
    return replace(case, K=K, V=V, T=T, lengths=lengths, group=group, H=H, scale=scale)


def _nearest(size: int, allowed: tuple[int, ...] | None) -> int:
    """The smallest allowed size that is not below the wanted one, or the largest there is."""
    if allowed is None:
        return size
    return min((n for n in allowed if n >= size), default=max(allowed))
