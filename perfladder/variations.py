"""Many climbs from few words: workloads, and fields of them that vary; and what they found, side by side.

A workload's own `sweep` has one input at several values in one process. Here each combination is a run of its own, so
that anything may vary, what is loaded too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue

from perfladder.changes import with_fields
from perfladder.errors import InputError
from perfladder.files import write_atomically
from perfladder.findings import Finding
from perfladder.markdown import cell
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.sweep import plain_value
from perfladder.timing.results import MetricValue
from perfladder.workload import Workload, WorkloadFile

Runner = Literal["threads", "ray", "dask"]


class Member(Model):
    """One climb of a sweep."""

    number: int = Field(ge=1)
    source: str
    changes: dict[str, JsonValue] = Field(description="The fields that vary, with its own values.")
    workload: Workload
    base_dir: str

    @property
    def label(self) -> str:
        """The workload's name and its own values, as in `toy: measured_runs 3`."""
        values = ", ".join(f"{path.rpartition('.')[2]} {_shown(value)}" for path, value in self.changes.items())
        return f"{self.workload.name}: {values}" if values else self.workload.name


class MemberResult(Model):
    """How one climb ended, and the number that matters."""

    number: int
    label: str
    source: str
    changes: dict[str, JsonValue]
    status: Literal["done", "failed", "interrupted"]
    exit_code: int
    host_name: str = Field(description="The machine that it ran on.")
    run_dir: str | None = Field(default=None, description="None: it ended before there was one.")
    metric: MetricValue | None = Field(default=None, description="None: rung 1 has measured nothing.")
    findings: list[Finding] = []
    error: str | None = None


class SweepResult(Model):
    """The climbs of a sweep side by side, in the order in which they were asked for."""

    schema_version: int = SCHEMA_VERSION
    folder: str
    runner: Runner
    members: list[MemberResult]

    @property
    def exit_code(self) -> int:
        """0: all are done; that of the first, where all have failed; else 5."""
        codes = [member.exit_code for member in self.members]
        if not any(codes):
            return 0
        return codes[0] if all(member.status != "done" for member in self.members) else 5


def plan_members(files: Sequence[tuple[str, WorkloadFile]], vary: Mapping[str, Sequence[JsonValue]]) -> list[Member]:
    """Every workload with every combination of the fields that vary, the last field changing fastest.

    Args:
        files: Each with what the user called it.
        vary: Values by field, which may be dotted.

    Raises:
        InputError: A field has no value, or one twice, or a workload is not valid with one.
    """
    for path, values in vary.items():
        if not values or any(value in values[:place] for place, value in enumerate(values)):
            raise InputError(f"vary.{path}: expected one value or more, each once; not {list(values)!r}.")
    made = []
    for source, file in files:
        for values in itertools.product(*vary.values()):
            changes = dict(zip(vary, values, strict=True))
            named = ", ".join(f"{path} = {_shown(value)}" for path, value in changes.items())
            changed = with_fields(file, changes, what=f"{source} with {named}")
            made.append((source, changes, changed))
    return [
        Member(number=number, source=source, changes=changes, workload=file.workload, base_dir=str(file.base_dir))
        for number, (source, changes, file) in enumerate(made, 1)
    ]


def sweep_rows(result: SweepResult) -> list[dict[str, str]]:
    """One row a climb; no ratio between them, for two single runs prove none."""
    return [
        {
            "#": str(member.number),
            "workload": member.label,
            "status": member.status if member.exit_code == 0 else f"{member.status} ({member.exit_code})",
            "metric": _metric(member.metric),
            "interval": _interval(member.metric),
            "first finding": member.findings[0].claim if member.findings else member.error or "-",
            "machine": member.host_name,
            "run": member.run_dir or "-",
        }
        for member in result.members
    ]


def render_sweep(result: SweepResult) -> str:
    """The table, and where everything is."""
    rows = sweep_rows(result)
    lines = [_line(rows[0]), _line(["---"] * len(rows[0])), *(_line(row.values()) for row in rows)]
    note = "Each row is one run; `perfladder compare` tells whether two versions differ."
    return "\n".join([*lines, "", note, "", f"In {result.folder}."])


def write_sweep(result: SweepResult, folder: Path) -> None:
    """Write `sweep.json` and `sweep.md`."""
    write_atomically(folder / "sweep.json", result.model_dump_json(indent=1))
    write_atomically(folder / "sweep.md", render_sweep(result) + "\n")


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(cell, cells)) + " |"


def _shown(value: JsonValue) -> str:
    return plain_value(value) or repr(value)[:40]


def _metric(metric: MetricValue | None) -> str:
    return "-" if metric is None else f"{metric.name} {metric.value:.4g} {metric.unit}"


def _interval(metric: MetricValue | None) -> str:
    if metric is None or metric.interval is None:
        return "-"
    return f"{metric.interval.low:.4g} to {metric.interval.high:.4g} {metric.unit}"
