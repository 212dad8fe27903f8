"""Runs that are interrupted go on where they stopped, and never mix verdicts."""

import json
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from kimi_linear.conformance import record as record_module
from kimi_linear.conformance.plain import from_plain
from kimi_linear.conformance.record import Record
from kimi_linear.conformance.suite import run_suite
from kimi_linear.conformance.verdict import Verdict
from strange_kernels import Correct, WrongFromToken40

IDS = ("shape.T=2", "exact.dense", "relation.alone", "shape.K=7")
SLOW = f"{Path(__file__).with_name('crashing_kernels.py')}:Slow"


class Counted(WrongFromToken40):
    """Counts its calls, and is interrupted at one of them."""

    calls, interrupted_at = 0, None

    def run(self, call, want):
        self.calls += 1
        if self.calls == self.interrupted_at:
            raise KeyboardInterrupt
        return super().run(call, want)


def test_an_interrupted_run_keeps_what_it_found_and_goes_on_from_there(tmp_path):
    path = tmp_path / "record.jsonl"
    kernel = Counted()
    kernel.interrupted_at = 4  # the first call only looks for the reference
    half = run_suite(kernel, only=IDS, record=Record(path, "mine"))
    assert len(half.verdicts) + half.missing == 4
    assert half.missing
    assert not half.ok
    again = Counted()
    whole = run_suite(again, only=IDS, record=Record(path, "mine"))
    assert whole == run_suite(WrongFromToken40(), only=IDS)
    assert again.calls < kernel.calls + 4
    assert whole.count("fail")
    third = Counted()
    assert run_suite(third, only=IDS, record=Record(path, "mine")) == whole
    assert third.calls == 1  # all verdicts were known, infinite ratios and places too


def test_a_line_that_was_being_written_is_dropped_and_other_damage_is_not(tmp_path):
    path = tmp_path / "record.jsonl"
    whole = run_suite(Correct(), only=IDS, record=Record(path, "mine"))
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines)[:-20])
    assert run_suite(Correct(), only=IDS, record=Record(path, "mine")) == whole
    assert path.read_text().splitlines() == lines
    for damage, message in (("nonsense\n", "record.jsonl:3: no JSON"), ('{"id": 3}\n', "Verdict.tier must be given")):
        path.write_text(f"{lines[0]}\n{lines[1]}\n{damage}{lines[2]}\n")
        with pytest.raises(ValueError, match=message):
            run_suite(Correct(), only=IDS, record=Record(path, "mine"))


@pytest.mark.parametrize("what", ["the kernel", "the suite", "the adapter's file"])
def test_verdicts_about_something_else_are_refused(tmp_path, monkeypatch, what):
    path, file = tmp_path / "record.jsonl", tmp_path / "kernel.py"
    file.write_text("first")
    run_suite(Correct(), only=IDS[:1], record=Record(path, str(file)))
    before = path.read_text()
    kernel = Correct()
    if what == "the kernel":
        kernel.identity = lambda: "another build"
    elif what == "the suite":
        monkeypatch.setattr(record_module, "suite_version", lambda: "another suite")
    else:
        file.write_text("second")
    with pytest.raises(ValueError, match=f"cannot be resumed: {what} was"):
        run_suite(kernel, only=IDS[:1], record=Record(path, str(file)))
    assert path.read_text() == before


def test_a_file_that_is_no_record_is_refused_and_kept(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text('{"to": "do"}\n')
    with pytest.raises(ValueError, match="is no record of a run"):
        run_suite(Correct(), only=IDS[:1], record=Record(path, "mine"))
    assert path.read_text() == '{"to": "do"}\n'


def test_ctrl_c_prints_what_was_found_and_says_error(tmp_path):
    path = tmp_path / "record.jsonl"
    command = [sys.executable, "-m", "kimi_linear.cli.main", "conformance", "run", SLOW, "--every"]
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": listening}
    with subprocess.Popen([*command, "--resume", str(path)], **options) as judge:
        while not (path.exists() and path.read_text().count("\n") > 2):
            assert judge.poll() is None
            time.sleep(0.05)
        judge.send_signal(signal.SIGINT)
        try:
            said, complaint = judge.communicate(timeout=60)
        finally:
            judge.kill()
    assert judge.returncode == 2
    assert "PASS       exact.dense" in said
    assert "checks were not judged" in complaint
    assert "Traceback" not in complaint
    assert json.loads(path.read_text().splitlines()[1])["status"] == "pass"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"id": 1, "tier": "x", "status": "pass"}, "Verdict.id must be of type str; got 1"),
        ({"id": "a", "tier": "x"}, "Verdict.status must be given"),
        ({"id": "a", "tier": "x", "status": "pass", "colour": 1}, "Verdict.colour must be one of"),
        ({"id": "a", "tier": "x", "status": "pass", "contract": {"io": 3}}, "Verdict.contract.io must be"),
        ({"id": "a", "tier": "x", "status": "pass", "ratios": []}, "Verdict.ratios must be an object"),
    ],
)
def test_json_that_does_not_fit_says_where(data, message):
    with pytest.raises(ValueError, match=message):
        from_plain(Verdict, data)
