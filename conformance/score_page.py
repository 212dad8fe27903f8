"""The score as a page: `docs/conformance-score.md`."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import groupby

import torch

from .bench import Bench
from .museum import url_of
from .mutants import MUTANTS, Mutant
from .panel import chunk_kernel
from .score import Score
from .score_text import TIERS
from .suite import all_checks

INTRODUCTION = """\
Bugs are planted in emulated kernels, one at a time, and the suite has to see each. The same suite has to pass every
correct kernel of a panel: one false alarm voids the score. A bug counts as seen only by a check that passes the
kernel without it, and not by a crash. An emulated kernel is the chunk form (or the recurrence) in PyTorch, rounded
where hardware rounds; it shares no code with the reference that judges it.

Two things this page cannot say. Every bug of ours was written by somebody who knew the suite, so all of them seen
does not mean all bugs seen. And no emulated kernel has a compiler, tiles or threads: see [known bugs](known-bugs.md)
for what happened to real ones, and [the matrix](conformance-matrix.md) for kernels that were judged."""

STAYS = {  # why a family stays that is alone in seeing no planted bug
    "agreement": "It compares a kernel's contracts and its operations with each other, and fits how errors grow. The "
    "emulated kernels have one contract each, so there is nothing to disagree; real ones have a code path for each.",
    "decode": "A pool of states, drafts and padding belong to no other family.",
    "exact": "Integers leave no tolerance to hide in, and say which element is wrong.",
    "front": "A kernel's own activations belong to no other family.",
    "front_gradients": "A backward through the front end belongs to no other family.",
    "gate": "Exact cases see the same bugs first, but a kernel that takes no gate but its own activation's has no "
    "exact cases. Here each kind of gate has a name, so that the report says which one breaks.",
    "gradients": "A backward belongs to no other family but the identities of `limits`.",
    "keys": "Triangular inverses break on keys that resemble each other, and on nothing else.",
    "limits": "Closed forms need no tolerance of an envelope and no reference: they would still hold if ours were "
    "wrong. For the same reason they see what others see.",
    "packing": "Exact cases pack too, in one call with every kind of segment. Here each kind is alone: a kernel that "
    "hangs or aborts on an empty segment, as public ones did, shows which.",
    "probes": "They see slips far below every limit, such as one number rounded to bf16. Each of the planted ones is "
    "also large enough for some other check, on inputs made for that; a smaller one would not be.",
    "refusals": "Bad input belongs to no other family.",
    "relations": "Bits against the kernel itself: races, strides, neighbours.",
    "shape": "An emulated kernel runs the same code at every length. A real one compiles others for tails, odd "
    "channels and wide heads; four public bugs show at some lengths or widths alone.",
    "short_conv": "The convolution in front of the operator belongs to no other family.",
    "strength": "Exact cases have the strengths 0, 1/2, 1 and 2 too; a kernel with a sigmoid inside has no exact "
    "cases.",
    "values": "Scales and states far from 1, where half precision ends.",
}


def markdown(scores: Sequence[Score], mutants: Sequence[Mutant] = MUTANTS, command: str = "") -> Iterator[str]:
    """A page: figures of each mode, the panel, the matrix of the last score, what its checks are worth."""
    found = scores[-1]
    yield "# How good the judge is"
    yield ""
    yield INTRODUCTION
    yield ""
    yield f"Written by `{command}` on {datetime.date.today().isoformat()} with {versions()}."
    yield ""
    yield from _figures(scores)
    yield from _panel_table(found)
    yield from _matrix(found, mutants)
    yield from _families(found)
    yield from _checks(found)


def versions() -> str:
    """What a measurement ran with."""
    ours = version("kimi-linear-reference")
    return f"kimi-linear-reference {ours}, torch {torch.__version__}, Python {platform.python_version()}"


def _figures(scores: Sequence[Score]) -> Iterator[str]:
    yield "| mode | bugs seen | required | false alarms | not seen |"
    yield "|---|---|---|---|---|"
    for found in scores:
        mode, survivors = "full" if found.full else "quick", ", ".join(found.survivors) or "none"
        share = f"{found.killed} of {len(found.kills)}"
        alarms = f"{len(found.false_alarms)} on {found.kernels} kernels"
        yield f"| {mode} | {share} | {found.required:.0%} | {alarms} | {survivors} |"


def _panel_table(found: Score) -> Iterator[str]:
    yield from ("", "## Correct kernels", "")
    yield "The worst ratio of an error to its rounding envelope; the limits are 4 forward and 8 backward."
    yield ""
    yield "| kernel | checks passed | skipped | worst forward | worst backward |"
    yield "|---|---|---|---|---|"
    for kernel in found.panel:
        ratios = f"{kernel.forward:.2f} | {kernel.backward:.2f}"
        yield f"| {kernel.kernel} | {kernel.passed} | {kernel.skipped} | {ratios} |"


def _matrix(found: Score, mutants: Sequence[Mutant]) -> Iterator[str]:
    yield from ("", "## Bugs", "")
    yield f"How many checks of each tier ({', '.join(TIERS)}) see a bug, and which public bug it was planted after."
    known = [mutant for mutant in mutants if mutant.name in found.kills]
    for group, members in groupby(sorted(known, key=lambda mutant: mutant.group), lambda mutant: mutant.group):
        yield from ("", f"### {group.capitalize()}", "")
        yield f"| bug | what is broken | in | public bug | {' | '.join(TIERS)} |"
        yield f"|---|---|---|---|{'---|' * len(TIERS)}"
        for mutant in members:
            counts = [sum(found.tiers[id] == tier for id in found.kills[mutant.name]) for tier in TIERS]
            yield f"{row(mutant)} {' | '.join(str(n) if n else '' for n in counts)} |"


def row(mutant: Mutant) -> str:
    """A bug's row up to its counts."""
    link = f"[{mutant.link}]({url_of(mutant.link)})" if mutant.link else ""
    return f"| {mutant.name} | {mutant.bug} | {mutant.on} | {link} |"


