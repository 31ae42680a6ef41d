"""One table of a run by its name, sorted, filtered and cut: for a reader who needs three rows, not the whole report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel

from perfladder.errors import InputError
from perfladder.ladder import load_results
from perfladder.markdown import table as markdown_table
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.report.model import build_report
from perfladder.rundir import RunDirectory
from perfladder.rungs.base import RungResult
from perfladder.stats import Samples, Summary
from perfladder.text import near_names

Row = dict[str, str | int | float | bool | None]

_KEPT_OF_SUMMARY = ("p50", "p95")


class Table(NamedTuple):
    """Where the rows of a table stand in the results.

    Attributes:
        rung: The rung whose result has them; None for tables over all rungs.
        fields: Dotted paths of lists, or of single rows.
        about: What it shows.
        columns: Those shown where not all are asked for; none: all.
    """

    rung: str | None
    fields: tuple[str, ...]
    about: str
    columns: tuple[str, ...] = ()


TABLES: Mapping[str, Table] = {
    "findings": Table(None, (), "every finding, with its next command"),
    "rungs": Table(None, (), "how each rung ended"),
    "warnings": Table(None, (), "every warning, with the rung that gave it"),
    "stages": Table(
        "stages",
        ("scenarios.stages",),
        "time of each stage a run",
        (
            "scenario",
            "name",
            "calls_per_run",
            "self_ms.p50",
            "self_ms.p95",
            "device_self_ms.p50",
            "share",
            "share_interval.low",
            "share_interval.high",
        ),
    ),
    "load": Table("stages", ("concurrency",), "requests at once"),
    "regions": Table(
        "regions", ("regions", "residual"), "time of each module that does not contain another of the list"
    ),
    "modules": Table("regions", ("region_tree",), "the tree of all modules, with and without those inside"),
    "replays": Table("harness", ("calls",), "each captured call, replayed"),
    "kernels": Table(
        "kernels",
        ("positions.kernels",),
        "kernels by operator and module, repeated modules together, of one replayed call",
        (
            "kernel",
            "family",
            "operator",
            "function",
            "launch_site",
            "region",
            "num_modules",
            "count",
            "total_us",
            "share",
            "possible_win_us",
        ),
    ),
    "operators": Table("kernels", ("by_operator",), "kernel time by operator"),
    "functions": Table("kernels", ("by_function",), "kernel time by the call of torch.nn.functional that launched it"),
    "blocks": Table("kernels", ("positions.by_block",), "kernel time by block of the model, repeated blocks together"),
    "families": Table("kernels", ("families",), "kernel time by what the kernels do"),
    "waits": Table("kernels", ("synchronizations",), "where the stage made the host wait"),
    "copies": Table("kernels", ("copies",), "copies, by kind and call site"),
    "roofline": Table("kernels", ("positions.roofline",), "work done against the device's peaks"),
    "wins": Table("kernels", ("operator_ranking",), "operators by what they could win at most"),
    "places": Table("kernels", ("positions.ranking",), "the same by operator and module, repeated modules together"),
    "launches": Table("ncu", ("launches",), "launches that Nsight Compute measured"),
}


class ShownTable(Model):
    """Rows of one table of a run."""

    schema_version: int = SCHEMA_VERSION
    run_dir: str
    table: str
    source: str | None
    num_rows: int
    rows: list[dict[str, str | int | float | bool | None]]


def show_table(
    run_dir: Path,
    name: str,
    *,
    top: int | None = None,
    sort: str | None = None,
    contains: str | None = None,
    all_columns: bool = False,
) -> ShownTable:
    """Read one table of a run.

    Args:
        run_dir: The run.
        name: One of `TABLES`.
        top: At most so many rows.
        sort: Column to order by, the largest first; by default the order of the result.
        contains: Text that a row must have in one of its columns.
        all_columns: Every column that the result has, not the usual ones only.

    Raises:
        InputError: There is no such run, table or column, or its rung has no result.
    """
    if name not in TABLES:
        raise InputError(f"There is no table {name!r}. {near_names(name, list(TABLES), 'tables')}")
    run, place = RunDirectory.open(run_dir), TABLES[name]
    results = load_results(run)
    source = None
    if place.rung is not None:
        _require(results, place.rung, name)
        entry = next(entry for entry in run.record.rungs if entry.name == place.rung)
        source = f"{entry.folder}/{entry.name}.json"
        rows = [row for field in place.fields for row in _rows_at(results[place.rung], field.split("."))]
    else:
        rows = _over_all_rungs(run_dir, name, results)
    if contains:
        wanted = contains.lower()
        rows = [row for row in rows if any(wanted in str(value).lower() for value in row.values())]
    if sort:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        if sort not in columns:
            raise InputError(f"--sort: {name} has no column {sort!r}. {near_names(sort, columns, 'columns')}")
        rows.sort(key=lambda row: _order(row.get(sort)), reverse=True)
    shown = _without_empty(rows[:top])
    if place.columns and not all_columns:
        shown = [{name: row[name] for name in place.columns if name in row} for row in shown]
    return ShownTable(run_dir=str(run_dir), table=name, source=source, num_rows=len(rows), rows=shown)


def list_tables(run_dir: Path) -> ShownTable:
    """The tables there are, each with what it shows and whether this run has it."""
    status = {entry.name: entry.status for entry in RunDirectory.open(run_dir).record.rungs}
    rows: list[Row] = [
        {
            "table": name,
            "shows": place.about,
            "status": "done" if place.rung is None else status.get(place.rung, "no rung"),
        }
        for name, place in TABLES.items()
    ]
    return ShownTable(run_dir=str(run_dir), table="tables", source=None, num_rows=len(rows), rows=rows)


def render_table(found: ShownTable) -> str:
    """The rows as a Markdown table."""
    columns = list(dict.fromkeys(key for row in found.rows for key in row))
    lines = [[_shown(row.get(column)) for column in columns] for row in found.rows]
    left_out = f"\n{found.num_rows - len(found.rows)} more." if found.num_rows > len(found.rows) else ""
    source = f"\nFrom {found.source} in {found.run_dir}." if found.source else ""
    return (markdown_table(columns, lines) if columns else f"No {found.table}.") + f"\n{left_out}{source}"


def _require(results: Mapping[str, RungResult], rung: str, name: str) -> None:
    result = results.get(rung)
    if result is None:
        raise InputError(f"{name}: this run has no rung {rung}: it was not climbed.")
    if result.status != "done":
        raise InputError(f"{name}: the rung {rung} of this run is {result.status}: {result.reason}")


def _over_all_rungs(run_dir: Path, name: str, results: Mapping[str, RungResult]) -> list[Row]:
    if name == "warnings":
        return [
            {"rung": rung, "code": warning.code, "message": warning.message}
            for rung, result in results.items()
            for warning in result.warnings
        ]
    report = build_report(run_dir)
    if name == "rungs":
        return [
            {"rung": line.name, "status": line.status, "duration_s": line.duration_s, "reason": line.reason}
            for line in report.rungs
        ]
    return [
        {
            "kind": finding.kind,
            "rung": finding.rung,
            "stage": finding.stage,
            "claim": finding.claim,
            "next_experiment": finding.next_experiment,
            "next_command": finding.next_command,
        }
        for finding in report.findings
    ]


def _rows_at(owner: Any, path: Sequence[str]) -> Iterator[Row]:
    """Rows below a model; those of a tree come with their depth, a node before what is in it."""
    found = getattr(owner, path[0])
    for item in found if isinstance(found, list | tuple) else [] if found is None else [found]:
        if len(path) > 1:
            inner = list(_rows_at(item, path[1:]))
            label = getattr(item, "name", None)
            yield from ({"scenario": label, **row} for row in inner) if label else inner
        else:
            yield from _tree_rows(item, 0)


def _tree_rows(item: Any, depth: int) -> Iterator[Row]:
    children = getattr(item, "children", None)
    if children is None:
        yield _flat(item)
        return
    yield {"depth": depth, **_flat(item)}
    for child in children:
        yield from _tree_rows(child, depth + 1)


def _flat(item: Any, prefix: str = "") -> Row:
    """The plain values of a model, nested ones by dotted names; of samples two percentiles, of lists nothing."""
    if isinstance(item, Samples):
        item = item.summary
    names = _KEPT_OF_SUMMARY if isinstance(item, Summary) else tuple(type(item).model_fields)
    row: Row = {}
    for name in names:
        value = getattr(item, name)
        if isinstance(value, str | int | float | bool) or value is None:
            row[prefix + name] = value
        elif isinstance(value, BaseModel):
            row |= _flat(value, f"{prefix}{name}.")
    return row


def _without_empty(rows: list[Row]) -> list[Row]:
    """Columns that no row has anything in are left out."""
    kept = {key for row in rows for key, value in row.items() if value is not None and value != ""}
    return [{key: value for key, value in row.items() if key in kept} for row in rows]


def _order(value: Any) -> tuple[int, float, str]:
    if isinstance(value, int | float):
        return (1, float(value), "")
    return (0, 0.0, "" if value is None else str(value))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value)
