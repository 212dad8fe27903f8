"""The suite by way of files: what a kernel wrote is judged as if it had been called."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kimi_linear.cli.main import app
from kimi_linear.conformance.adapter import BadAdapterError, Call, Contract
from kimi_linear.conformance.by_file import DEPENDS
from kimi_linear.conformance.catalogue import by_id
from kimi_linear.conformance.exchange import capabilities_in, export, judge
from kimi_linear.conformance.gold import envelopes_of, truth_of
from kimi_linear.conformance.plain import from_plain
from kimi_linear.conformance.problem import problems_of
from kimi_linear.conformance.suite import run_suite
from strange_kernels import CONTRACT, Correct, WrongFromToken40

IDS = (
    "exact.dense", "relation.causality", "relation.rerun", "relation.strides", "relation.dirty_memory",
    "limit.split", "limit.decay_only", "gate.slow", "keys.cosine_0.9", "shape.T=0", "probe.bits", "gradients.packed",
)  # fmt: skip


def answer(folder, kernel):
    """What an author's program does: read each input, run, write the output."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for entry in manifest["calls"]:
        inputs = load_file(folder / entry["folder"] / "in.safetensors")
        options = {"scale": entry["scale"], "operation": entry["operation"]}
        call = Call(**inputs, **options, contract=from_plain(Contract, entry["contract"]))
        results = kernel.run(call, frozenset(entry["outputs"]))
        for name, said in entry["outputs"].items():
            assert list(results[name].shape) == said["shape"]
            assert str(results[name].dtype) == f"torch.{said['dtype']}"
        results = {name: x.contiguous().clone() for name, x in results.items() if name in entry["outputs"]}
        save_file(results, folder / entry["folder"] / "out.safetensors")
    return manifest


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchange") / "calls"
    done = export(folder, Correct().capabilities(), only=IDS)
    assert done.skipped.keys() == {"relation.strides", "relation.dirty_memory"}
    return folder


def statuses(report):
    return {verdict.id: verdict.status for verdict in report.verdicts}


def test_a_kernel_by_file_gets_the_verdicts_of_a_call(exported):
    answer(exported, Correct())
    report = judge(exported, "mine")
    assert report.ok
    skipped = {verdict.id: verdict.reason for verdict in report.verdicts if verdict.status == "skip"}
    assert skipped == {
        "relation.strides": "strides do not travel by file",
        "relation.dirty_memory": "new memory is filled in this process alone",
        "limit.split": DEPENDS,
    }
    called = {verdict.id: verdict for verdict in run_suite(Correct(), only=IDS).verdicts}
    assert all(verdict == called[verdict.id] for verdict in report.verdicts if verdict.status == "pass")


def test_wrong_kernels_fail_by_file_relations_and_reruns_too(exported):
    class Races(WrongFromToken40):
        runs = 0

        def run(self, call, want):
            self.runs += 1
            return {name: x + 1e-3 * (self.runs % 3 == 0) for name, x in super().run(call, want).items()}

    answer(exported, Races())
    report = judge(exported, "mine", {"gate.slow": "known"})
    found = statuses(report)
    assert {found[id] for id in ("exact.dense", "relation.causality", "relation.rerun")} == {"fail"}
    assert found["gate.slow"] in ("waived", "fail")
    (exact,) = (verdict for verdict in report.verdicts if verdict.id == "exact.dense")
    assert exact.place is not None


def test_missing_truncated_and_misnamed_outputs_fail_with_the_reason(exported):
    manifest = answer(exported, Correct())
    outputs = {
        entry["checks"][0]: exported / entry["folder"] / "out.safetensors"
        for entry in reversed(manifest["calls"])
    }  # fmt: skip
    outputs["gate.slow"].unlink()
    outputs["keys.cosine_0.9"].write_bytes(outputs["keys.cosine_0.9"].read_bytes()[:-9])
    save_file({"out": torch.zeros(2)}, outputs["exact.dense"])
    save_file({"o": torch.zeros(2), "final_state": torch.zeros(2)}, outputs["limit.decay_only"])
    reasons = {verdict.id: verdict.reason for verdict in judge(exported, "mine").verdicts if verdict.failed}
    assert reasons["gate.slow"] == "gate.slow.1/out.safetensors is missing"
    assert "keys.cosine_0.9.1/out.safetensors cannot be read" in reasons["keys.cosine_0.9"]
    assert "has no tensor 'final_state'; it has out" in reasons["exact.dense"]
    assert reasons["limit.decay_only"].startswith("final_state must be")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("no json", "Expecting value"),
        ('{"colour": 1}', "capabilities.colour must be one of"),
        ('{"contracts": [{"io": "fp8"}]}', "io must be one of"),
        ('{"packed": "yes"}', "capabilities.packed must be of type bool"),
    ],
)
def test_capabilities_in_a_file_are_checked_by_name(tmp_path, content, message):
    (tmp_path / "caps.json").write_text(content)
    with pytest.raises(BadAdapterError, match=message):
        capabilities_in(tmp_path / "caps.json")


def test_an_export_is_the_same_every_time(exported, tmp_path):
    export(tmp_path / "again", Correct().capabilities(), only=IDS)
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (exported, tmp_path / "again")]
    assert manifests[0] == manifests[1]
    assert len({entry["sha256"] for entry in manifests[0]["calls"]}) > 10


