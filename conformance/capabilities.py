"""What a kernel promises: its precision, what it can do, and in which conventions it wants to be called.

Kernels of one operator differ in everything around it: log base, state layout, which activations are inside, how
a pool of states is indexed. The judge speaks each kernel's own convention, so all of that is declared here, and
what contradicts itself is refused before the first case.
"""

from __future__ import annotations

from dataclasses import dataclass

OPERATIONS = ("chunk", "recurrent", "decode", "backward", "short_conv")
RESULTS = ("o", "final_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")
PARAMETER_GRADIENTS = ("dA_log", "ddt_bias")  # of a gate inside, [HV] and [HV, K]
STAGES = ("G", "A", "Aqk", "T", "w", "u", "v_new")  # of ChunkStages, as [B, T, HV, *]
DECAY_FORMS = ("differences", "sums")
GATE_FORMS = ("softplus", "bounded")
BETA_FORMS = ("sigmoid", "double_sigmoid")
INDEX_DTYPES = ("int32", "int64")
REFUSALS = (
    *("shapes", "groups", "dtypes", "state", "positive_gate"),
    *("packed_batch", "packed_start", "packed_order", "packed_end", "slots", "slot_range"),
)


@dataclass(frozen=True)
class Contract:
    """The precision of one way to call the kernel; errors are judged against what it allows.

    io           q, k, v and o
    operand      operands of matrix products, and q and k after a normalisation inside
    accumulate   sums, elementwise arithmetic, the triangular inverse
    state        the state between chunks (between tokens where chunk_size is None)
    chunk_size   tokens a chunk; None computes token by token
    decay        "differences" of a cumulative gate, which lose digits after a strong gate, or "sums" of gates
    activation   results of gate and beta activations inside: "fp32", or "tf32" for approximations of 11 bits
    """

    io: str = "bf16"
    operand: str = "bf16"
    accumulate: str = "fp32"
    state: str = "fp32"
    chunk_size: int | None = 64
    decay: str = "differences"
    activation: str = "fp32"

    def __str__(self) -> str:
        form = "recurrent" if self.chunk_size is None else f"chunk {self.chunk_size}"
        return f"{form}, {self.io} in and out, {self.operand} operands, {self.state} state"


@dataclass(frozen=True)
class FrontForm:
    """A front end inside the kernel: what one kind of call does to raw projections. None leaves an input as it is.

    l2norm_eps    q and k over sqrt(sum(x^2) + eps): eps inside the root
    gate          "softplus": -exp(A_log) softplus(x + dt_bias);
                  "bounded": lower_bound sigmoid(exp(A_log) (x + dt_bias))
    beta          "sigmoid" of a logit, or twice that: "double_sigmoid"
    lower_bound   of the bounded gate, natural log
    """

    l2norm_eps: float | None = 1e-6
    gate: str | None = None
    beta: str | None = None
    lower_bound: float = -5.0

    def __str__(self) -> str:
        norm = () if self.l2norm_eps is None else (f"l2norm {self.l2norm_eps:g}",)
        gate = f"bounded gate {self.lower_bound:g}" if self.gate == "bounded" else self.gate and f"{self.gate} gate"
        return ", ".join([*norm, *(part for part in (gate, self.beta) if part)])


@dataclass(frozen=True)
class Pool:
    """How a decoding kernel keeps states: a pool [slots, HV, ..] in `Capabilities.state_layout`.

    dtypes      of the pool
    index       of slot_indices [N]: "int32" or "int64"
    nobody      indices that stand for padding, such as -1: nothing is read or written there. An index outside
                the pool belongs here too if the kernel takes it so. No sequence is ever given one of them
    zero_rows   output rows of padding are 0; False leaves them undefined
    in_place    the pool that is passed advances; False: `run` returns a new one as "state_pool"
    drafts      draft tokens that a step of 1 + drafts tokens can check. Then slot_indices is [N, 1 + drafts], a slot
                for the state after each token, and accepted [N] says after how many of the last step's tokens
                to go on; a step of one token has slot_indices [N] all the same
    """

    dtypes: tuple[str, ...] = ("fp32",)
    index: str = "int32"
    nobody: tuple[int, ...] = (-1,)
    zero_rows: bool = True
    in_place: bool = True
    drafts: int = 0


