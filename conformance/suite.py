"""The whole suite as a list of checks, and a run of it over one adapter.

Tiers in the order in which they run: exact (bits against integers), relation (bits against the kernel itself),
limit (closed forms and identities), ratio (the catalogue against envelopes), probe (directions and bit patterns).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from . import (
    agreement,
    decode,
    fitting,
    front_forms,
    gradient_forms,
    memory_relations,
    packed_relations,
    refusals,
    relations,
    short_conv,
)
from .adapter import Adapter, AnyCall, BadAdapterError, checked_capabilities
from .bench import BASE, Bench, RelationBroken
from .cases import Case
from .catalogue import subset
from .closed_forms import CLOSED_FORMS, ClosedForm
from .guard import KernelFailure, guarded_run, runs_the_reference
from .integers import integer_truth
from .limits import CASE_SECONDS
from .precision import DTYPES
from .probes import BITS_COMMENT, PROBES, Probe, run_bits, run_probe
from .problem import Problem, problem_of, problems_of
from .record import Record
from .relation import RELATIONS, Relation, why_not
from .verdict import Verdict, judge_bits, judge_by_ratio

REFERENCE_NAME = "kimi_linear.reference"
RELATION_MODULES = (
    relations,
    packed_relations,
    memory_relations,
    agreement,
    decode,
    refusals,
    short_conv,
)  # each adds to RELATIONS
CLOSED_FORM_MODULES = (gradient_forms, front_forms)  # each adds to CLOSED_FORMS


@dataclass(frozen=True)
class Check:
    """One line of the report: a case of the catalogue, a relation, a closed form or a probe."""

    id: str
    tier: str
    family: str
    comment: str
    judge: Callable[[Bench], Verdict]
    why_not: Callable[[Bench], str | None]
    effect: str = ""
    links: tuple[str, ...] = ()
    quick: bool = True

    def __call__(self, bench: Bench) -> Verdict:
        """The verdict, whatever the kernel does."""
        reason = self.why_not(bench)
        if reason is not None:
            return Verdict(self.id, self.tier, "skip", reason, contract=bench.contract)
        try:
            return self.judge(bench)
        except (KernelFailure, RelationBroken) as error:
            return Verdict(self.id, self.tier, "fail", str(error), contract=bench.contract)


@dataclass
class Report:
    """What a run found, in order; `missing` counts the checks that an interrupt left out."""

    identity: str
    verdicts: list[Verdict] = field(default_factory=list)
    missing: int = 0

    def count(self, status: str) -> int:
        return sum(verdict.status == status for verdict in self.verdicts)

    @property
    def ok(self) -> bool:
        return not self.count("fail") and not self.missing


def all_checks(full: bool = True, price: bool = True) -> list[Check]:
    """Every check, or those of a quick run; `price`: cases with ratio_rec."""
    ours = [case_check(case, price) for case in subset(full)]
    exact = [check for check in ours if check.tier == "exact"]
    others = [check for check in ours if check.tier != "exact"]
    kept = [relation for relation in RELATIONS if full or relation.quick]
    bits = Check("probe.bits", "probe", "probes", BITS_COMMENT, run_bits, _whole_sequences)
    checks = [*exact, *map(_relation_check, kept), *map(_closed_form_check, CLOSED_FORMS), *others]
    return [*checks, *map(_probe_check, PROBES), bits]


def check_by_id(id: str) -> Check:
    """The check of that id."""
    for check in all_checks():
        if check.id == id:
            return check
    raise KeyError(f"no check {id}; `kimi-linear conformance list` shows them all")


def benches(adapter: Adapter, full: bool = True, seconds: float = CASE_SECONDS) -> list[Bench]:
    """The adapter under each of its contracts, or under the first."""
    caps = checked_capabilities(adapter)
    return [Bench(adapter, caps, contract, seconds) for contract in (caps.contracts if full else caps.contracts[:1])]


def run_suite(
    adapter: Adapter,
    full: bool = True,
    only: Iterable[str] = (),
    waivers: dict[str, str] | None = None,
    seconds: float = CASE_SECONDS,
    tell: Callable[[str], None] = lambda line: None,
    record: Record | None = None,
) -> Report:
    """Judge an adapter by every check that it declares. Raises BadAdapterError before the first.

    With a record, verdicts that it holds are taken from it. An interrupt ends the run; what was found stays.
    """
    found = benches(adapter, full, seconds)
    report = Report(checked_identity(adapter, found[0]))
    if record is not None:
        record.begin(report.identity)
    chosen = [check for check in all_checks(full) if not set(only) or check.id in set(only)]
    planned = [(check, bench) for bench in found for check in chosen]
    try:
        for check, bench in planned:
            tell(f"{check.id} ({bench.contract})")
            verdict = check(bench) if record is None else record.judge(check, bench)
            report.verdicts.append(waived(verdict, waivers or {}))
    except KeyboardInterrupt:
        report.missing = len(planned) - len(report.verdicts)
    return report


def waived(verdict: Verdict, waivers: dict[str, str]) -> Verdict:
    """A failure that a waiver names is waived; a waiver of something that passes is a failure itself."""
    reason = next((reason for name, reason in waivers.items() if _names(name, verdict)), None)
    if reason is None or verdict.status not in ("pass", "fail"):
        return verdict
    if verdict.failed:
        return replace(verdict, status="waived", reason=f"{reason} ({verdict.reason})")
    return replace(verdict, status="fail", reason=f"passes, though a waiver says: {reason}. Remove the waiver")


def _names(waiver: str, verdict: Verdict) -> bool:
    """Whether a waiver, "CHECK" or "CHECK @ CONTRACT", is about this check under this contract."""
    id, _, contract = waiver.partition(" @ ")
    return id == verdict.id and str(verdict.contract).startswith(contract)


def checked_identity(adapter: Adapter, bench: Bench) -> str:
    """What the adapter says it runs; refused where it runs this repository's reference and does not say so."""
    identity = adapter.identity()
    if not isinstance(identity, str) or not identity.strip():
        raise BadAdapterError(f"identity() must name the code that runs; got {identity!r}")
    entered = runs_the_reference(adapter, _first_call(bench), frozenset(("o", "final_state")), bench.seconds)
    if entered is not None and REFERENCE_NAME not in identity:
        raise BadAdapterError(
            f"the adapter calls {REFERENCE_NAME} ({entered}) and says it is {identity!r}: "
            f"a comparison of the reference with itself proves nothing"
        )
    return identity


