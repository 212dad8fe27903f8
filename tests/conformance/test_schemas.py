"""The JSON that the suite writes and reads has the form that its schemas say, and no other."""

import json
from copy import deepcopy
from dataclasses import asdict, fields, replace

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from kimi_linear.cli.main import app
from kimi_linear.conformance import capabilities as words
from kimi_linear.conformance.adapter import Capabilities, Contract, FrontForm, Pool, ShortConv, load_adapter
from kimi_linear.conformance.as_json import SCHEMA, as_json
from kimi_linear.conformance.catalogue import by_id
from kimi_linear.conformance.exchange import FORMAT, export
from kimi_linear.conformance.explain import explain_failures
from kimi_linear.conformance.growth import SHAPES
from kimi_linear.conformance.measure import measure
from kimi_linear.conformance.mutants import MUTANTS
from kimi_linear.conformance.panel import chunk_kernel
from kimi_linear.conformance.place import Place
from kimi_linear.conformance.precision import DTYPES, MANTISSA
from kimi_linear.conformance.schema import FOLDER, SCHEMAS, schema_of
from kimi_linear.conformance.score_text import TIERS
from kimi_linear.conformance.search import Found
from kimi_linear.conformance.suite import check_by_id, run_suite
from kimi_linear.conformance.tables import STATUSES
from kimi_linear.conformance.verdict import Verdict
from strange_kernels import CONTRACT, Correct, ReturnsNaN

ADAPTERS = ("chunked", "naive", "onnx_reference", "short_convolution", "transformers_torch", "wrong")


def complaints(name, data):
    return [
        f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema_of(name)).iter_errors(data)
    ]


def as_read(data):
    """What another program gets."""
    return json.loads(json.dumps(data, allow_nan=False))


def names(kind):
    return {field.name for field in fields(kind)}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one_and_stands_alone(name):
    schema = schema_of(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$id"] == f"urn:kimi-linear:conformance:{name}:1"
    text = json.dumps(schema)
    references = {part.split('"')[0] for part in text.split('"$ref": "')[1:]}
    assert references == {f"#/$defs/{definition}" for definition in schema.get("$defs", ())}


def test_there_is_a_file_for_every_schema_and_no_other():
    assert {file.name for file in FOLDER.iterdir()} == {f"{name}.schema.json" for name in SCHEMAS}
    with pytest.raises(ValueError, match="name must be one of report, capabilities, calls, score"):
        schema_of("waivers")


@pytest.fixture(scope="module")
def report():
    """What is passed, failed and explained, waived, and not declared."""

    class WrongFromToken5(Correct):
        def capabilities(self):
            return replace(super().capabilities(), packed=False, refuses=())

        def run(self, call, want):
            results = super().run(call, want)
            results["o"][:, 5:] *= 1.25
            return results

    kernel = WrongFromToken5()
    only = ["gate.slow", "keys.runs", "packing.empty_first", "shape.T=1"]
    found = run_suite(kernel, only=only, waivers={"keys.runs": "known"})
    return found, explain_failures(found, kernel, "kernel.py")


def test_a_report_has_its_form(report):
    found, explained = report
    data = as_read(as_json(found, explained))
    assert {verdict["status"] for verdict in data["verdicts"]} == {"pass", "fail", "waived", "skip"}
    assert any(failure["smallest"] for failure in data["failures"])
    assert any(failure["stages"] or failure["suspects"] for failure in data["failures"])
    assert complaints("report", data) == []


def test_a_report_of_what_is_not_finite_has_its_form():
    found = run_suite(ReturnsNaN(), only=["gate.slow"])
    (verdict,) = found.verdicts
    verdict.ratios["o"] = float("nan")
    assert complaints("report", as_read(as_json(found))) == []


def test_what_a_search_found_has_its_form(report):
    worst = Verdict("gate.slow", "ratio", "fail", ratios={"o": float("inf")}, contract=CONTRACT)
    found = Found(worst, by_id("gate.slow"), 7)
    data = as_read(as_json(report[0]) | {"search": [found.as_json()]})
    assert complaints("report", data) == []


def remove(data, *path):
    *path, last = path
    for part in path:
        data = data[part]
    del data[last]


def put(value, data, *path):
    *path, last = path
    for part in path:
        data = data[part]
    data[last] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: remove(x, "ok"), "'ok' is a required property"),
        (lambda x: put(2, x, "schema"), "1 was expected"),
        (lambda x: put("failed", x, "verdicts", 0, "status"), "'failed' is not one of"),
        (lambda x: put("Infinity", x, "verdicts", 0, "limit"), "is not valid under any of"),
        (lambda x: put([], x, "verdicts", 0, "colour"), "Additional properties are not allowed"),
        (lambda x: put(1, x, "failures", 0, "repeats"), "1 is not of type 'boolean'"),
    ],
)
def test_what_is_no_report_is_told(report, change, message):
    data = deepcopy(as_read(as_json(*report)))
    change(data)
    assert any(message in complaint for complaint in complaints("report", data))


