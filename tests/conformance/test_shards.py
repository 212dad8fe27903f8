"""Kernels judged by a pool of processes: the verdicts of an undivided run, whatever a check does to its process."""

import json
from pathlib import Path
from types import SimpleNamespace

import conformance_runs
import pytest
from typer.testing import CliRunner

from kimi_linear.conformance import shards
from kimi_linear.conformance.adapter import load_adapter
from kimi_linear.conformance.as_json import as_json
from kimi_linear.conformance.guard import KernelFailure
from kimi_linear.conformance.matrix import ADAPTERS, Column
from kimi_linear.conformance.record import Record
from kimi_linear.conformance.shards import Clock, Job, Judged, judge_jobs
from kimi_linear.conformance.suite import run_suite
from kimi_linear.conformance.verdict import Verdict
from strange_kernels import Correct

HERE = Path(__file__).parent
IDS = ("shape.K=7", "shape.T=2", "exact.square", "values.square_state")


def job(tmp_path, where, **options):
    options = {"full": True, "only": IDS} | options
    return Job("it", where, kept=tmp_path / "it.jsonl", **options)


def only(jobs, workers=1, seconds=None):
    (found,) = judge_jobs(jobs, workers, seconds)
    return found


def statuses(report):
    return {verdict["id"]: verdict["status"] for verdict in report["verdicts"]}


@pytest.fixture
def here(monkeypatch):
    """A kernel in this process; `fails` says at which ids its process seems to die, `calls` which were judged."""
    state = SimpleNamespace(fails={}, calls=[], adapter=Correct(), started=0)

    class Here:
        def __init__(self, *arguments):
            state.started += 1

        def there(self, function, *arguments, seconds):
            if function is shards.judged:
                state.calls.append(arguments[0])
                if arguments[0] in state.fails:
                    raise state.fails[arguments[0]]
            return function(state.adapter, *arguments)

        def close(self):
            pass

    monkeypatch.setattr(shards, "Isolated", Here)
    return state


def test_a_divided_run_gives_the_report_of_an_undivided_one(tmp_path):
    ids = ("exact.packed", "gate.slow", "relation.strides", "gradients.mild", "probe.bits", "shape.T=0")
    where = f"{ADAPTERS}.wrong"
    found = only([job(tmp_path, where, only=ids)], workers=2)
    whole = run_suite(load_adapter(where), only=ids)
    assert found.report({}) == json.loads(json.dumps(as_json(whole)))
    assert whole.count("fail")
    assert whole.count("pass")
    again = run_suite(load_adapter(where), only=ids, record=Record(found.job.kept, where))
    assert again == whole  # `conformance run --resume` takes the file


def test_a_check_whose_verdict_is_of_another_contract_is_known_by_the_one_that_was_asked(tmp_path):
    where, ids = f"{ADAPTERS}.naive", ("decode.prefill",)
    adapter = load_adapter(where)
    whole = run_suite(adapter, only=ids)
    assert not {verdict.contract for verdict in whole.verdicts} & set(adapter.capabilities().contracts)
    found = only([job(tmp_path, where, only=ids)])
    assert found.report({}) == json.loads(json.dumps(as_json(whole)))
    kept = found.job.kept.read_text()
    assert run_suite(adapter, only=ids, record=Record(found.job.kept, where)) == whole
    assert found.job.kept.read_text() == kept


def test_a_crash_costs_its_check_and_no_other(tmp_path):
    found = only([job(tmp_path, str(HERE / "crashing_kernels.py"))])
    reasons = {v["id"]: v["reason"] for v in found.report({})["verdicts"] if v["status"] == "fail"}
    assert list(reasons) == ["shape.K=7"]
    assert reasons["shape.K=7"].startswith("crashed the process: killed by signal 11 (SIGSEGV)")
    assert set(statuses(found.report({})).values()) == {"fail", "pass"}


def test_an_error_of_cuda_costs_its_check_and_no_other(tmp_path):
    where = str(HERE / "poisoned_kernel.py")
    undivided = run_suite(load_adapter(where), only=IDS)
    assert undivided.count("fail") > 1
    found = only([job(tmp_path, where)]).report({})
    assert [id for id, status in statuses(found).items() if status == "fail"] == ["shape.K=7"]
    (failed,) = (verdict for verdict in found["verdicts"] if verdict["status"] == "fail")
    assert failed["reason"].startswith("crashed the process: raises RuntimeError: CUDA error: an illegal")


def test_an_error_of_cuda_that_a_passing_check_leaves_behind_is_seen(monkeypatch):
    def synchronize():
        raise RuntimeError("an illegal instruction was encountered\nmore")

    passed = Verdict("refusal.k", "relation", "pass")
    assert shards.cuda_error(passed) == ""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    assert shards.cuda_error(passed) == ""
    monkeypatch.setattr("torch.cuda.synchronize", synchronize)
    assert shards.cuda_error(passed) == "leaves behind an illegal instruction was encountered"


def test_what_the_time_does_not_suffice_for_is_not_run(tmp_path, here):
    class Two:
        """Time for two checks."""

        @property
        def left(self):
            return 1e3 if len(here.calls) < 2 else 0.0

    one = Judged(job(tmp_path, "it"))
    one.work(Two())
    report = one.report({})
    assert sorted(statuses(report).values()) == ["not run", "not run", "pass", "pass"]
    assert {v["reason"] for v in report["verdicts"] if v["status"] == "not run"} == {shards.OUT_OF_TIME}
    assert not report["ok"]
    assert report["counts"]["pass"] == 2
    first = list(here.calls)
    again = Judged(one.job)
    again.work(Clock(None))
    assert set(statuses(again.report({})).values()) == {"pass"}
    assert not set(here.calls[2:]) & set(first)  # it went on, and ran nothing twice


