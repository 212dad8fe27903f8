"""`kimi-linear verify`: does every tier that this machine can run compute the same function?

Each case has inputs, the fp64 recurrence as truth, and the rounding envelope of those inputs as limit
(`kimi_linear.conformance.envelope`). Exact cases have the limit 0. The quick conformance suite runs beside them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..conformance import (
    GRADIENT_RATIO_LIMIT,
    RATIO_LIMIT,
    envelope,
    in_precision,
    rounded_runs,
)
from ..reference.chunked import chunk_kda, chunk_kda_backward
from ..reference.naive import recurrent_kda, recurrent_kda_backward
from .activations import layer_inputs, shipped_text
from .devices import device_tiers, half_truth, run_forward
from .rows import Row, Tier, VerifyCase, judge
from .verify_beside import Submit, work_beside
from .verify_model import LOGIT_TIERS, logit_rows, model_cases
from .verify_suite import TIERS_OF_CHECKS, suite_in_background

TOKENS = 200  # of the text: three chunks of 64 and a bit, in a quarter of a minute on two cores
SAMPLES = 4  # rounded runs an envelope; half of the tests', at real head sizes


def tiers() -> list[Tier]:
    """Every tier that runs here."""
    chunked = [
        Tier(
            f"chunked, C={C}, {name}",
            functools.partial(chunk_kda, chunk_size=C),
            functools.partial(chunk_kda_backward, chunk_size=C),
            dtype,
        )
        for C, name, dtype in (
            (64, "fp64", torch.float64),
            (64, "fp32", torch.float32),
            (16, "fp32", torch.float32),
        )
    ]
    return [Tier("naive, fp32", recurrent_kda, recurrent_kda_backward, torch.float32), *chunked]


def verify_cases() -> list[VerifyCase]:
    """Real activations, then what text seldom has: grouped heads, strong gates, integers; then a model's layers."""
    x = layer_inputs(shipped_text()[:TOKENS])
    rule = layer_inputs(shipped_text().split(b"\n\n")[3][:TOKENS])
    raw, repeated = _double(x[:5]), _double(rule[:5])
    softplus, bounded = {"front_end": x.softplus}, {"front_end": x.bounded}
    q, k, g, beta = x.softplus(raw[0], raw[1], raw[3], raw[4])
    packed = {"front_end": x.softplus, "cu_seqlens": torch.tensor([0, 50, 50, 51, 130]), **_state(4)}
    direct = _double((q[:, :128], k[:, :128], raw[2][:, :128], g[:, :128], beta[:, :128]))
    return [
        VerifyCase("text, softplus gate", raw, softplus),
        VerifyCase("text, bounded gate", raw, bounded),
        VerifyCase("repeated characters", repeated, softplus),
        VerifyCase("text, packed, with states", raw, packed),
        VerifyCase("text, gradients", direct, _state(1), gradients=True),
        VerifyCase("random, grouped heads", *_random_case()),
        VerifyCase("integers, exact", *_integer_case(), exact=True),
        *model_cases(),
    ]


def verify_rows(progress: Callable[[str], None], device: str = "cpu") -> Iterator[Row]:
    """Judge every case in every tier, a model's logits, then the suite; `progress` is told what comes next."""
    with suite_in_background() as suite_rows, work_beside(device) as submit:
        work = [CaseWork(case, device, submit) for case in verify_cases()]
        logits = None if device == "cpu" else submit(_all_logit_rows)
        for one in work:
            yield from _case_rows(one, progress)
        yield from logit_rows(progress) if logits is None else _told(logits(), progress)
        yield from suite_rows(progress)


def _all_logit_rows() -> list[Row]:
    return list(logit_rows(lambda line: None))


def _told(rows: list[Row], progress: Callable[[str], None]) -> Iterator[Row]:
    for row in rows:
        progress(f"{row.case}: {row.tier}")
        yield row


class CaseWork:
    """What one case costs, under way: its truth and limits, those in half precision, and the kernels' results."""

    def __init__(self, case: VerifyCase, device: str, submit: Submit) -> None:
        self.case = case
        self.on_device = [] if case.gradients else device_tiers(device)
        half = dict.fromkeys(tier.dtype for tier in self.on_device if tier.dtype.itemsize == 2)
        self.truth = submit(_truth, case)
        self.half = {dtype: submit(half_truth, case, dtype) for dtype in half}
        self.results = [submit(_run_device_tier, case, device, number) for number in range(len(self.on_device))]