def test_the_commands_have_the_exit_codes_of_run(tmp_path):
    def command(*arguments):
        return CliRunner().invoke(app, ["conformance", *map(str, arguments)])

    (tmp_path / "caps.json").write_text(json.dumps({"contracts": [{"chunk_size": CONTRACT.chunk_size}]}))
    folder = tmp_path / "calls"
    said = command("export", folder, "--capabilities", tmp_path / "caps.json", "--only", "gate.slow")
    assert said.exit_code == 0, said.output
    assert "1 calls" in said.output
    unnamed = command("judge", folder)
    assert unnamed.exit_code == 2
    assert "say what ran" in unnamed.stderr
    answer(folder, Correct())
    (folder / "identity.txt").write_text("a build of today\n")  # files that come later are nobody's concern
    passed = command("judge", folder, "--json", tmp_path / "report.json")
    assert passed.exit_code == 0, passed.output
    assert "a build of today" in passed.output
    assert json.loads((tmp_path / "report.json").read_text())["ok"]
    (folder / "gate.slow.1" / "out.safetensors").unlink()
    failed = command("judge", folder)
    assert failed.exit_code == 1
    assert "gate.slow.1/out.safetensors is missing" in failed.output


def test_what_is_no_export_or_was_changed_is_an_error(tmp_path, monkeypatch):
    exported = tmp_path / "calls"
    export(exported, Correct().capabilities(), only=["gate.slow"])
    with pytest.raises(BadAdapterError, match="is not empty"):
        export(exported, Correct().capabilities())
    with pytest.raises(BadAdapterError, match=r"manifest.json cannot be read"):
        judge(tmp_path, "mine")
    (tmp_path / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(BadAdapterError, match="is no manifest of the format"):
        judge(tmp_path, "mine")
    with monkeypatch.context() as patch:
        patch.setattr("kimi_linear.conformance.exchange.suite_version", lambda: "another")
        with pytest.raises(BadAdapterError, match="was exported by"):
            judge(exported, "mine")
    file = exported / "gate.slow.1" / "in.safetensors"
    inputs, before = load_file(file), file.read_bytes()
    save_file({**inputs, "beta": 2 * inputs["beta"]}, file)
    with pytest.raises(BadAdapterError, match="is not what was exported"):
        judge(exported, "mine")
    file.unlink()
    with pytest.raises(BadAdapterError, match=r"in.safetensors is not what was exported"):
        judge(exported, "mine")
    file.write_bytes(before)
    manifest = json.loads((exported / "manifest.json").read_text())
    manifest["calls"] = [entry for entry in manifest["calls"] if "gate.slow" not in entry["checks"]]
    (exported / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BadAdapterError, match=r"manifest.json is not what was exported"):
        judge(exported, "mine")
    digest = hashlib.sha256((exported / "manifest.json").read_bytes()).hexdigest()
    (exported / "SHA256SUMS").write_text(f"{digest}  manifest.json\n")
    with pytest.raises(BadAdapterError, match=r"has not the calls of gate.slow"):
        judge(exported, "mine")
    for sums in ("", f"{digest} manifest.json\n"):
        (exported / "SHA256SUMS").write_text(sums)
        with pytest.raises(BadAdapterError, match=r"is not what was exported"):
            judge(exported, "mine")
    (exported / "SHA256SUMS").unlink()
    with pytest.raises(BadAdapterError, match=r"SHA256SUMS cannot be read"):
        judge(exported, "mine")


def test_the_sums_of_an_export_are_those_of_sha256sum(exported):
    lines = (exported / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    manifest = json.loads((exported / "manifest.json").read_text())
    assert listed.keys() == {"manifest.json", *(f"{entry['folder']}/in.safetensors" for entry in manifest["calls"])}
    for name, digest in listed.items():
        assert hashlib.sha256((exported / name).read_bytes()).hexdigest() == digest
    for entry in manifest["calls"]:
        assert listed[f"{entry['folder']}/in.safetensors"] == entry["sha256"]


def test_gold_lies_beside_the_calls_of_cases_with_the_envelope_that_judges(tmp_path):
    class Foreign(Correct):
        def capabilities(self):
            return replace(super().capabilities(), state_layout="VK")

    ids, folder = ["exact.square", "gate.slow", "front_gradients.softplus", "relation.causality"], tmp_path / "calls"
    export(folder, Foreign().capabilities(), only=ids, gold=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    entries = {entry["checks"][0]: entry for entry in manifest["calls"]}
    assert {id for id, entry in entries.items() if "gold" in entry} == set(ids[:3])
    for id in ids[:3]:
        entry, caps = entries[id], Foreign().capabilities()
        (problem,) = problems_of(by_id(id), caps, CONTRACT)
        gold, truth = load_file(folder / entry["folder"] / "gold.safetensors"), truth_of(problem)
        assert {name for name in gold if not name.startswith("envelope_")} == set(entry["outputs"])
        for name, said in entry["outputs"].items():
            assert list(gold[name].shape) == said["shape"]
            state = name in ("final_state", "dh0")
            assert torch.equal(gold[name], truth[name].transpose(-1, -2) if state else truth[name])
            assert torch.equal(gold[f"envelope_{name}"], envelopes_of(problem)[name].float())
        limits = {"exact.square": 0.0, "gate.slow": 4.0, "front_gradients.softplus": 8.0}
        assert set(entry["gold"]["limits"].values()) == {limits[id]}
    assert "gate.slow.1/gold.safetensors" in (folder / "SHA256SUMS").read_text()