@pytest.mark.parametrize("name", ADAPTERS)
def test_capabilities_of_every_shipped_adapter_have_their_form(name):
    caps = load_adapter(f"kimi_linear.conformance.adapters.{name}").capabilities()
    assert complaints("capabilities", as_read(asdict(caps))) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"colour": 1}, "Additional properties"),
        ({"contracts": [{"io": "fp8"}]}, "'fp8' is not one of"),
        ({"packed": "yes"}, "'yes' is not of type 'boolean'"),
        ({"K": []}, "is not valid under any of"),
        ({"front_ends": [{"gate": "clamped"}]}, "'clamped' is not one of"),
    ],
)
def test_what_are_no_capabilities_is_told(data, message):
    assert complaints("capabilities", {}) == []
    assert any(message in complaint for complaint in complaints("capabilities", data))


def test_schemas_know_the_words_and_the_fields_of_the_code():
    """A field or a word that is added there and forgotten here would pass no validator."""
    caps, calls, report = (schema_of(name) for name in ("capabilities", "calls", "report"))
    assert set(caps["properties"]) == set(calls["$defs"]["capabilities"]["properties"]) == names(Capabilities)
    kinds = {"contract": Contract, "front": FrontForm, "pool": Pool, "short_conv": ShortConv, "place": Place}
    for schema in (caps, calls, report):
        for name in kinds.keys() & schema["$defs"].keys():
            assert set(schema["$defs"][name]["properties"]) == names(kinds[name])
            if name != "place":
                said = {field: what.get("default") for field, what in schema["$defs"][name]["properties"].items()}
                ours = asdict(kinds[name]())
                assert all(ours[field] == value for field, value in said.items() if value is not None)
    assert set(report["$defs"]["verdict"]["properties"]) == names(Verdict) | {"family"}
    said = caps["properties"]
    assert said["operations"]["items"]["enum"] == list(words.OPERATIONS)
    assert said["stages"]["items"]["enum"] == list(words.STAGES)
    assert said["refuses"]["items"]["enum"] == list(words.REFUSALS)
    contract = caps["$defs"]["contract"]["properties"]
    assert set(contract["io"]["enum"]) == set(said["state_dtype"]["enum"]) == set(DTYPES)
    assert all(set(contract[name]["enum"]) == set(MANTISSA) for name in ("operand", "accumulate", "state"))
    assert contract["decay"]["enum"] == list(words.DECAY_FORMS)
    assert report["$defs"]["verdict"]["properties"]["status"]["enum"] == list(STATUSES)
    assert set(report["$defs"]["verdict"]["properties"]["tier"]["enum"]) == set(TIERS)
    assert set(SHAPES) <= set(report["$defs"]["law"]["enum"])
    assert report["properties"]["schema"]["const"] == SCHEMA
    assert calls["properties"]["format"]["const"] == FORMAT


def test_the_manifest_of_an_export_has_its_form(tmp_path):
    caps = replace(Correct().capabilities(), state_layout="VK")
    only = ["exact.packed", "gate.slow", "front.softplus", "gradients.packed", "relation.strides"]
    export(tmp_path / "calls", caps, only=only, gold=True)
    data = json.loads((tmp_path / "calls" / "manifest.json").read_text())
    assert data["skipped"]
    assert {entry["cu_seqlens"] is None for entry in data["calls"]} == {True, False}
    assert any(entry["front"] for entry in data["calls"])
    assert complaints("calls", data) == []
    del data["calls"][0]["sha256"]
    assert complaints("calls", data) == ["$.calls[0]: 'sha256' is a required property"]


def test_a_score_has_its_form(monkeypatch):
    checks = [check_by_id("shape.T=2"), check_by_id("gate.typical")]
    monkeypatch.setattr("kimi_linear.conformance.measure._checks", lambda full: checks)
    chosen = [mutant for mutant in MUTANTS if mutant.name in ("GateShift", "StridesIgnored")]
    score = measure(chosen, [chunk_kernel(32, "bf16")], full=True)
    score.false_alarms.append(("a kernel", "shape.T=2", "an alarm"))
    data = as_read(score.as_json())
    assert complaints("score", data) == []
    data["false_alarms"][0].pop()
    assert any("is too short" in complaint for complaint in complaints("score", data))


def test_the_command_lists_schemas_and_prints_one():
    def command(*arguments):
        return CliRunner().invoke(app, ["conformance", "schema", *arguments])

    listed = command()
    assert listed.exit_code == 0
    assert all(line.startswith(name) for line, name in zip(listed.output.splitlines(), SCHEMAS, strict=True))
    assert json.loads(command("score").output) == schema_of("score")
    unknown = command("waivers")
    assert unknown.exit_code == 2
    assert "name must be one of" in unknown.stderr
