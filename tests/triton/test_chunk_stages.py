"""What each kernel of `chunk_kda` leaves for the next equals the reference's stage of the same name."""

import dataclasses
import math

import pytest
import torch
from triton_inputs import DEVICE

from cases import Case, draw_inputs
from judge import assert_within_envelope, bounds_of
from kimi_linear.reference import FrontEnd
from kimi_linear.reference.chunked.forward import chunk_stages
from kimi_linear.triton_kernels import chunk_launch
from kimi_linear.triton_kernels.chunk_table import CHUNK, TILE

CASE = Case(1, 100, 1, 2, 20, 12, None, "typical", "cosine_0.9", "half_open", True, CHUNK, 5)
CASES = {
    "narrow, typical gate": CASE,
    "narrow, strong gate": dataclasses.replace(CASE, gate="minus30"),
    "wide": dataclasses.replace(CASE, V=40),
}


def run_kernels(x, front_end=None, scale=None):
    """The workspace, cut to the channels that there are, o and the final state."""
    tensors = dict.fromkeys(chunk_launch.INPUTS)
    tensors |= dict(zip(("q", "k", "v", "g", "beta"), (y.to(DEVICE) for y in x.args), strict=True))
    tensors |= {"initial_state": x.h0.to(DEVICE)}
    K, V = x.k.shape[-1], x.v.shape[-1]
    call = chunk_launch.prepare(tensors, chunk_launch.options_of(front_end, scale or K**-0.5, True))
    wide = V > 32
    if not wide:  # in fp32 never chosen
        call = call._replace(plan=call.plan._replace(wide=False))
    memory = torch.full((call.layout.size,), 255, dtype=torch.uint8, device=DEVICE)  # NaN, all of it
    ws = call.layout.cut(memory)
    o, final = torch.full_like(tensors["v"], torch.nan), torch.full_like(tensors["initial_state"], torch.nan)
    for launch in chunk_launch.chunk_launches(tensors | {"o": o, "final_state": final}, ws, call):
        launch.run()
    u = ws.u.unflatten(2, (call.plan.VP, CHUNK)).mT if wide else ws.u.unflatten(2, (CHUNK, call.plan.VP))
    channels = dict.fromkeys(("k_start", "k_end", "q_start", "kg", "wq", "tile_decay", "chunk_decay"), K)
    cut = {name: y[..., : channels.get(name)].cpu() for name, y in ws._asdict().items()}
    return cut | {"u": u[..., :V].cpu(), "o": o.cpu(), "final_state": final.cpu()}


def in_tiles(x):
    return x.unflatten(2, (CHUNK // TILE, TILE))


def diagonal_blocks(M):
    """[N, HV, C, C] -> [N, HV, C, 16]."""
    blocks = M.unflatten(2, (CHUNK // TILE, TILE)).unflatten(4, (CHUNK // TILE, TILE))
    return blocks.diagonal(dim1=2, dim2=4).movedim(-1, 2).flatten(2, 3)


def expected(x):
    """The same intermediates out of the reference's stages, chunk by chunk."""
    y = chunk_stages(*x.args, initial_state=x.h0, chunk_size=CHUNK)
    q, k, g = (z.transpose(0, 1) for z in (y.inputs.q, y.inputs.k, y.inputs.g))
    G, T, Aqk, w, u = (y.by_chunk(name) for name in ("G", "T", "Aqk", "w", "u"))
    since = in_tiles(g).cumsum(3)
    whole = since[:, :, :, -1:]
    start, end = since.exp().flatten(2, 3), (whole - since).exp().flatten(2, 3)
    return {
        "k_start": k * start,
        "k_end": k * end,
        "q_start": q * start,
        "tile_decay": whole.squeeze(3).exp(),
        "T_tile": diagonal_blocks(T),
        "Aqk_tile": diagonal_blocks(Aqk),
        "w": w,
        "qg": q * G.exp(),
        "u": u,
        "Aqk": Aqk,
        "kg": k * (G[:, :, -1:] - G).exp(),
        "chunk_decay": G[:, :, -1].exp(),
        "o": y.by_token("o"),
        "final_state": y.final_state,
    }


def left_by_kernels(x):
    got = run_kernels(x)
    got["w"], got["qg"] = got["wq"].chunk(2, dim=2)
    return got


def through_log2(x):
    """The gate to log2 units and back: where it rounds, a kernel that works in log2 units does too."""
    log2e = torch.tensor(math.log2(math.e), dtype=x.g.dtype)
    return dataclasses.replace(x, g=x.g * log2e / log2e)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def stages(request):
    x = draw_inputs(request.param)
    exact = expected(x)
    bounds = bounds_of(list(exact.values()), lambda: list(expected(through_log2(x)).values()))
    return left_by_kernels(x.to(torch.float32)), exact, dict(zip(exact, bounds, strict=True))


@pytest.mark.parametrize("names", [
    ("k_start", "k_end", "q_start", "tile_decay"),
    ("T_tile", "Aqk_tile"),
    ("w", "qg", "u", "Aqk"),
    ("kg", "chunk_decay"),
    ("o", "final_state"),
], ids=" ".join)  # fmt: skip
def test_a_stage_is_that_of_the_reference(stages, names):
    got, exact, bounds = stages
    for name in names:
        assert_within_envelope([got[name]], [exact[name]], [bounds[name]])
        # 64 tokens of a strong gate leave a whole chunk's decay at 0, in fp64 too
        assert exact[name].abs().max() > 0 or name == "chunk_decay", f"{name}: all 0 proves nothing"


def test_the_judge_sees_a_tile_whose_decay_starts_a_token_late(stages):
    got, exact, bounds = stages
    with pytest.raises(AssertionError, match="ratio"):
        assert_within_envelope([got["k_end"].roll(1, dims=2)], [exact["k_end"]], [bounds["k_end"]])


def test_keys_and_queries_leave_the_tiles_normalised():
    x = draw_inputs(CASE)
    x = dataclasses.replace(x, q=3 * x.q, k=5 * x.k, g=torch.zeros_like(x.g))  # no decay: what is left is the norm
    got = run_kernels(x.to(torch.float32), FrontEnd(gate=None, beta=None), scale=0.5)
    eps = torch.finfo(torch.float32).eps
    for name, exact, scale in (("q_start", x.q, 0.5), ("k_start", x.k, 1.0), ("k_end", x.k, 1.0)):
        rows = got[name][:, 0].flatten(0, 1)[: CASE.T]
        exact = scale * exact[0, :, 0] / exact[0, :, 0].norm(dim=-1, keepdim=True)
        assert ((rows / exact - 1).abs() <= 4 * eps + 1e-6 / 9).all(), "1e-6 under the root moves it by its share"
    assert torch.equal(got["strength"][:, 0].flatten()[: CASE.T], x.beta[0, :, 0].float())
