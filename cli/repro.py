"""`kimi-linear conformance repro`: one failure as a script."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

from ..conformance.adapter import Contract, load_adapter
from ..conformance.explain import explain_one
from ..conformance.repro import repro_script
from ..conformance.shrink import case_of
from ..conformance.suite import Check, benches, check_by_id

EXAMPLE = "my_kernel.py"


def repro_command(
    check: Annotated[str, typer.Argument(metavar="CHECK")],
    adapter: Annotated[
        str | None, typer.Option(help="The kernel; judged first, to find its smallest failure.")
    ] = None,
) -> None:
    """A short script that runs one check of any kind: the smallest input that fails, under the contract that failed.

    Without --adapter: the whole check, for a kernel in my_kernel.py.
    """
    from .conformance import errors_as_exit_code

    torch.set_num_threads(1)
    with errors_as_exit_code():
        found = check_by_id(check)
        script = None if adapter is None else script_of_failure(found, adapter)
        if adapter is not None and script is None:
            typer.echo(f"{adapter} does not fail {check}; here is the whole check", err=True)
        whole = repro_script(found, first_contract(adapter), adapter or EXAMPLE, None, case_of(check))
        typer.echo(script or whole, nl=False)


def script_of_failure(check: Check, where: str) -> str | None:
    """The script of the first contract under which the check fails."""
    for bench in benches(load_adapter(where)):
        verdict = check(bench)
        if verdict.failed:
            return explain_one(verdict, bench, where, cause=False).script
    return None


def first_contract(where: str | None) -> Contract:
    """The contract that a whole check runs under."""
    return Contract() if where is None else load_adapter(where).capabilities().contracts[0]
