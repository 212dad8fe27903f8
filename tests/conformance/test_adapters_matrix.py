"""The conformance matrix says what the records say, and every adapter has its column."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_linear.cli.main import app
from kimi_linear.conformance.adapter import BadAdapterError, checked_capabilities, load_adapter
from kimi_linear.conformance.matrix import (
    BEGIN,
    COLUMNS,
    END,
    Column,
    cell,
    dump,
    families,
    page,
    read_records,
    recorded,
    with_page,
)
from kimi_linear.conformance.waivers import read_waivers

ROOT = Path(__file__).parent.parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "conformance"
ADAPTERS = ROOT / "conformance" / "adapters"


def verdict(id="gate.slow", status="pass", ratio=1.25, tier="ratio"):
    ratios = {} if ratio is None else {"o": ratio, "final_state": 0.5}
    return {"id": id, "tier": tier, "status": status, "reason": "why", "ratios": ratios, "limit": 4.0}


@pytest.mark.parametrize(
    ("verdicts", "shown"),
    [
        ([], "-"),
        ([verdict(status="skip", ratio=None)], "-"),
        ([verdict(), verdict(ratio=0.75)], "1.25"),
        ([verdict(ratio=None)], "holds"),
        ([verdict(), verdict(status="fail", ratio=31.4)], "**31.4, 1 fail**"),
        ([verdict(), verdict(status="fail", ratio="nan")], "**inf, 1 fail**"),
        ([verdict(status="waived", ratio="inf")] * 2, "**inf, 1 fail**"),
        ([verdict(status="fail", ratio=None), verdict(id="gate.dead", status="fail", ratio=None)], "**2 fail**"),
        ([verdict(status="acceptable", ratio="inf")], "-"),
        ([verdict(status="not run", ratio=None)], "not run"),
        ([verdict(), verdict(status="not run", ratio=None)], "1.25 (in part)"),
        ([verdict(status="fail", ratio=None), verdict(status="not run", ratio=None)], "**1 fail** (in part)"),
    ],
)
def test_a_cell_shows_the_worst_ratio_and_counts_failures(verdicts, shown):
    assert cell(verdicts) == shown


def test_the_document_is_what_the_records_give():
    document = (ROOT / "docs" / "conformance-matrix.md").read_text()
    records = read_records(RECORDS)
    assert document == with_page(document, page(records)), "run kimi-linear conformance matrix"
    assert records


def test_a_kernel_that_was_not_run_is_said_to_be_so():
    record = recorded(COLUMNS[0], {"identity": "a kernel", "verdicts": [verdict()]}, {"date": "d", "machine": "m"})
    shown = page({"naive": record, "flash_kda_gpu": {"date": "d", "machine": "m", "problem": "no such GPU"}})
    assert "| gates (`gate`) | 1.25 | not run yet" in shown
    assert "| Triton chunk | not run yet |" in shown
    assert "not run: no such GPU" in shown


def test_what_a_run_left_out_is_counted_and_never_passed():
    verdicts = [verdict(), verdict(id="gate.dead", status="not run", ratio=None)]
    record = recorded(COLUMNS[0], {"verdicts": verdicts}, {"date": "d", "machine": "m", "note": "n"})
    assert record["not_run"] == 1
    shown = page({"naive": {**record, "identity": "x"}})
    assert "| 1 / 0 / 0, 1 not run |" in shown
    assert "| 1.25 (in part) |" in shown
    assert "| d | m; n |" in shown


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("SIGSEGV in f, /usr/lib/x-1/y.py:9", "SIGSEGV in f, y.py:9"),
        ("cannot open '/data/x'", "cannot open 'x'"),
        ("see https://example.org/a/b and conformance/findings/a.py", None),
        ("o is 1/2/3 of a / b", None),
    ],
)
def test_records_say_nothing_of_folders(reason, shown):
    record = recorded(COLUMNS[0], {"verdicts": [{**verdict(), "reason": reason}]}, {})
    assert record["verdicts"][0]["reason"] == (shown or reason)


def test_failures_are_listed_with_their_reasons():
    record = {"date": "d", "machine": "m", "identity": "x", "verdicts": [verdict(status="fail", ratio=9.0)]}
    assert "`gate.slow`: why" in page({"naive": record})
    assert "No check fails." in page({"naive": {**record, "verdicts": [verdict()]}})


def test_records_are_read_as_they_were_written_and_others_refused(tmp_path):
    about = {"date": "2026-01-01", "machine": "m"}
    record = recorded(COLUMNS[0], {"identity": "x", "verdicts": [verdict(), verdict(ratio="inf")]}, about)
    (tmp_path / "a.json").write_text(dump(record))
    assert read_records(tmp_path) == {"naive": record}
    (tmp_path / "b.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="must be a recorded run"):
        read_records(tmp_path)


def test_a_family_without_a_title_has_a_row_too():
    record = {"date": "d", "machine": "m", "identity": "x", "verdicts": [verdict(), verdict(id="new.case", ratio=2)]}
    assert families({"naive": record}) == ["gate", "new"]
    assert "| new (`new`) | 2.00 | not run yet" in page({"naive": record})


def test_every_adapter_has_a_column():
    shipped = {path.stem for path in ADAPTERS.glob("*.py")} - {"__init__", "wrong"}
    assert {column.adapter.partition(":")[0] for column in COLUMNS} == shipped
    assert len({column.name for column in COLUMNS}) == len(COLUMNS)


def test_the_command_writes_checks_and_refuses(tmp_path):
    document, records = tmp_path / "matrix.md", tmp_path / "records"
    arguments = ["conformance", "matrix", "--records", str(records), "--document", str(document)]
    assert "must be a folder" in CliRunner().invoke(app, arguments).stderr
    records.mkdir()
    document.write_text("no markers\n")
    assert CliRunner().invoke(app, arguments).exit_code == 2
    document.write_text(f"before\n{BEGIN}old\n{END}after\n")
    assert CliRunner().invoke(app, [*arguments, "--check"]).exit_code == 1
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, [*arguments, "--check"]).exit_code == 0
    assert document.read_text().startswith("before\n")
    assert document.read_text().endswith("after\n")


def test_a_column_says_how_it_is_run():
    column = Column("x", "X", "naive", "--quick", interpreted=True)
    assert column.command.startswith("TRITON_INTERPRET=1 kimi-linear conformance run")
    assert column.command.endswith("adapters.naive --quick")


OTHERS = [column for column in COLUMNS if column.device == "cpu" or column.name.startswith("fla")]


@pytest.mark.parametrize("column", OTHERS, ids=lambda column: column.name)
def test_every_recorded_failure_was_looked_into(column):
    record = read_records(RECORDS).get(column.name, {})
    red = {verdict["id"] for verdict in record.get("verdicts", ()) if verdict["status"] in ("fail", "waived")}
    waivers = next((path for name in column.waivers if (path := ADAPTERS / name).exists()), None)
    known = {} if waivers is None else read_waivers(waivers)
    mended = {id for id in red if id in record.get("note", "")}
    assert red <= {name.partition(" @ ")[0] for name in known} | mended


@pytest.mark.parametrize("waivers", sorted(ADAPTERS.glob("*.waivers")), ids=lambda path: path.stem)
def test_known_failures_have_a_reason_and_a_script(waivers):
    for id, reason in read_waivers(waivers).items():
        script = reason.rpartition(" ")[2]
        assert (ROOT / script).is_file(), f"{id}: {script}"


@pytest.mark.parametrize("name", sorted(path.stem for path in ADAPTERS.glob("*.py")))
def test_an_adapter_is_short_enough_to_copy(name):
    assert len((ADAPTERS / f"{name}.py").read_text().splitlines()) < 60


@pytest.mark.parametrize("name", ["fla_chunk:safe_gate", "flash_kda"])
def test_without_a_gpu_an_adapter_for_one_says_so(name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BadAdapterError, match="needs a GPU"):
        checked_capabilities(load_adapter(f"kimi_linear.conformance.adapters.{name}"))