def _families(found: Score) -> Iterator[str]:
    """What each family sees, and why those stay that see nothing alone."""
    everything, alone, plain = found.by_family(), found.needed_families(found.families), plain_checks()
    without = found.needed_families(plain)
    yield from ("", "## Families", "")
    yield "How many bugs a family sees, and how many no other family sees: of all families, and of those that a plain"
    yield "forward is asked, a kernel without front end, backward, decoding and declared errors."
    yield ""
    yield "| family | bugs | alone | alone, for a plain forward |"
    yield "|---|---|---|---|"
    for family in sorted(set(found.families.values())):
        asked = any(id in plain for id, other in found.families.items() if other == family)
        last = str(len(without.get(family, []))) if asked else "-"
        yield f"| {family} | {everything.get(family, 0)} | {len(alone.get(family, []))} | {last} |"
    yield from ("", "Families that see no bug alone, and why they stay:", "")
    yield from (f"- {family}: {STAYS[family]}" for family in found.redundant_families())


def plain_checks() -> set[str]:
    """The checks that a forward without front end, decoding and declared errors is asked."""
    kernel = chunk_kernel(32, "bf16")
    caps = replace(kernel.capabilities(), operations=("chunk",), front_ends=(), pool=None, refuses=())
    bench = Bench(kernel, caps, kernel.contract)
    return {check.id for check in all_checks() if check.why_not(bench) is None}


def _checks(found: Score) -> Iterator[str]:
    yield from ("", "## Checks", "", "Bugs seen by each tier:")
    yield ", ".join(f"{tier} {found.by_tier().get(tier, 0)}" for tier in TIERS) + "."
    yield from ("", "Checks that are alone in seeing a bug:", "")
    yield from (f"- `{check}`: {', '.join(names)}" for check, names in sorted(found.alone().items()))
    cover = ", ".join(f"`{check}`" for check in found.smallest_cover())
    yield from ("", f"A smallest set of checks that sees all: {cover}.")
