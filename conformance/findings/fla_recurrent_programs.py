"""fla 0.6.0: the two programs that `fused_recurrent_kda` is, with an initial state and without, compiled for Hopper.

    python fla_recurrent_programs.py        anywhere, without TRITON_INTERPRET; a GPU is not needed to compile

A sum over channels is taken inside a thread first, then between lanes of a warp by shuffles. How the state lies in
registers decides which: where it is loaded, as a load of 16 bytes wants it, and otherwise as Triton sees fit. So the
sums are in another order, and the last bits differ, as fla_recurrent_no_state.py shows on a GPU. With a state,
triton 3.9.0 adds lanes that are 16 and 8 apart, and triton 3.6.0 those that are 2 and 1 apart too; without one, both
add lanes that are 2 and 1 apart.
"""

import os
import re
import warnings

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla warns where it finds no GPU
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd_kernel as kernel
except ImportError as error:
    install = "pip install fla-core==0.6.0 flash-linear-attention==0.6.0"
    raise SystemExit(f"this needs fla 0.6.0, and `{error}`: {install}") from None

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
H, K, V = 4, 12, 12
SIZES = {
    "H": H,
    "HV": H,
    "K": K,
    "V": V,
    "BK": 16,
    "BV": 32,
    "scale": 0.25,
    "num_stages": 3,
    "STORE_FINAL_STATE": True,
}
NOT_GIVEN = ("A_log", "dt_bias", "cu_seqlens", "ssm_state_indices", "num_accepted_tokens", "lower_bound")
if os.environ.get("TRITON_INTERPRET") == "1":
    raise SystemExit("interpreted kernels are not compiled: unset TRITON_INTERPRET")
while not isinstance(kernel, triton.runtime.JITFunction):
    kernel = kernel.fn


def lanes(initial_state: bool) -> list[str]:
    """How far apart the lanes are that a program adds up, in the order of its shuffles."""
    absent = NOT_GIVEN if initial_state else (*NOT_GIVEN, "h0")
    values = SIZES | {"USE_INITIAL_STATE": initial_state}
    constants = {p.name: values.get(p.name, False) for p in kernel.params if p.is_constexpr} | dict.fromkeys(absent)
    kinds = {name: "i64" if name in "NT" else "*fp32" for name in kernel.arg_names if name not in constants}
    at = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    aligned = {at[name]: [["tt.divisibility", 16]] for name, kind in kinds.items() if kind == "*fp32"}
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {at[name]: value for name, value in constants.items()}, aligned)
    ptx = triton.compile(source, target=HOPPER, options={"num_warps": 4}).asm["ptx"]
    return re.findall(r"shfl\.sync\.bfly\.b32\s+\S+ \S+ (\d+),", ptx)


for initial_state in (False, True):
    found = lanes(initial_state)
    print(
        f"initial state: {initial_state}; {len(found)} shuffles, between lanes {' '.join(dict.fromkeys(found))} apart"
    )
