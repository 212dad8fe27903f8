"""Read the vectors with NumPy alone, run a kernel, compare: all that a port in another language has to do.

    python vectors/read_with_numpy.py

The kernel here is the recurrence, token by token in fp32; put yours in its place. It is right when no row of its
output and of its final state is further from the exact one than the limit times the allowed error of that row.
"""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent
CONTRACT = "recurrent"  # the precision that the kernel declares, of manifest.json's contracts
DTYPES = {"F64": "<f8", "F32": "<f4", "BF16": "<u2", "I32": "<i4"}


def read(file):
    """Tensors by name: 8 bytes with the length of a JSON header, the header, the numbers row by row."""
    data = Path(file).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, about in json.loads(data[8:begin]).items():
        start, end = about["data_offsets"]
        x = np.frombuffer(data[begin + start : begin + end], DTYPES[about["dtype"]])
        if about["dtype"] == "BF16":
            x = (x.astype("<u4") << 16).view("<f4")  # the upper half of an fp32
        tensors[name] = x.reshape(about["shape"])
    return tensors


def front_end(q, k, g, beta, x, front):
    """What turns raw projections into the recurrence's inputs; nothing where they are not raw."""
    if front is None:
        return q, k, g, beta
    if front["l2norm_eps"] is not None:
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + front["l2norm_eps"]) for y in (q, k))
    if front["gate"] is not None:
        y, rate = g + x["dt_bias"], np.exp(x["A_log"])[:, None]
        bounded = front["lower_bound"] / (1 + np.exp(-rate * y))
        g = bounded if front["gate"] == "bounded" else -rate * np.logaddexp(0, y)
    if front["beta"] is not None:
        beta = (2 if front["beta"] == "double_sigmoid" else 1) / (1 + np.exp(-beta))
    return q, k, g.astype(q.dtype), beta.astype(q.dtype)


def kernel(x, case):
    """o and the final states of the recurrence in fp32."""
    q, k, g, beta = front_end(x["q"], x["k"], x["g"], x["beta"], x, case["front"])
    v, o = x["v"], np.zeros_like(x["v"])
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    offsets = case["cu_seqlens"]
    rows = [(b, 0, T) for b in range(B)] if offsets is None else [(0, *ends) for ends in pairwise(offsets)]
    states = x.get("initial_state", np.zeros((len(rows), HV, K, V), v.dtype)).copy()
    for n, (b, begin, end) in enumerate(rows):
        for head in range(HV):
            S, key_head = states[n, head], head // (HV // H)  # a view: what is written to S is in states
            for t in range(begin, end):
                S *= np.exp(g[b, t, head])[:, None]
                u = beta[b, t, head] * (v[b, t, head] - k[b, t, key_head] @ S)
                S += np.outer(k[b, t, key_head], u)
                o[b, t, head] = case["scale"] * (q[b, t, key_head] @ S)
    return {"o": o, "final_state": states}


def worst_ratio(got, x, name):
    """Of all rows: the root mean square of the error over what is allowed. 0 where the two are equal."""
    error = np.sqrt(np.square(got - x[f"gold.{name}"]).mean(-1))
    allowed = x[f"envelope.{CONTRACT}.{name}"]
    return np.divide(error, allowed, out=np.where(error == 0, 0.0, np.inf), where=allowed > 0).max()


def main():
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    limit, wrong = manifest["limits"]["forward"], 0
    for case in manifest["cases"]:
        x = read(FOLDER / case["file"])
        ratios = {name: worst_ratio(got, x, name) for name, got in kernel(x, case).items()}
        right = all(ratio <= limit for ratio in ratios.values())  # NaN is no ratio below a limit
        wrong += not right
        told = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        print(f"{'ok' if right else 'WRONG':6} {case['id']:20} {told}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