def _case_rows(work: CaseWork, progress: Callable[[str], None]) -> Iterator[Row]:
    case = work.case
    progress(f"{case.name}: truth and limits")
    exact, bounds = work.truth()
    half = {}
    for tier in tiers():
        progress(f"{case.name}: {tier.name}")
        yield _judge(case, tier, run_tier(case, tier), exact, bounds)
    for tier, results in zip(work.on_device, work.results, strict=True):
        progress(f"{case.name}: {tier.name}")
        if tier.dtype in work.half and tier.dtype not in half:
            half[tier.dtype] = work.half[tier.dtype]()
        yield _judge(case, tier, results(), *half.get(tier.dtype, (exact, bounds)))


def _run_device_tier(case: VerifyCase, device: str, number: int) -> list[Tensor]:
    return run_tier(case, device_tiers(device)[number])


def steps(device: str = "cpu") -> int:
    """How often `verify_rows` reports progress."""
    forward = sum(not case.gradients for case in verify_cases())
    on_device = forward * len(device_tiers(device))
    return len(verify_cases()) * (1 + len(tiers())) + on_device + len(LOGIT_TIERS) + len(TIERS_OF_CHECKS)


def run_tier(case: VerifyCase, tier: Tier) -> list[Tensor]:
    """o and the final state, or the gradients, each as rows of channels."""
    if not case.gradients:
        return run_forward(case, tier.forward, tier.dtype)
    inputs = [y.to(tier.dtype) for y in case.inputs]
    options = case.options | {"initial_state": case.options["initial_state"].to(tier.dtype)}
    do, dht = (torch.ones_like(inputs[2]), torch.ones_like(options["initial_state"]))
    *grads, dbeta, dh0 = tier.backward(*inputs, do, dht, **options)
    return [*grads, dbeta[..., None], dh0]


def _truth(case: VerifyCase) -> tuple[list[Tensor], list[Tensor]]:
    """The fp64 recurrence, and fp32 envelopes from the roundings of the recurrence and of the chunk form."""
    naive = Tier("truth", recurrent_kda, recurrent_kda_backward, torch.float64)
    chunked = Tier("chunks", chunk_kda, chunk_kda_backward, torch.float64)
    exact = run_tier(case, naive)
    if case.exact:
        return exact, [torch.zeros_like(y[..., 0]) for y in exact]
    runs = [rounded_runs(functools.partial(run_tier, case, tier), samples=SAMPLES) for tier in (naive, chunked)]
    bounds = [envelope(y, a + b) for y, a, b in zip(exact, *runs, strict=True)]
    return exact, bounds


def _judge(case: VerifyCase, tier: Tier, results: list[Tensor], exact: list[Tensor], bounds: list[Tensor]) -> Row:
    factor = GRADIENT_RATIO_LIMIT if case.gradients else RATIO_LIMIT
    judged_in = torch.float32 if tier.dtype.itemsize == 2 else tier.dtype  # half precision's bounds are its own
    limits = [factor * in_precision(bound, torch.float32, judged_in) for bound in bounds]
    return judge(case.name, tier.name, zip(results, exact, limits, strict=True))


def _double(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(y.float().double() for y in tensors)


def _state(N: int) -> dict[str, Tensor]:
    x = layer_inputs(b"state")
    shape = (N, x.v.shape[2], x.q.shape[3], x.v.shape[3])
    return {"initial_state": torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()}


def _random_case() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Two value heads a key head, K and V odd and unequal, gates from mild to minus infinity by channel."""
    rng = torch.Generator().manual_seed(2)
    B, T, H, HV, K, V = 2, 100, 2, 4, 28, 20

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    q, k = (torch.nn.functional.normalize(normal(B, T, H, K), dim=-1) for _ in range(2))
    strength = torch.tensor([1e-3, 0.1, 1.0, 30.0, 1e3, torch.inf]).repeat(5)[:K]
    g = -strength * normal(B, T, HV, K).abs().clamp(min=1e-3)
    beta = 2 * torch.rand(B, T, HV, generator=rng)
    h0 = normal(B, HV, K, V).double()
    return _double((q, k, normal(B, T, HV, V), g, beta)), {"initial_state": h0}


def _integer_case() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """One-hot keys, beta in {0, 1}, g in {0, -1e4}: every intermediate is a small integer, in any precision."""
    rng = torch.Generator().manual_seed(3)
    B, T, H, K, V = 2, 150, 2, 8, 5

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=rng)

    k = torch.nn.functional.one_hot(integers(0, K - 1, B, T, H), K) * (2 * integers(0, 1, B, T, H, 1) - 1)
    g = torch.where(integers(0, 19, B, T, H, K) == 0, -1e4, 0.0)
    inputs = (integers(-2, 2, B, T, H, K), k, integers(-3, 3, B, T, H, V), g, integers(0, 1, B, T, H))
    return _double(inputs), {"initial_state": integers(-3, 3, B, H, K, V).double(), "scale": 0.5}
