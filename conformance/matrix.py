"""The conformance matrix: every shipped adapter by every family of checks, from recorded runs.

    rows      families, named by what stands before the first dot of a check's id
    columns   kernels
    cells     the worst ratio to the rounding envelope over all contracts, or "holds" where there is none

A failure is bold with the number of checks that fail; where a run ran out of time, some verdicts are "not run". A run
is recorded as the JSON that `kimi-linear conformance run --json` writes, with the command, the date, the machine and
the versions beside it (`recorded`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .limits import FORWARD_RATIO, GRADIENT_RATIO

ADAPTERS = "kimi_linear.conformance.adapters"
BEGIN, END = "<!-- matrix: generated -->\n", "<!-- matrix: end -->\n"
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\"]+/)+")
KEPT = ("id", "tier", "status", "reason", "ratios", "limit")
FAMILIES = {
    "exact": "integers, bit by bit",
    "relation": "relations between results, bit by bit",
    "limit": "closed forms and identities",
    "shape": "lengths and channels",
    "packing": "packed segments",
    "gate": "gates",
    "strength": "write strengths",
    "keys": "keys",
    "values": "values and states",
    "front": "front end inside",
    "front_gradients": "gradients through the front end",
    "decode": "decoding on a pool",
    "short_conv": "short convolution",
    "gradients": "gradients",
    "agreement": "agreement of contracts and operations",
    "probe": "slips below a tolerance",
    "refusal": "bad input is refused",
}


@dataclass(frozen=True)
class Column:
    """A kernel to judge: where, and how thoroughly; `interpreted` sets TRITON_INTERPRET=1."""

    name: str
    title: str
    adapter: str
    mode: str = "--full"
    device: str = "cpu"
    interpreted: bool = False

    @property
    def command(self) -> str:
        """What was run, or is to be."""
        before = "TRITON_INTERPRET=1 " if self.interpreted else ""
        return f"{before}kimi-linear conformance run {ADAPTERS}.{self.adapter} {self.mode}"

    @property
    def waivers(self) -> tuple[str, str]:
        """Files of known failures, beside the adapters: the first one there counts."""
        return f"{self.name}.waivers", f"{self.adapter.replace(':', '_')}.waivers"


COLUMNS = (
    Column("naive", "recurrence, PyTorch", "naive"),
    Column("chunked", "chunk form, PyTorch", "chunked"),
    Column("triton_chunk", "Triton chunk, interpreted", "triton_chunk", "--quick", interpreted=True),
    Column("triton_recurrent", "Triton recurrent, interpreted", "triton_recurrent", "--quick", interpreted=True),
    Column("triton_decode", "Triton decode, interpreted", "triton_decode", "--quick", interpreted=True),
    Column("triton_short_conv", "Triton convolution, interpreted", "triton_short_conv", "--quick", interpreted=True),
    Column("short_convolution", "convolution, PyTorch", "short_convolution"),
    Column("transformers_torch", "transformers, PyTorch", "transformers_torch"),
    Column("onnx_reference", "ONNX reference evaluator", "onnx_reference"),
    Column("fla_recurrent", "fla recurrent, interpreted", "fla_recurrent", "--quick", interpreted=True),
    Column("triton_chunk_gpu", "Triton chunk", "triton_chunk", device="cuda"),
    Column("triton_recurrent_gpu", "Triton recurrent", "triton_recurrent", device="cuda"),
    Column("triton_decode_gpu", "Triton decode", "triton_decode", device="cuda"),
    Column("triton_short_conv_gpu", "Triton convolution", "triton_short_conv", device="cuda"),
    Column("fla_chunk_any_gate_gpu", "fla chunk", "fla_chunk:any_gate", device="cuda"),
    Column("fla_chunk_safe_gate_gpu", "fla chunk, safe_gate", "fla_chunk:safe_gate", device="cuda"),
    Column("fla_recurrent_gpu", "fla recurrent", "fla_recurrent", device="cuda"),
    Column("flash_kda_gpu", "FlashKDA", "flash_kda", device="cuda"),
)


def recorded(column: Column, report: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """A report cut to what the matrix shows, with where and when it was made."""
    verdicts = [{name: verdict[name] for name in KEPT} for verdict in report["verdicts"]]
    verdicts = [verdict | {"reason": without_folders(verdict["reason"])} for verdict in verdicts]
    kept: dict[str, Any] = {name: report[name] for name in ("identity", "versions") if name in report}
    missing = sum(verdict["status"] == "not run" for verdict in verdicts)
    about = about | ({"not_run": missing} if missing else {})
    return {"column": column.name, "command": column.command, **about, **kept, "verdicts": verdicts}


def without_folders(text: str) -> str:
    """Absolute paths cut to the name of the file: a record says nothing of the folders of a machine."""
    return ABSOLUTE.sub("", text)


def dump(record: dict[str, Any]) -> str:
    """A record as JSON with a verdict a line, so that two runs compare line by line."""
    head = {name: value for name, value in record.items() if name != "verdicts"}
    if "verdicts" not in record:
        return json.dumps(head, indent=1) + "\n"
    lines = ",\n  ".join(json.dumps(verdict) for verdict in record["verdicts"])
    return json.dumps(head, indent=1)[:-2] + f',\n "verdicts": [\n  {lines}\n ]\n}}\n'


def read_records(folder: Path) -> dict[str, dict[str, Any]]:
    """Recorded runs by column. Raises ValueError where a file is none."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        if not isinstance(record, dict) or not {"column", "command", "date"} <= record.keys():
            raise ValueError(f"{path} must be a recorded run with column, command and date")
        found[record["column"]] = record
    return found


