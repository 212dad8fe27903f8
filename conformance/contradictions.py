"""What makes capabilities meaningless: refused before the first case, with the reason."""

from __future__ import annotations

from .capabilities import (
    BETA_FORMS,
    DECAY_FORMS,
    GATE_FORMS,
    INDEX_DTYPES,
    OPERATIONS,
    REFUSALS,
    STAGES,
    Capabilities,
    Contract,
)
from .precision import DTYPES, MANTISSA


def contradictions(caps: Capabilities) -> list[str]:
    """What an adapter's capabilities say that means nothing, or contradicts the rest."""
    found = []
    if not {"chunk", "recurrent", "decode", "short_conv"} & set(caps.operations):
        found.append(f'operations must name "chunk", "recurrent", "decode" or "short_conv"; got {caps.operations}')
    found += _unknown(caps)
    if not caps.contracts:
        found.append("contracts must name at least one")
    if caps.beta == "logit" and caps.beta_above_one:
        found.append('beta="logit" gives at most 1, so beta_above_one must be False')
    if "backward" in caps.operations and (caps.log_base, caps.beta, caps.plain) != ("e", "probability", True):
        found.append('gradients are judged for log_base="e", beta="probability" and plain; leave "backward" out')
    if caps.lowest_gate is not None and not caps.lowest_gate < 0:
        found.append(f"lowest_gate must be negative or None; got {caps.lowest_gate!r}")
    if caps.square and caps.K and caps.V and not set(caps.K) & set(caps.V):
        found.append(f"square needs a size common to K={caps.K} and V={caps.V}")
    if caps.alignment not in (1, 2, 4, 8, 16, 32, 64):
        found.append(f"alignment must be a power of two up to 64; got {caps.alignment!r}")
    found += _front_complaints(caps) + _pool_complaints(caps) + _conv_complaints(caps)
    found += _refusal_complaints(caps)
    return found + [complaint for contract in caps.contracts for complaint in _complaints(contract, caps)]


def _unknown(caps: Capabilities) -> list[str]:
    choices: list[tuple[str, object, tuple[object, ...]]] = [
        ("log_base", caps.log_base, ("e", "2")),
        ("beta", caps.beta, ("probability", "logit")),
        ("gate_dtype", caps.gate_dtype, ("fp32", "io")),
        ("arrays", caps.arrays, ("torch", "numpy")),
        ("state_layout", caps.state_layout, ("KV", "VK")),
        ("state_dtype", caps.state_dtype, tuple(DTYPES)),
        ("packed_dtype", caps.packed_dtype, INDEX_DTYPES),
    ]
    choices += [("operations", name, OPERATIONS) for name in caps.operations]
    choices += [("stages", name, STAGES) for name in caps.stages]
    choices += [("refuses", name, REFUSALS) for name in caps.refuses]
    for form in caps.front_ends:
        choices += [("front_ends gate", form.gate, (*GATE_FORMS, None))]
        choices += [("front_ends beta", form.beta, (*BETA_FORMS, None))]
    if caps.pool is not None:
        choices += [("pool index", caps.pool.index, INDEX_DTYPES)]
        choices += [("pool dtypes", name, tuple(DTYPES)) for name in caps.pool.dtypes]
    return [f"{name} must be one of {known}; got {value!r}" for name, value, known in choices if value not in known]


def _front_complaints(caps: Capabilities) -> list[str]:
    found = [] if caps.plain or caps.front_ends else ["plain=False needs the front end that every call goes through"]
    if caps.forced_front is not None and caps.forced_front.beta == "sigmoid" and caps.beta_above_one:
        found.append("every call goes through a sigmoid, so beta_above_one must be False")
    for form in caps.front_ends:
        if form.l2norm_eps is None and form.gate is None and form.beta is None:
            found.append("front_ends holds one that does nothing; that is a plain call")
        if form.l2norm_eps is not None and not 0 < form.l2norm_eps < 1:
            found.append(f"l2norm_eps must be a small positive number or None; got {form.l2norm_eps!r}")
        if not -float("inf") < form.lower_bound < 0:
            found.append(f"lower_bound must be negative and finite; got {form.lower_bound!r}")
        if caps.beta == "logit" and form.beta != "sigmoid":
            found.append(f'beta="logit" is a sigmoid in every call; front_ends with beta={form.beta!r} has another')
        if caps.log_base == "2" and form.gate is not None:
            found.append(f'log_base="2" and a {form.gate} gate: a raw gate has no log base')
    return found


def _pool_complaints(caps: Capabilities) -> list[str]:
    pool = caps.pool
    if (pool is None) != ("decode" not in caps.operations):
        return [f'"decode" and pool go together; got operations={caps.operations} and pool={pool}']
    if pool is None:
        return []
    found = [] if pool.dtypes else ["pool dtypes must name at least one"]
    if not 0 <= pool.drafts < 16:
        found.append(f"pool drafts must be from 0 to 15; got {pool.drafts!r}")
    if pool.index == "int32" and any(abs(n) >= 2**31 for n in pool.nobody):
        found.append(f"pool nobody must fit int32; got {pool.nobody}")
    return found


def _conv_complaints(caps: Capabilities) -> list[str]:
    conv = caps.short_conv
    if (conv is None) != ("short_conv" not in caps.operations):
        return [f'"short_conv" and short_conv go together; got operations={caps.operations} and short_conv={conv}']
    if conv is None:
        return []
    found = [] if conv.taps and min(conv.taps) > 1 else [f"short_conv taps must be at least 2 each; got {conv.taps}"]
    if conv.layout not in ("DW", "WD"):
        found.append(f"short_conv layout must be one of ('DW', 'WD'); got {conv.layout!r}")
    return found


def _refusal_complaints(caps: Capabilities) -> list[str]:
    found = [
        f'refuses "{name}", but packed is False: such a call cannot be made'
        for name in caps.refuses
        if name.startswith("packed") and not caps.packed
    ]
    if "positive_gate" in caps.refuses and not caps.plain:
        found.append('refuses "positive_gate", but plain is False: a raw gate has no wrong sign')
    slots = {"slots", "slot_range"} & set(caps.refuses)
    if slots and caps.pool is None:
        found.append(f"refuses {min(slots)!r}, but there is no pool")
    if "slot_range" in slots and caps.pool is not None and max(caps.pool.nobody, default=-1) > 0:
        found.append(f"refuses 'slot_range', but pool nobody={caps.pool.nobody} takes such an index for padding")
    return found


def _complaints(contract: Contract, caps: Capabilities) -> list[str]:
    found = []
    if contract.io not in DTYPES:
        found.append(f"io must be one of {tuple(DTYPES)}; got {contract.io!r}")
    for name in ("operand", "accumulate", "state", "activation"):
        if getattr(contract, name) not in MANTISSA:
            found.append(f"{name} must be one of {tuple(MANTISSA)}; got {getattr(contract, name)!r}")
    if contract.decay not in DECAY_FORMS:
        found.append(f"decay must be one of {DECAY_FORMS}; got {contract.decay!r}")
    if contract.chunk_size is None and not {"recurrent", "decode", "short_conv"} & set(caps.operations):
        found.append('a contract without chunk_size needs the operation "recurrent", "decode" or "short_conv"')
    if contract.chunk_size is not None and contract.chunk_size not in (16, 32, 64, 128):
        found.append(f"chunk_size must be 16, 32, 64, 128 or None; got {contract.chunk_size!r}")
    if contract.chunk_size is not None and "chunk" not in caps.operations:
        found.append('a contract with chunk_size needs the operation "chunk"')
    return found