def _first_call(bench: Bench) -> AnyCall:
    """A call as any other, to see what runs."""
    if bench.caps.whole_sequences:
        return bench.problem(bench.case(B=1, T=5)).call
    return decode.first_call(bench) if bench.caps.pool is not None else short_conv.conv_call(bench)


def _whole_sequences(bench: Bench) -> str | None:
    return None if bench.caps.whole_sequences else "whole sequences are not declared"


def case_check(case: Case, price: bool = True) -> Check:
    """The check of a case, of the catalogue or any other; `price`: with ratio_rec."""
    tier = "exact" if case.has("exact") else "ratio"
    judge = partial(_judge_case, case, price)
    return Check(
        case.id, tier, case.family, case.comment, judge,
        lambda bench: fitting.why_not(case, bench.caps, bench.contract),
        case.effect, case.links, case.has("quick"),
    )  # fmt: skip


def _judge_case(case: Case, price: bool, bench: Bench) -> Verdict:
    if case.has("acceptable"):
        return _judge_acceptable(case, bench)
    verdicts = [_judge_problem(problem, price, bench) for problem in problems_of(case, bench.caps, bench.contract)]
    return max(verdicts, key=lambda verdict: (verdict.failed, verdict.worst))


def _judge_problem(problem: Problem, price: bool, bench: Bench) -> Verdict:
    case = problem.case
    got = guarded_run(bench.adapter, problem, bench.caps, seconds=bench.seconds, finite=False)
    if not case.has("exact"):
        return judge_by_ratio(got, problem, case.id, "ratio", price)
    want = integer_truth(problem)
    want["o"] = want["o"].to(DTYPES[bench.contract.io]).double()
    return judge_bits(got, want, problem, case.id, "exact")


def _judge_acceptable(case: Case, bench: Bench) -> Verdict:
    """A case that a kernel may refuse or get wrong: reported, never failed."""
    problem = problem_of(case, bench.caps, bench.contract)
    exact = problem_of(case, bench.caps, replace(bench.contract, decay="sums"))
    try:
        got = guarded_run(bench.adapter, problem, bench.caps, seconds=bench.seconds)
        verdict = judge_by_ratio(got, exact, case.id, "ratio")
    except KernelFailure as error:
        verdict = Verdict(case.id, "ratio", "fail", str(error), contract=bench.contract)
    return replace(verdict, status="acceptable") if verdict.failed else verdict


def _relation_check(relation: Relation) -> Check:
    def judge(bench: Bench) -> Verdict:
        return relation.check(bench) or Verdict(relation.id, relation.tier, "pass", contract=bench.contract)

    comment = (relation.check.__doc__ or "").strip()
    return Check(
        relation.id, relation.tier, relation.family, comment, judge,
        lambda bench: why_not(relation, bench), relation.catches, relation.links, relation.quick,
    )  # fmt: skip


def _closed_form_check(form: ClosedForm) -> Check:
    comment = (form.judge.__doc__ or "").strip()

    def why_not(bench: Bench) -> str | None:
        case = replace(BASE, **form.knobs)  # type: ignore[arg-type]
        return fitting.why_not(case, bench.caps, bench.contract)

    return Check(form.id, "limit", "limits", comment, form, why_not, form.catches)


def _probe_check(probe: Probe) -> Check:
    def why_not(bench: Bench) -> str | None:
        return probe.why_not(bench) or _whole_sequences(bench)

    return Check(probe.id, "probe", "probes", probe.catches, partial(run_probe, probe), why_not)