def cell(verdicts: Iterable[dict[str, Any]]) -> str:
    """One family of one kernel."""
    verdicts = list(verdicts)
    judged = [verdict for verdict in verdicts if verdict["status"] in ("pass", "fail", "waived")]
    if any(verdict["status"] == "not run" for verdict in verdicts):
        return f"{cell(judged)} (in part)" if judged else "not run"
    if not judged:
        return "-"
    worst = max((_number(ratio) for verdict in judged for ratio in verdict["ratios"].values()), default=None)
    failed = len({verdict["id"] for verdict in judged if verdict["status"] != "pass"})
    if not failed:
        return "holds" if worst is None else f"{worst:.2f}"
    return f"**{failed} fail**" if worst is None else f"**{worst:.3g}, {failed} fail**"


def _number(ratio: float | str) -> float:
    """A ratio as reports write it; NaN is as bad as infinity."""
    return float("inf") if ratio == "nan" else float(ratio)


def family_of(verdict: dict[str, Any]) -> str:
    """What stands before the first dot of a check's id."""
    return str(verdict["id"].partition(".")[0])


def families(records: dict[str, dict[str, Any]]) -> list[str]:
    """Families of recorded checks, those with a title first."""
    found = {family_of(verdict) for record in records.values() for verdict in record.get("verdicts", ())}
    return [family for family in FAMILIES if family in found] + sorted(found - FAMILIES.keys())


def table(columns: list[Column], records: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Families by kernels, as Markdown."""
    yield "| | " + " | ".join(column.title for column in columns) + " |"
    yield "|---|" + "---|" * len(columns)
    for family in families(records):
        cells = [_cell_of(records.get(column.name), family) for column in columns]
        yield f"| {FAMILIES.get(family, family)} (`{family}`) | " + " | ".join(cells) + " |"
    yield (
        "| checks passed / failed / not declared | "
        + " | ".join(_counts(records.get(c.name)) for c in columns)
        + " |"
    )


def _cell_of(record: dict[str, Any] | None, family: str) -> str:
    if record is None or "verdicts" not in record:
        return "not run yet" if record is None else "not run"
    return cell(verdict for verdict in record["verdicts"] if family_of(verdict) == family)


def _counts(record: dict[str, Any] | None) -> str:
    if record is None or "verdicts" not in record:
        return "not run yet" if record is None else "not run"
    count = [v["status"] for v in record["verdicts"]]
    missing = f", {count.count('not run')} not run" if "not run" in count else ""
    return f"{count.count('pass')} / {count.count('fail') + count.count('waived')} / {count.count('skip')}{missing}"


def failures(columns: list[Column], records: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Every check that fails, with its reason."""
    for column in columns:
        verdicts = records.get(column.name, {}).get("verdicts", ())
        red = [verdict for verdict in verdicts if verdict["status"] in ("fail", "waived")]
        lines = (f"- {column.title}, `{verdict['id']}`: {' '.join(verdict['reason'].split())}" for verdict in red)
        yield from dict.fromkeys(lines)


def runs(columns: list[Column], records: dict[str, dict[str, Any]]) -> Iterator[str]:
    """What was run where and when."""
    yield "| kernel | ran | date | machine | command |"
    yield "|---|---|---|---|---|"
    for column in columns:
        record = records.get(column.name)
        ran = "not run yet" if record is None else record.get("identity") or f"not run: {record['problem']}"
        date, machine = ("", "") if record is None else (record["date"], record["machine"])
        machine += f"; {record['note']}" if record is not None and "note" in record else ""
        yield f"| {column.title} | {ran} | {date} | {machine} | `{column.command}` |"


def page(records: dict[str, dict[str, Any]]) -> str:
    """What stands between the markers of docs/conformance-matrix.md."""
    parts = []
    for device, title in (("cpu", "On a CPU"), ("cuda", "On a GPU")):
        columns = [column for column in COLUMNS if column.device == device]
        blocks = [[f"## {title}"]]
        if any("verdicts" in records.get(column.name, {}) for column in columns):
            blocks += [list(table(columns, records)), list(failures(columns, records)) or ["No check fails."]]
        parts += ["\n".join(block) for block in [*blocks, runs(columns, records)]]
    limits = f"Limits: {FORWARD_RATIO:g} for outputs and states, {GRADIENT_RATIO:g} for gradients.\n"
    return limits + "\n" + "\n\n".join(parts) + "\n"


def with_page(document: str, page: str) -> str:
    """A document with what stands between its markers replaced. Raises ValueError where it has none."""
    if BEGIN not in document or END not in document:
        raise ValueError(f"the document must hold the lines {BEGIN.strip()!r} and {END.strip()!r}")
    return document.partition(BEGIN)[0] + BEGIN + page + END + document.partition(END)[2]
