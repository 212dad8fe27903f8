"""`kimi-linear verify`: true inputs, a table, JSON, and an exit code that means something."""

import contextlib
import json
import sys
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from kimi_linear.cli import devices, verify, verify_beside, verify_model, verify_suite
from kimi_linear.cli.activations import layer_inputs, shipped_text, short_conv
from kimi_linear.cli.main import app
from kimi_linear.cli.rows import Row, line
from kimi_linear.conformance.verdict import Verdict
from kimi_linear.reference.chunked import chunk_kda, chunk_kda_backward

SMALL_CASES = {"random, grouped heads", "integers, exact"}


@pytest.fixture
def small(monkeypatch):
    """Only the cases that take no time, and no model."""
    cases = [case for case in verify.verify_cases() if case.name in SMALL_CASES]
    assert len(cases) == len(SMALL_CASES)
    monkeypatch.setattr(verify, "verify_cases", lambda: cases)
    monkeypatch.setattr(verify, "logit_rows", lambda progress: iter(()))
    monkeypatch.setattr(verify, "LOGIT_TIERS", ())
    monkeypatch.setattr(verify, "suite_in_background", lambda: contextlib.nullcontext(lambda progress: iter(())))
    monkeypatch.setattr(verify, "TIERS_OF_CHECKS", {})
    return cases


def plant(monkeypatch, change):
    """Make one tier wrong: `change` edits its inputs."""

    def broken(q, k, v, g, beta, **options):
        return chunk_kda(*change(q, k, v, g, beta), **options)

    tier = verify.Tier("planted", broken, chunk_kda_backward, torch.float32)
    monkeypatch.setattr(verify, "tiers", lambda: [tier])


@pytest.mark.slow
def test_verify_passes_and_writes_the_same_table_as_json(tmp_path):
    result = CliRunner().invoke(app, ["verify", "--json", str(tmp_path / "report.json")])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    cases = {row["case"] for row in report["rows"]}
    assert report["ok"]
    suite = [row for row in report["rows"] if row["case"].startswith("suite")]
    assert {"suite, exact", "suite, relations", "suite, keys", "suite, gradients"} <= {row["case"] for row in suite}
    assert len(report["rows"]) - len(suite) == len(verify.verify_cases()) * len(verify.tiers()) + len(
        verify.LOGIT_TIERS
    )
    assert all(case in result.output for case in cases)
    assert {"text, softplus gate", "text, bounded gate", "repeated characters", "model, KDA layer 1"} <= cases
    assert report["versions"]["torch"] == torch.__version__
    for row in report["rows"]:
        assert row["error"] <= row["limit"]
        bits = ("integers, exact", "suite, exact", "suite, relations", "suite, refusals", "suite, decode")
        assert row["limit"] > 0 or row["case"] in bits or row["tier"] == "model, layer by layer"


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v, g, beta: (q, k, v, g, beta.bfloat16().float()),
        lambda q, k, v, g, beta: (q, k, v, g.roll(1, dims=1), beta),
        lambda q, k, v, g, beta: (q.flip(2), k, v, g, beta),
    ],
    ids=["beta kept in bf16", "gate of the token before", "query heads swapped"],
)
def test_a_wrong_tier_fails_with_exit_code_1(small, monkeypatch, change):
    plant(monkeypatch, change)
    result = CliRunner().invoke(app, ["verify"])
    assert result.exit_code == 1
    assert "NO" in result.output


def test_a_tier_that_gives_nan_fails(small, monkeypatch):
    plant(monkeypatch, lambda q, k, v, g, beta: (q * float("nan"), k, v, g, beta))
    rows = list(verify.verify_rows(lambda _: None))
    assert not any(row.ok for row in rows)
    assert all(row.error != row.error or row.error > row.limit for row in rows)


def test_a_json_file_in_a_missing_folder_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "verify_cases", lambda: pytest.fail("work was done"))
    result = CliRunner().invoke(app, ["verify", "--json", str(tmp_path / "missing" / "report.json")])
    assert result.exit_code == 2
    assert "existing folder" in result.output


def test_progress_is_reported_as_often_as_announced(small):
    heard = []
    rows = list(verify.verify_rows(heard.append))
    assert len(heard) == verify.steps()
    assert len(rows) == len(small) * len(verify.tiers())


