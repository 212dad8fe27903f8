"""Jobs in a process that may die: it is kept while it is sound, and whatever takes it down costs one job."""

import math
import os
import time
from contextlib import closing

import pytest

from expendable import Expendable, LostError

FAULT = "raise RuntimeError('CUDA error: an illegal memory access was encountered\\nCompile with ..')"


@pytest.fixture
def process():
    with closing(Expendable(os.getpid, seconds=30)) as process:
        yield process


def test_one_process_does_many_jobs(process):
    first = process.run(os.getpid)
    assert first != os.getpid()
    assert process.run(math.sqrt, 4) == 2
    assert process.run(os.getpid) == first


@pytest.mark.parametrize(
    ("job", "argument", "said"),
    [
        (os._exit, 3, "^ends its process, with code 3$"),
        (exec, "import os; os.kill(os.getpid(), 9)", r"^is killed by signal 9 \(SIGKILL\)$"),
        (exec, FAULT, "^raises RuntimeError: CUDA error: an illegal memory access was encountered$"),
    ],
)
def test_a_job_that_dies_or_raises_costs_no_other(process, job, argument, said):
    first = process.run(os.getpid)
    with pytest.raises(LostError, match=said):
        process.run(job, argument)
    assert process.run(os.getpid) != first, "what a job left behind would meet the next one"


def test_a_job_that_hangs_is_killed(process):
    first = process.run(os.getpid)
    began = time.monotonic()
    with pytest.raises(LostError, match=r"^hangs: no result after 0\.2 s$"):
        process.run(time.sleep, 60, seconds=0.2)
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert process.run(os.getpid) != first


def test_a_process_that_cannot_start_is_no_jobs_fault():
    with closing(Expendable(os.abort, seconds=30)) as process, pytest.raises(RuntimeError, match="SIGABRT"):
        process.run(os.getpid)
