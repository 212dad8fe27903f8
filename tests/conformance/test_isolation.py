"""A kernel that takes its process down fails one case, with the reason, and the run goes on."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kimi_linear.conformance.adapter import BadAdapterError, load_adapter
from kimi_linear.conformance.isolation import Isolated, opened
from kimi_linear.conformance.suite import run_suite

CRASHING = str(Path(__file__).with_name("crashing_kernels.py"))
STRANGE = str(Path(__file__).with_name("strange_kernels.py"))


@contextlib.contextmanager
def isolated(where, seconds=60.0, memory=None):
    with opened(where, True, seconds, memory) as adapter:
        yield adapter


def reasons(report):
    return {verdict.id: verdict.reason for verdict in report.verdicts if verdict.failed}


def test_crashes_exits_hangs_and_hoarding_fail_their_case_and_the_run_goes_on(monkeypatch):
    ids = ("shape.K=7", "shape.T=2", "shape.K=40,V=8", "shape.K=60", "exact.square")
    with isolated(CRASHING, memory=2) as kernel:
        with monkeypatch.context() as patch:
            patch.setattr("kimi_linear.conformance.isolation.GRACE_SECONDS", 0.5)
            hangs = run_suite(kernel, only=["shape.groups"], seconds=0.5)
        report = run_suite(kernel, only=ids)
    found = reasons(hangs) | reasons(report)
    assert found["shape.K=7"].startswith("killed by signal 11 (SIGSEGV) in string_at, ")
    assert found["shape.groups"] == "hangs: no result after 0.5 s"
    assert found["shape.K=40,V=8"] == "killed by signal 9 (SIGKILL), as the system does when memory runs out"
    assert found["shape.K=60"].startswith("raises MemoryError")
    passed = {verdict.id for verdict in report.verdicts if verdict.status == "pass"}
    assert passed == {"shape.T=2", "exact.square"}


def test_an_exit_says_its_code():
    with isolated(CRASHING) as kernel:
        report = run_suite(kernel, only=["gate.slow"])
    assert reasons(report) == {"gate.slow": "ends its process, with code 3"}


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        ("Overwrites", "overwrites its input k"),
        ("ReturnsInput", "returns its own input v as o"),
        ("Raises", "raises RuntimeError: no such instruction"),
        ("Exits", "raises SystemExit: 1"),
        ("Unwritten", "with NaN in new memory"),
        ("AssumesContiguous", "of strided inputs"),
    ],
)
def test_what_is_seen_in_one_process_is_seen_across_two(kernel, reason):
    ids = ("shape.T=2", "relation.dirty_memory", "relation.strides")
    for adapter in (isolated(f"{STRANGE}:{kernel}"), contextlib.nullcontext(load_adapter(f"{STRANGE}:{kernel}"))):
        with adapter as it:
            assert any(reason in found for found in reasons(run_suite(it, only=ids)).values())


def test_verdicts_are_those_of_one_process():
    ids = ("exact.packed", "gate.slow", "relation.strides", "relation.dirty_memory", "gradients.mild", "probe.bits")
    where = "kimi_linear.conformance.adapters.wrong"
    with isolated(where) as kernel:
        apart = run_suite(kernel, only=ids)
    assert apart == run_suite(load_adapter(where), only=ids)
    assert apart.count("fail")
    assert apart.count("pass")


def test_running_the_reference_by_accident_is_caught_across_processes(tmp_path):
    adapter = tmp_path / "fallback.py"
    adapter.write_text(
        "from kimi_linear.conformance.adapters.naive import capabilities, run\n"
        "def identity(): return 'a fast kernel'\n"
    )
    with isolated(str(adapter)) as kernel, pytest.raises(BadAdapterError, match="the reference with itself"):
        run_suite(kernel, only=["shape.T=2"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import ctypes; ctypes.string_at(0)", "does not load: killed by signal 11"),
        ("import nothing_of_that_name", "does not load: ModuleNotFoundError"),
        ("raise SystemExit(4)", "does not load: ends its process, with code 4"),
    ],
)
def test_a_kernel_that_does_not_load_says_why(tmp_path, source, message):
    (tmp_path / "broken.py").write_text(source)
    with pytest.raises(BadAdapterError, match=message):
        Isolated(str(tmp_path / "broken.py"))


def test_a_crash_in_capabilities_is_an_error_of_the_adapter(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os\ndef capabilities(): os._exit(5)\ndef run(call, want): return {}\ndef identity(): return 'x'\n"
    )
    with (
        isolated(str(tmp_path / "broken.py")) as kernel,
        pytest.raises(BadAdapterError, match=r"capabilities\(\) ends"),
    ):
        run_suite(kernel)


def test_a_kernel_that_loads_once_only_fails_what_follows(tmp_path):
    (tmp_path / "once.py").write_text(
        "from crashing_kernels import capabilities, identity, run\n"
        f"open({str(tmp_path / 'loaded')!r}, 'x')\n"  # refuses a file that exists
    )
    with isolated(str(tmp_path / "once.py")) as kernel:
        report = run_suite(kernel, only=["gate.slow", "values.square_state"])
    assert reasons(report)["values.square_state"].startswith("once more: ")
    assert "FileExistsError" in reasons(report)["values.square_state"]


def test_a_limit_on_memory_needs_a_process_of_its_own():
    with pytest.raises(BadAdapterError, match="--isolate"), opened(CRASHING, memory=1.0):
        pass


def test_threads_of_torch_are_the_same_there():
    with isolated(CRASHING) as kernel:
        assert kernel.there(_threads) == torch.get_num_threads()


def _threads(adapter):
    return torch.get_num_threads()


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to end orphans")
def test_a_hanging_kernel_does_not_outlive_a_judge_that_is_killed(tmp_path):
    code = f"""
from kimi_linear.conformance.isolation import Isolated
from kimi_linear.conformance.suite import run_suite
kernel = Isolated({CRASHING!r})
print(kernel._worker.pid, flush=True)
run_suite(kernel, only=["shape.groups"])
"""
    judge = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker = int(judge.stdout.readline())
    time.sleep(2)
    judge.kill()
    judge.communicate()
    for _ in range(300):
        if not _runs(worker):
            return
        time.sleep(0.1)
    os.kill(worker, signal.SIGKILL)
    raise AssertionError("the worker goes on")


def _runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