@dataclass(frozen=True)
class ShortConv:
    """How a kernel convolves in front of q, k and v: y_t = silu(sum_j weight[:, j] x_{t - W + 1 + j}).

    taps      numbers W of taps that it takes; the last one reads x_t
    layout    of states, which hold the last W - 1 inputs, oldest first, in x's dtype: "DW" for [N, D, W - 1], or "WD"
    packed    cu_seqlens
    update    a step of one token too: x [N, D], states in a pool that advances in place
    nobody    slot indices that stand for padding in it: nothing is read or written there
    """

    taps: tuple[int, ...] = (4,)
    layout: str = "DW"
    packed: bool = True
    update: bool = True
    nobody: tuple[int, ...] = (-1,)


@dataclass(frozen=True)
class Capabilities:
    """What a kernel can do. Conventions differ in the field, so the oracle speaks the kernel's own.

    operations      of OPERATIONS; "decode" needs `pool`, "short_conv" needs `short_conv`
    K, V            allowed channels (None: any); a case is fitted to the nearest allowed size
    square          K and V must be equal
    groups          HV may be a multiple of H
    free_scale      the scale may be other than K ** -0.5
    log_base        of the gate it takes: "e", or "2" for g / ln 2
    beta            "probability", or "logit" for a sigmoid inside
    beta_above_one  beta up to 2 (negative eigenvalues)
    lowest_gate     below which it takes no g (natural log); None: any. Cases with lower gates are skipped
    gate_dtype      of g and beta: "fp32", or "io" for that of q
    state_layout    "KV" or "VK", of initial and final state and of the pool
    state_dtype     of initial and final state
    arrays          what inputs are: "torch" tensors, or "numpy" arrays (see `arrays.py`; results may be either)
    packed          cu_seqlens
    packed_dtype    of cu_seqlens
    alignment       bytes that the address of every input has to be a multiple of
    overwrites      inputs that it may overwrite
    stages          intermediates that `run` can return, named as in ChunkStages, [B, T, HV, *]
    front_ends      front ends that it offers, one for each combination that a call can ask for
    plain           it can be called without one; False: every call goes through front_ends[0]
    front_backward  a declared backward goes through front ends too: gradients of what was given, A_log and dt_bias
                    included
    pool            how "decode" keeps states
    short_conv      how "short_conv" convolves
    refuses         bad input that raises an error which names the argument, of REFUSALS: "shapes" of k, v, g, beta;
                    "groups", heads of v that are no multiple of q's; "dtypes" of q and k that differ; rows of
                    "state"; "packed_batch", "packed_start", "packed_order", "packed_end" of cu_seqlens;
                    "slots", their number; "slot_range", an index outside the pool; "positive_gate"
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
    lowest_gate: float | None = None
    gate_dtype: str = "fp32"
    state_layout: str = "KV"
    state_dtype: str = "fp32"
    arrays: str = "torch"
    packed: bool = True
    packed_dtype: str = "int32"
    alignment: int = 1
    overwrites: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    front_ends: tuple[FrontForm, ...] = ()
    plain: bool = True
    front_backward: bool = True
    pool: Pool | None = None
    short_conv: ShortConv | None = None
    refuses: tuple[str, ...] = ()

    @property
    def whole_sequences(self) -> bool:
        """Whether it takes sequences, and not only decoding steps."""
        return "chunk" in self.operations or "recurrent" in self.operations

    @property
    def forced_front(self) -> FrontForm | None:
        """The front end of every call, where there is no call without one."""
        return None if self.plain or not self.front_ends else self.front_ends[0]