def test_the_logits_of_the_model_and_of_transformers_are_judged_and_reported_once_a_row():
    heard = []
    rows = list(verify_model.logit_rows(heard.append))
    assert [row.tier for row in rows] == list(verify_model.LOGIT_TIERS)
    assert len(heard) == len(rows)
    assert all(row.ok and not row.skipped for row in rows)
    assert 0 < rows[0].error < rows[0].limit < 1e-4
    assert 0 < rows[2].error < rows[2].limit < 1e-4


def test_a_model_whose_gate_is_off_by_a_token_fails_its_row(monkeypatch):
    def late(q, k, v, g, beta, **options):
        return chunk_kda(q, k, v, g.roll(1, dims=1), beta, **options)

    right = verify_model.load_model

    def load(folder, dtype=torch.float32, **options):
        return right(folder, dtype=dtype, **options | ({"kda": late} if dtype == torch.float32 else {}))

    monkeypatch.setattr(verify_model, "load_model", load)
    row = next(verify_model.logit_rows(lambda _: None))
    assert not row.ok
    assert row.error > 100 * row.limit


def test_the_suite_runs_in_processes_beside_and_its_exit_code_follows(small, monkeypatch):
    few = {"wrong": ("relation",), "naive": ("exact",)}
    monkeypatch.setattr(verify_suite, "TIERS_OF_CHECKS", few)
    monkeypatch.setattr(verify, "TIERS_OF_CHECKS", few)
    monkeypatch.setattr(verify, "suite_in_background", verify_suite.suite_in_background)
    monkeypatch.setattr(verify, "verify_cases", lambda: [])
    heard = []
    *wrong, naive = verify.verify_rows(heard.append)
    held = {row.case: row.ok for row in wrong}
    assert not held["suite, relations"]  # its w depends on the gate it should not see
    assert (naive.case, naive.ok) == ("suite, exact", True)
    assert heard == ["conformance suite: wrong", "conformance suite: naive"]


def test_a_family_is_as_good_as_its_worst_check():
    verdicts = [
        Verdict("gate.slow", "ratio", "pass", ratios={"o": 1.0}, limit=4.0),
        Verdict("gate.bound", "ratio", "fail", ratios={"o": 9.0}, limit=4.0),
        Verdict("keys.runs", "ratio", "pass", ratios={"o": 2.0}, limit=4.0),
        Verdict("shape.K=60", "ratio", "skip", "not declared"),
        Verdict("relation.alone", "relation", "pass"),
    ]
    assert list(verify_suite.family_rows("chunked", verdicts)) == [
        Row("suite, gate", "chunked, 2 checks", 9.0, 4.0, ok=False),
        Row("suite, keys", "chunked, 1 check", 2.0, 4.0, ok=True),
        Row("suite, relations", "chunked, 1 check", 0.0, 0.0, ok=True),
    ]


