"""The golden vectors in the repository are what the code says, and a program with NumPy alone can use them."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file
from scripts import load_script
from typer.testing import CliRunner

from kimi_linear.cli.main import app
from kimi_linear.conformance.gold import envelopes_of, truth_of
from kimi_linear.conformance.problem import problem_of
from kimi_linear.conformance.schema import schema_of
from kimi_linear.conformance.vectors import CAPABILITIES, CONTRACTS, FRONTS, VECTORS, write_case

FOLDER = Path(__file__).parent.parent.parent / "vectors"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
ENTRIES = {entry["id"]: entry for entry in MANIFEST["cases"]}
LAST_DIGITS = 2.0**-44  # sums in fp64 in another order, on another processor
CASES = pytest.mark.parametrize("case", VECTORS, ids=lambda case: case.id)


@pytest.fixture
def reader():
    """read_with_numpy.py as a module."""
    return load_script(FOLDER / "read_with_numpy.py")


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


# They are what the code says


@CASES
def test_a_vector_written_again_is_the_one_in_the_repository(case, tmp_path):
    entry = write_case(tmp_path, case)
    assert {**entry, "sha256": ""} == {**ENTRIES[case.id], "sha256": ""}, "kimi-linear conformance vectors vectors"
    again, there = (load_file(folder / entry["file"]) for folder in (tmp_path, FOLDER))
    assert again.keys() == there.keys()
    for name, x in there.items():
        if name.startswith(("gold.", "stage.")):
            assert (again[name] - x).abs().max() <= LAST_DIGITS * x.abs().max(), name
        elif name.startswith("envelope."):
            torch.testing.assert_close(again[name], x, rtol=1e-3, atol=0)
        else:
            assert torch.equal(again[name], x), name


def test_the_manifest_has_every_case_its_form_and_the_sums_of_all_files():
    assert list(ENTRIES) == [case.id for case in VECTORS]
    assert not list(Draft202012Validator(schema_of("vectors")).iter_errors(MANIFEST))
    assert not Draft202012Validator(schema_of("vectors")).is_valid({**MANIFEST, "log_base": "2"})
    assert MANIFEST["limits"] == {"forward": 4.0, "backward": 8.0}
    lines = [line.split("  ") for line in (FOLDER / "SHA256SUMS").read_text().splitlines()]
    files = {name: sum for sum, name in lines}
    assert files.keys() == {"manifest.json", *(entry["file"] for entry in ENTRIES.values())}
    assert {file.name for file in FOLDER.glob("*.safetensors")} == files.keys() - {"manifest.json"}
    assert all(digest(FOLDER / name) == sum for name, sum in files.items())
    assert all(files[entry["file"]] == entry["sha256"] for entry in ENTRIES.values())
    assert sum((FOLDER / name).stat().st_size for name in files) < 500_000


def test_the_command_writes_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr("kimi_linear.conformance.vectors.VECTORS", VECTORS[1:3])
    said = CliRunner().invoke(app, ["conformance", "vectors", str(tmp_path / "new")])
    assert said.exit_code == 0, said.output
    names = {"manifest.json", "SHA256SUMS", "no_state.safetensors", "one_token.safetensors"}
    assert {file.name for file in (tmp_path / "new").iterdir()} == names
    written = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert not list(Draft202012Validator(schema_of("vectors")).iter_errors(written))
    assert {**written, "cases": []} == {**MANIFEST, "cases": []}


def test_the_envelopes_are_those_that_judge_a_kernel_of_each_precision():
    case = next(case for case in VECTORS if case.id == "softplus")
    there = load_file(FOLDER / "softplus.safetensors")
    problem = problem_of(case, CAPABILITIES, CONTRACTS["bf16"], front=FRONTS["softplus"])
    for name, exact in truth_of(problem).items():
        assert (there[f"gold.{name}"] - exact).abs().max() <= LAST_DIGITS * exact.abs().max()
        torch.testing.assert_close(
            there[f"envelope.bf16.{name}"], envelopes_of(problem)[name].float(), rtol=1e-3, atol=0
        )
        wide, narrow = (there[f"envelope.{contract}.{name}"].max() for contract in ("bf16", "fp32"))
        assert wide > 30 * narrow > 0


def test_they_cover_what_kernels_get_wrong():
    x = {id: load_file(FOLDER / entry["file"]) for id, entry in ENTRIES.items()}
    assert all(y["q"].dtype == y["k"].dtype == y["v"].dtype == torch.bfloat16 for y in x.values())
    assert all(y["q"].shape[1] % 2 == 1 for id, y in x.items())
    assert all(y["v"].shape[2] > y["q"].shape[2] and y["v"].shape[3] != y["q"].shape[3] for y in x.values())
    lengths = x["packed"]["cu_seqlens"].diff().tolist()
    assert 0 in lengths
    assert sum(lengths) < x["packed"]["q"].shape[1]
    assert x["packed"]["gold.final_state"][1].equal(x["packed"]["initial_state"][1].double())
    assert not x["packed"]["gold.o"][:, sum(lengths) :].any()
    assert not x["gate_zero"]["g"].any()
    assert {bool(hit) for hit in x["gate_minus_infinity"]["g"].isinf().flatten()} == {True, False}
    assert x["beta_two"]["beta"].eq(2).all()
    assert len(x["repeated_keys"]["k"].float().unique(dim=1)[0]) == 4
    assert "initial_state" not in x["no_state"]
    fronts = {id: entry["front"] and entry["front"]["gate"] for id, entry in ENTRIES.items()}
    assert {fronts["softplus"], fronts["bounded"]} == {"softplus", "bounded"}
    with_gradients = {id for id, y in x.items() if "gold.dg" in y}
    assert with_gradients == {"plain", "packed", "gate_half_strong", "softplus", "bounded"}


def test_the_stages_are_those_of_the_chunk_form(reader):
    """Stages 2 to 6 from their formulas, of the last value head, chunk after chunk."""
    x, C, head = reader.read(FOLDER / "plain.safetensors"), ENTRIES["plain"]["stage_chunk"], 1
    assert [id for id, entry in ENTRIES.items() if entry["stage_chunk"]] == ["plain"]
    S = x["initial_state"][0, head].astype(np.float64)
    for begin in range(0, x["q"].shape[1], C):
        rows = slice(begin, begin + C)
        q, k = (x[name][0, rows, 0].astype(np.float64) for name in ("q", "k"))
        v, g, beta = (x[name][0, rows, head].astype(np.float64) for name in ("v", "g", "beta"))
        G, A, Aqk, T, w, u, v_new = (
            x[f"stage.{name}"][0, rows, head] for name in ("G", "A", "Aqk", "T", "w", "u", "v_new")
        )
        n = len(k)
        A, Aqk, T = A[:, :n], Aqk[:, :n], T[:, :n]
        decays = np.exp(np.minimum(G[:, None] - G[None], 0.0))
        wanted = {
            "G": (G, np.cumsum(g, 0)),
            "A": (A, np.tril(beta[:, None] * np.einsum("id,jd,ijd->ij", k, k, decays), -1)),
            "Aqk": (Aqk, np.tril(ENTRIES["plain"]["scale"] * np.einsum("id,jd,ijd->ij", q, k, decays))),
            "T": (T @ (np.eye(n) + A), np.eye(n)),
            "w": (w, T @ (beta[:, None] * k * np.exp(G))),
            "u": (u, T @ (beta[:, None] * v)),
            "v_new": (v_new, u - w @ S),
        }
        for name, (got, formula) in wanted.items():
            assert np.abs(got - formula).max() < 1e-12, name
        o = ENTRIES["plain"]["scale"] * (q * np.exp(G)) @ S + Aqk @ v_new
        assert np.abs(o - x["gold.o"][0, rows, head]).max() < 1e-12
        S = np.exp(G[-1])[:, None] * S + (k * np.exp(G[-1] - G)).T @ v_new
    assert np.abs(S - x["gold.final_state"][0, head]).max() < 1e-12


# A program with NumPy alone can use them


def test_the_reader_needs_numpy_alone_and_its_kernel_is_right():
    code = f"""
