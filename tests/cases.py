"""Inputs to draw from: hypothesis turns knobs (lengths, gates, keys, write strengths), a seed does the rest."""

from dataclasses import dataclass
from math import inf

import torch
from hypothesis import strategies as st
from torch import Tensor

GATES = ("zero", "slow", "typical", "minus5", "minus30", "minus1000", "minus_inf", "mixed", "resets")
KEYS = ("random", "repeated", "cosine_0.9", "cosine_0.99", "one_hot", "sign_flipped", "zero")
BETAS = ("zero", "one", "two", "half_open", "up_to_two", "choice")
PRIMES = (2, 3, 5, 7, 13, 31, 61, 89, 131)


@dataclass(frozen=True)
class Case:
    """The knobs of one call. `lengths` are packed segments (then B = 1), or None for a batch."""

    B: int
    T: int
    H: int
    group: int
    K: int
    V: int
    lengths: tuple[int, ...] | None
    gate: str
    keys: str
    beta: str
    state: bool
    chunk_size: int
    seed: int

    @property
    def N(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)


@dataclass(frozen=True)
class Inputs:
    """Operator inputs in fp64."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    h0: Tensor | None
    cu_seqlens: Tensor | None

    def to(self, dtype: torch.dtype) -> "Inputs":
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        tensors = (x.to(dtype) for x in (self.q, self.k, self.v, self.g, self.beta))
        h0 = None if self.h0 is None else self.h0.to(state_dtype)
        return Inputs(*tensors, h0, self.cu_seqlens)

    def call(self, op, **options):
        """op's (o, final_state) on these inputs."""
        return op(
            *self.args,
            initial_state=self.h0,
            output_final_state=True,
            cu_seqlens=self.cu_seqlens,
            **options,
        )

    @property
    def args(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.g, self.beta


@st.composite
def cases(draw, max_T: int = 140, **fixed) -> Case:
    chunk_size = draw(st.sampled_from((16, 32, 64, 128)))
    edges = [chunk_size * n + off for n in (1, 2) for off in (-1, 0, 1) if chunk_size * n + off <= max_T]
    length = st.one_of(st.sampled_from([0, 1, *edges, *(p for p in PRIMES if p <= max_T)]), st.integers(0, max_T))
    lengths = draw(st.one_of(st.none(), st.lists(length, min_size=1, max_size=5).map(tuple)))
    knobs = {
        "B": draw(st.integers(1, 3)) if lengths is None else 1,
        "T": draw(length) if lengths is None else sum(lengths) + draw(st.sampled_from((0, 3))),
        "H": draw(st.integers(1, 3)),
        "group": draw(st.sampled_from((1, 2, 4))),
        "K": draw(st.sampled_from((1, 4, 12, 17))),
        "V": draw(st.sampled_from((1, 5, 8, 20))),
        "lengths": lengths,
        "gate": draw(st.sampled_from(GATES)),
        "keys": draw(st.sampled_from(KEYS)),
        "beta": draw(st.sampled_from(BETAS)),
        "state": draw(st.booleans()),
        "chunk_size": chunk_size,
        "seed": draw(st.integers(0, 2**32 - 1)),
    }
    return Case(**{**knobs, **fixed})


def draw_inputs(case: Case) -> Inputs:
    """The tensors of a case: fp32 values held in fp64, so that a cast to fp32 changes nothing."""
    rng = torch.Generator().manual_seed(case.seed)
    B, T, HV = case.B, case.T, case.H * case.group
    q = unit(normal(rng, B, T, case.H, case.K))
    v = normal(rng, B, T, HV, case.V)
    h0 = normal(rng, case.N, HV, case.K, case.V) if case.state else None
    return Inputs(
        q=fp32(q),
        k=fp32(draw_keys(case.keys, rng, (B, T, case.H, case.K))),
        v=fp32(v),
        g=fp32(draw_gate(case.gate, rng, (B, T, HV, case.K))),
        beta=fp32(draw_beta(case.beta, rng, (B, T, HV))),
        h0=None if h0 is None else fp32(h0),
        cu_seqlens=None if case.lengths is None else offsets(case.lengths),
    )


def draw_gate(kind: str, rng: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    typical = torch.nn.functional.logsigmoid(normal(rng, *shape))
    constant = {"zero": 0.0, "slow": -1e-3, "minus5": -5.0, "minus30": -30.0, "minus1000": -1e3, "minus_inf": -inf}
    if kind in constant:
        return torch.full(shape, constant[kind], dtype=torch.float64)
    if kind == "typical":
        return typical
    if kind == "mixed":  # every channel its own kind
        levels = torch.tensor([*constant.values()], dtype=torch.float64)
        pick = torch.randint(len(levels) + 1, shape[-1:], generator=rng).expand(shape)
        return torch.where(pick < len(levels), levels[pick.clamp(max=len(levels) - 1)], typical)
    reset = torch.rand(shape[:2], generator=rng) < 0.1  # "resets": now and then everything is forgotten
    return torch.where(reset[..., None, None], torch.full_like(typical, -inf), typical / 10)


def draw_keys(kind: str, rng: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    B, T, H, K = shape
    k = unit(normal(rng, *shape))
    if kind == "random":
        return k
    if kind == "zero":
        return torch.zeros_like(k)
    if kind == "one_hot":
        return torch.nn.functional.one_hot(torch.randint(K, (B, T, H), generator=rng), K).double()
    if kind == "repeated":  # runs of eight equal tokens
        return k[:, torch.arange(T) // 8]
    common = unit(normal(rng, B, 1, H, K))
    if kind == "sign_flipped":
        sign = torch.randint(2, (B, T, H, 1), generator=rng) * 2 - 1
        return common * sign
    cosine = float(kind.removeprefix("cosine_"))
    return unit(cosine * common + (1 - cosine**2) ** 0.5 * k)


def draw_beta(kind: str, rng: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    constant = {"zero": 0.0, "one": 1.0, "two": 2.0}
    uniform = torch.rand(shape, dtype=torch.float64, generator=rng)
    if kind in constant:
        return torch.full(shape, constant[kind], dtype=torch.float64)
    if kind == "choice":
        return torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)[(uniform * 4).long()]
    return uniform if kind == "half_open" else 2 * uniform


def offsets(lengths: tuple[int, ...], dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def normal(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=rng)


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def fp32(x: Tensor) -> Tensor:
    return x.float().double()