def test_without_transformers_its_row_is_skipped_with_a_word(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    *_, row = verify_model.logit_rows(lambda _: None)
    assert row.ok
    assert row.skipped == "skipped: transformers is not installed"


def test_a_skipped_row_is_shown_and_not_counted(small, monkeypatch):
    skipped = verify.Row("model, logits", "transformers, fp32", 0.0, 0.0, ok=True, skipped="skipped: not here")
    monkeypatch.setattr(verify, "logit_rows", lambda progress: iter([skipped]))
    result = CliRunner().invoke(app, ["verify"])
    assert result.exit_code == 0
    assert "skipped: not here" in result.output
    count = len(small) * len(verify.tiers())
    assert f"{count} of {count} rows hold" in result.output


def test_the_cases_from_a_model_are_what_its_kda_layers_saw():
    cases = verify_model.model_cases()
    assert len(cases) == 3
    q, k, v, g, beta = cases[0].inputs
    assert q.shape == k.shape == v.shape == g.shape == (1, verify_model.TOKENS, 5, 16)
    assert beta.shape == (1, verify_model.TOKENS, 5)
    assert (g > 0).any()  # raw: the gate is the front end's
    assert cases[0].options["front_end"].gate is not None
    assert not torch.equal(cases[0].inputs[0], cases[1].inputs[0])


def test_layer_inputs_are_those_of_a_causal_layer_and_the_same_every_time():
    text = shipped_text()[:40]
    x, again, longer = layer_inputs(text), layer_inputs(text), layer_inputs(text + b"more")
    for a, b, c in zip(x[:5], again[:5], longer[:5], strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, c[:, :40], rtol=1e-5, atol=1e-6)
    assert x.q.shape == x.g.shape == (1, 40, 2, 128)
    _, _, g, beta = x.softplus(*(x[i] for i in (0, 1, 3, 4)))
    assert (g <= 0).all()
    assert 0 < beta.min() < beta.max() < 1


def test_short_conv_sees_four_tokens_and_none_ahead():
    x, weight = torch.zeros(1, 10, 1), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    x[0, 3] = 1
    before_silu = [4.0, 3.0, 2.0, 1.0]
    got = short_conv(x, weight)[0, :, 0]
    assert got[:3].tolist() == [0, 0, 0]
    assert torch.allclose(got[3:7], torch.nn.functional.silu(torch.tensor(before_silu)))
    assert not got[7:].any()


def test_the_text_repeats_characters_where_a_case_says_so():
    rule = shipped_text().split(b"\n\n")[3]
    assert b"0" * 40 in rule
    assert b"-" * 60 in rule


def test_tiers_differ_in_what_they_run():
    forwards = [(tier.forward.func, tier.forward.keywords["chunk_size"]) if isinstance(tier.forward, partial)
                else (tier.forward, None) for tier in verify.tiers()]  # fmt: skip
    assert len({(*forward, tier.dtype) for forward, tier in zip(forwards, verify.tiers(), strict=True)}) == 4


@pytest.mark.parametrize(("device", "message"), [("cuda", "where torch finds no GPU"), ("tpu", "one of cpu, cuda")])
def test_a_device_that_is_not_there_is_refused_before_any_work(device, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(verify, "verify_cases", lambda: pytest.fail("work was done"))
    result = CliRunner().invoke(app, ["verify", "--device", device])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_cuda_without_triton_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs triton, which is not installed"):
        devices.check_device("cuda")


@pytest.mark.parametrize("change", [0.0, 0.02], ids=["right", "2 % off"])
def test_half_precision_has_its_own_truth_and_limit(small, monkeypatch, change):
    def in_half(q, k, v, g, beta, **options):
        o, S = chunk_kda(q, k, v, g, beta, **options)
        return o * (1 + change), S

    tier = verify.Tier("half", in_half, chunk_kda_backward, torch.bfloat16)
    monkeypatch.setattr(verify, "device_tiers", lambda device: [tier] if device == "cuda" else [])
    monkeypatch.setattr(verify, "work_beside", lambda device: verify_beside.work_beside("cpu"))
    heard = []
    rows = [row for row in verify.verify_rows(heard.append, "cuda") if row.tier == "half"]
    assert len(heard) == verify.steps("cuda")
    assert len(rows) == len(small)
    assert all(row.ok for row in rows) == (change == 0)


def test_work_in_processes_beside_gives_the_rows_of_one_process(small, monkeypatch):
    alone = list(verify.verify_rows(lambda _: None))
    monkeypatch.setattr(verify, "work_beside", lambda device: verify_beside.processes(2))
    assert list(verify.verify_rows(lambda _: None)) == alone
    assert all(row.ok for row in alone)


def test_an_error_in_a_process_beside_is_raised_here():
    with verify_beside.processes(1) as submit:
        wait = submit(int, "no number")
        with pytest.raises(ValueError, match="no number"):
            wait()


def test_each_row_is_printed_before_the_next_is_computed(monkeypatch, capfd):
    printed = []

    def rows(progress, device):
        for number in range(3):
            printed.append(capfd.readouterr().out)
            yield Row(f"case {number}", "a tier", 0.5, 4.0, ok=True)

    monkeypatch.setattr("kimi_linear.cli.main.verify_rows", rows)
    with pytest.raises(SystemExit):
        app(["verify"])
    assert "case 0" in printed[1]
    assert "case 1" in printed[2]


def test_columns_are_wide_enough_for_every_name():
    names = [case.name for case in verify.verify_cases()]
    header = line("case", "tier", "error", "limit", "ok")
    for name in names:
        assert line(name, verify.LOGIT_TIERS[1], "1.0e-07", "1.0e-06", "yes").index("yes") == header.index("ok")


def test_the_suite_in_parts_has_every_check_once_and_in_order():
    whole = verify_suite.verdicts_of("naive", ("exact",))
    parts = [verify_suite.verdicts_of("naive", ("exact",), part, 3) for part in range(3)]
    assert [len(part) for part in parts] == [len(whole[part::3]) for part in range(3)]
    assert verify_suite.in_order(parts) == whole
