"""The museum: public bugs, each with the checks that would have shown it. Data in `museum.toml`.

`links` of cases and mutants name bugs as "project #number"; here a name becomes an address and a story, and a bug
gets the checks and mutants that name it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from .mutants import MUTANTS
from .suite import all_checks


@dataclass(frozen=True)
class Bug:
    """One public bug; fields as in `museum.toml`."""

    bug: str
    where: str
    broke: str
    effect: str
    missed: str = ""
    checks: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()

    @property
    def all_checks(self) -> list[str]:
        """The checks named here, then those that link to this bug."""
        linked = [check.id for check in all_checks() if self.bug in check.links]
        return list(dict.fromkeys([*self.checks, *linked]))

    @property
    def mutants(self) -> list[str]:
        """Bugs planted after this one."""
        return [mutant.name for mutant in MUTANTS if mutant.link == self.bug]

    @property
    def url(self) -> str:
        return url_of(self.bug)


def museum() -> list[Bug]:
    """Every bug, in the order of the file."""
    return [_bug(**row) for row in _data()["bugs"]]


def _bug(checks: Sequence[str] = (), tests: Sequence[str] = (), **words: str) -> Bug:
    return Bug(**words, checks=tuple(checks), tests=tuple(tests))


def bug_named(link: str) -> Bug:
    """The bug that a link names; KeyError where the museum has none."""
    for bug in museum():
        if bug.bug == link:
            return bug
    raise KeyError(f"no bug {link!r} in conformance/museum.toml")


def url_of(link: str) -> str:
    """The thread's address. GitHub leads from an issue's address to a pull request's.

    >>> url_of("vllm #41292")
    'https://github.com/vllm-project/vllm/issues/41292'
    """
    project, _, number = link.partition(" #")
    owners = _data()["owners"]
    if project not in owners or not number.isdigit():
        raise ValueError(f"a link must be 'project #number' with a project of conformance/museum.toml; got {link!r}")
    return f"https://github.com/{owners[project]}/{project}/issues/{number}"


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("museum.toml").read_text())