import runpy, sys
sys.modules.update(torch=None, safetensors=None, kimi_linear=None)
runpy.run_path({str(FOLDER / "read_with_numpy.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["ok", case.id] for case in VECTORS]


@CASES
def test_the_reader_reads_what_safetensors_reads(case, reader):
    ours, theirs = reader.read(FOLDER / ENTRIES[case.id]["file"]), load_file(FOLDER / ENTRIES[case.id]["file"])
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        assert np.array_equal(ours[name], x.float().numpy() if x.dtype == torch.bfloat16 else x.numpy())


@CASES
def test_the_readers_kernel_in_fp64_gives_gold(case, reader):
    """Somebody else's code: NumPy, token by token."""
    x = reader.read(FOLDER / ENTRIES[case.id]["file"])
    wide = {name: y.astype(np.float64) if y.dtype == np.float32 else y for name, y in x.items()}
    for name, got in reader.kernel(wide, ENTRIES[case.id]).items():
        assert np.abs(got - x[f"gold.{name}"]).max() <= LAST_DIGITS * np.abs(x[f"gold.{name}"]).max()


def scaled(x, case, kernel):
    return {name: y * np.float32(1 + 1e-5) for name, y in kernel(x, case).items()}


def without_state(x, case, kernel):
    return kernel({name: y for name, y in x.items() if name != "initial_state"}, case)


def gate_in_log2(x, case, kernel):
    return kernel({**x, "g": x["g"] * np.float32(np.log(2))}, case)


def first_heads_gate(x, case, kernel):
    return kernel({**x, "g": np.broadcast_to(x["g"][:, :, :1], x["g"].shape)}, case)


def not_a_number(x, case, kernel):
    results = kernel(x, case)
    results["o"][0, -1] = np.nan
    return results


@pytest.mark.parametrize(
    ("bug", "seen"),
    [(scaled, 15), (without_state, 14), (gate_in_log2, 14), (first_heads_gate, 14), (not_a_number, 15)],
)
def test_the_readers_comparison_sees_a_wrong_kernel(bug, seen, reader, capsys):
    right = reader.kernel
    reader.kernel = lambda x, case: bug(x, case, right)
    assert reader.main() == 1
    assert capsys.readouterr().out.count("WRONG") == seen