def test_a_check_that_the_end_of_the_time_interrupts_does_not_fail(tmp_path, here):
    here.fails = {"shape.K=7": KernelFailure("hangs: no result after 0 s")}
    one = Judged(job(tmp_path, "it"))
    one.work(Clock(shards.GRACE_SECONDS))
    assert statuses(one.report({}))["shape.K=7"] == "not run"
    late = Judged(one.job)
    while not late.finished:
        late.work(Clock(None))
    assert statuses(late.report({}))["shape.K=7"] == "fail"


def test_before_the_first_check_the_end_of_the_time_is_the_problem(tmp_path):
    found = only([job(tmp_path, "it")], seconds=0.0)
    assert (found.identity, found.problem) == ("", shards.OUT_OF_TIME)


def test_an_error_of_the_judge_is_a_failure_and_starts_another_process(tmp_path, here):
    here.fails = {"exact.square": IndexError("off by one")}
    found = only([job(tmp_path, "it")])
    verdicts = {verdict["id"]: verdict for verdict in found.report({})["verdicts"]}
    assert verdicts["exact.square"]["reason"] == "the judge raises IndexError: off by one"
    assert here.started == 2
    assert sum(verdict["status"] == "pass" for verdict in verdicts.values()) == 3


def test_a_kernel_that_does_not_load_says_why_and_the_others_go_on(tmp_path):
    jobs = [job(tmp_path, "no.such.module"), Job("naive", f"{ADAPTERS}.naive", True, tmp_path / "n", only=IDS[:1])]
    found = {one.job.name: one for one in judge_jobs(jobs, workers=2)}
    assert "no.such.module does not load: ModuleNotFoundError" in found["it"].problem
    assert not found["it"].identity
    assert set(statuses(found["naive"].report({})).values()) == {"pass"}


def test_waivers_count_as_in_an_undivided_run(tmp_path, here):
    found = only([job(tmp_path, "it")]).report({"shape.T=2": "why"})
    assert "passes, though a waiver says: why" in {v["id"]: v["reason"] for v in found["verdicts"]}["shape.T=2"]


def test_more_processes_go_where_most_time_is_left(tmp_path, here):
    quick, slow = (Judged(Job(name, "it", True, tmp_path / name)) for name in ("quick", "slow"))
    assert quick.seconds_left() == slow.seconds_left() > 0
    quick.done, quick.spent, slow.done, slow.spent = 10, 1.0, 10, 100.0
    assert slow.seconds_left() > 50 * quick.seconds_left()
    slow.workers = 3
    assert slow.seconds_left() == pytest.approx(len(slow.checks) * 10 / 4)
    slow.problem = "no such GPU"
    assert slow.seconds_left() == 0


def test_the_autotuner_sees_the_first_configurations_only(monkeypatch):
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    tuned = SimpleNamespace(configs=[1, 2, 3], early_config_prune=None, perf_model=None)
    monkeypatch.setattr(autotuner, "prune_configs", autotuner.prune_configs)
    assert autotuner.prune_configs(tuned, {}) == [1, 2, 3]
    shards.limit_autotuner.__wrapped__(None)
    assert autotuner.prune_configs(tuned, {}) == [1, 2, 3]
    shards.limit_autotuner.__wrapped__(2)
    assert autotuner.prune_configs(tuned, {}) == [1, 2]


def test_the_script_writes_a_record_a_column_and_nothing_else(tmp_path, here, monkeypatch):
    columns = (Column("fla_one", "One", "a"), Column("two", "Two", "b", device="cuda"), Column("three", "T", "c"))
    monkeypatch.setattr(conformance_runs, "COLUMNS", columns)
    job_of = conformance_runs.job_of
    some = lambda *arguments: Job(**{**vars(job_of(*arguments)), "only": IDS})  # noqa: E731
    monkeypatch.setattr(conformance_runs, "job_of", some)
    app = conformance_runs.typer.Typer()
    app.command()(conformance_runs.main)
    out = ["--out", str(tmp_path / "out"), "--workers", "2", "--minutes", "2", "--keep", str(tmp_path / "keep")]
    result = CliRunner().invoke(app, ["cpu", *out])
    assert result.exit_code == 0, result.output
    assert "three: 4 pass" in result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"fla_one.json", "three.json"}
    record = json.loads((tmp_path / "out" / "three.json").read_text())
    assert "note" not in record
    assert str(tmp_path) not in json.dumps(record)
    assert CliRunner().invoke(app, ["cpu", "four", *out]).exit_code == 2


def test_only_columns_of_fla_on_a_gpu_have_their_autotuner_limited_and_say_so(tmp_path, monkeypatch, here):
    monkeypatch.setattr(conformance_runs, "machine", lambda device: "a GPU")
    for column, limited in (
        (Column("fla_x", "X", "a", device="cuda"), True),
        (Column("triton_x", "X", "a", device="cuda"), False),
        (Column("fla_y", "X", "a", interpreted=True), False),
    ):
        made = conformance_runs.job_of(column, "fla's python", tmp_path)
        assert (made.configs is not None) == limited
        assert made.python == ("fla's python" if column.name.startswith("fla") else conformance_runs.sys.executable)
        assert ("TRITON_INTERPRET" in made.environment) == column.interpreted
        judged = Judged(made)
        judged.problem = "no module: /a/folder/of/mine/x.py"
        record = conformance_runs.record_of(column, judged)
        assert ("1 configuration of each kernel" in record.get("note", "")) == limited
        assert record["problem"] == "no module: x.py"
