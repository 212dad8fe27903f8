"""`kimi-linear conformance repro`: one failure as a script."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from ..conformance.adapter import Adapter, Contract
from ..conformance.explain import explain_one
from ..conformance.isolation import opened
from ..conformance.limits import CASE_SECONDS
from ..conformance.repro import repro_script
from ..conformance.suite import Check, benches, check_by_id
from ..conformance.trials import case_of

EXAMPLE = "my_kernel.py"


def repro_command(
    check: Annotated[str, typer.Argument(metavar="CHECK")],
    adapter: Annotated[
        str | None, typer.Option(help="The kernel; judged first, to find its smallest failure.")
    ] = None,
    isolate: Annotated[bool, typer.Option("--isolate", help="Judge it in a process of its own.")] = False,
) -> None:
    """A short script that runs one check of any kind: the smallest input that fails, under the contract that failed.

    Without --adapter: the whole check, for a kernel in my_kernel.py.
    """
    from .conformance import errors_as_exit_code

    torch.set_num_threads(1)
    with errors_as_exit_code():
        found = check_by_id(check)
        if adapter is None:
            typer.echo(repro_script(found, Contract(), EXAMPLE, None, case_of(check)), nl=False)
            return
        with opened(adapter, isolate, CASE_SECONDS, None) as kernel:
            script = script_of_failure(found, kernel, adapter)
            if script is None:
                typer.echo(f"{adapter} does not fail {check}; here is the whole check", err=True)
                script = repro_script(found, kernel.capabilities().contracts[0], adapter, None, case_of(check))
        typer.echo(script, nl=False)


def script_of_failure(check: Check, kernel: Adapter, where: str) -> str | None:
    """The script of the first contract under which the check fails."""
    for bench in benches(kernel):
        verdict = check(bench)
        if verdict.failed:
            return explain_one(verdict, bench, where, cause=False).script
    return None
