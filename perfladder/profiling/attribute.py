"""`perfladder attribute`: what any trace file tells, ours or anyone's, one rank or several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perfladder.models import SCHEMA_VERSION, Model, ResultWarning
from perfladder.profiling.kernel_evidence import list_synchronizations
from perfladder.profiling.view import render
from perfladder.profiling.warnings import trace_warnings
from perfladder.trace.attribution import Attribution, attribute
from perfladder.trace.copies import CopySite, list_copies
from perfladder.trace.critical import Boundness, find_critical, judge_boundness
from perfladder.trace.kernels import KernelSummary, KernelTable, list_kernels, summarize_kernels
from perfladder.trace.labels import RUN_KIND, decode_label
from perfladder.trace.launches import FamilyRow, summarize_families
from perfladder.trace.model import Trace
from perfladder.trace.operators import OperatorRow, operator_table, top_operators
from perfladder.trace.regions import RegionReport, report_regions
from perfladder.trace.residual import HostParts, IdleSplit, SyncSite, split_window_idle
from perfladder.trace.timeline import Timeline, report_timeline
from perfladder.trace.warnings import WarningCode

_SOURCE = "attribute"


class TraceAnalysis(Model):
    """One trace file.

    Attributes:
        file: The file.
        rank: As the file says; None if it says nothing.
        world_size: As the file says.
        num_events: Number of spans.
        device_types: What the spans ran on.
        device_names: Names of the devices, where the file tells.
        is_host_only: Whether no device worked; the kernels are then operators that call no others.
        kernel_time_us: Sum over all kernels, copies and fills, also those beyond the table.
        kernels: The table, the largest total first.
        families: Kernels by what they do.
        families_by_region: The same by region of the flat set, where the trace has several.
        copies: Copies by kind and call site.
        synchronizations: Where the host waited for a device, by call site.
        bound: Whether host or device sets the pace, by this window alone.
        operators: Operators with the largest host total.
        annotations: Spans that the program named (`record_function`, `ProfilerStep`), host and device rows apart.
        idle: Why the devices were idle over the whole window; None without device work.
        timeline: Devices, streams, copies, communication and its overlap with compute.
        regions: Runs and regions by perfladder's own labels, or in a foreign trace by the profiler's steps and the
            program's annotations; None if there is neither.
        warnings: What a reader must know.
    """

    file: str
    rank: int | None
    world_size: int | None
    num_events: int
    device_types: list[str]
    device_names: list[str]
    is_host_only: bool
    kernel_time_us: float
    kernels: list[KernelSummary]
    families: list[FamilyRow]
    families_by_region: list[FamilyRow]
    copies: list[CopySite]
    synchronizations: list[SyncSite]
    bound: Boundness
    operators: list[OperatorRow]
    annotations: list[OperatorRow]
    idle: IdleSplit | None
    timeline: Timeline
    regions: RegionReport | None
    warnings: list[ResultWarning]


class TraceAnalyses(Model):
    """Several trace files, one a rank."""

    schema_version: int = SCHEMA_VERSION
    traces: list[TraceAnalysis]
    warnings: list[ResultWarning]

    def markdown(self) -> str:
        """Return the analysis as Markdown."""
        return render(self.model_dump(mode="json"), "attribute.md.j2")


def analyse_traces(paths: Sequence[str | Path], *, limit: int = 30) -> TraceAnalyses:
    """Analyse trace files, one after the other so that only one is in memory.

    Args:
        paths: The files.
        limit: Rows of each table.

    Raises:
        TraceError: A file cannot be read at all.
    """
    traces = [analyse_trace(path, limit=limit) for path in paths]
    return TraceAnalyses(
        traces=sorted(traces, key=lambda found: (found.rank is None, found.rank or 0)), warnings=_rank_warnings(traces)
    )


def analyse_trace(path: str | Path, *, limit: int = 30) -> TraceAnalysis:
    """Analyse one trace file.

    Raises:
        TraceError: The file cannot be read at all.
    """
    trace = Trace.read(path)
    attribution = attribute(trace)
    # A trace of ours also holds a warm-up and the gaps between runs; of anyone else's everything counts.
    is_ours = any(label is not None and label.kind == RUN_KIND for label in trace.labels)
    table = list_kernels(trace, attribution, only_runs=is_ours)
    parts = HostParts(trace, attribution)
    idle = split_window_idle(trace, parts)
    report = report_regions(trace, attribution)
    timeline = report_timeline(trace, attribution)
    rows = operator_table(trace, only_runs=is_ours, attribution=attribution)
    has_labels = any(label is not None for label in trace.labels)
    found = [*trace.warnings, *(w for w in report.warnings if has_labels or w.code != WarningCode.NO_RUNS)]
    return TraceAnalysis(
        file=str(path),
        rank=trace.distributed.rank if trace.distributed else None,
        world_size=trace.distributed.world_size if trace.distributed else None,
        num_events=trace.num_events,
        device_types=list(trace.device_types),
        device_names=list(trace.device_names),
        is_host_only=table.is_host,
        kernel_time_us=table.total_us,
        kernels=summarize_kernels(table, limit),
        families=summarize_families(table),
        families_by_region=_families_by_region(table, attribution)[:limit],
        copies=list_copies(table)[:limit],
        synchronizations=list_synchronizations(parts, ~attribution.is_warmup)[:limit],
        bound=judge_boundness(table, find_critical(table, parts), idle),
        operators=top_operators([row for row in rows if _is_operator(row)], "cpu_time_total", limit),
        annotations=_annotations(rows, limit),
        idle=idle,
        timeline=timeline,
        regions=report if report.runs or report.region_tree else None,
        warnings=[*trace_warnings(found), *trace_warnings(timeline.warnings)],
    )


def _families_by_region(table: KernelTable, attribution: Attribution) -> list[FamilyRow]:
    if table.is_host:
        top = attribution.top[table.operator]
    else:
        place = np.searchsorted(table.trace.device_join.event, table.event)
        top = attribution.device_top[place]
    rows = summarize_families(table, top)
    return rows if len({row.region_id for row in rows if row.region_id is not None}) > 1 else []


def _is_operator(row: OperatorRow) -> bool:
    """Whether this is a row of the host that is no annotation and no label of ours; these have tables of their own."""
    return row.device_type == "CPU" and not row.is_annotation and decode_label(row.key) is None


def _annotations(rows: Sequence[OperatorRow], limit: int) -> list[OperatorRow]:
    named = [row for row in rows if row.is_annotation]
    return sorted(named, key=lambda row: -max(row.cpu_time_total_us, row.device_time_total_us or 0.0))[:limit]


def _rank_warnings(traces: Sequence[TraceAnalysis]) -> list[ResultWarning]:
    """Return which ranks are missing, twice there, or unknown, where several were given."""
    ranks = [found.rank for found in traces if found.rank is not None]
    expected = max((found.world_size or 0 for found in traces), default=0)
    missing = sorted(set(range(expected)) - set(ranks))
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    unknown = [found.file for found in traces if found.rank is None] if len(traces) > 1 else []
    messages = {
        "MISSING_RANKS": missing and f"Of {expected} ranks these have no file here: {missing[:20]}.",
        "DUPLICATED_RANKS": twice and f"Several files say they are of ranks {twice[:20]}.",
        "UNKNOWN_RANKS": unknown and f"These files do not say which rank wrote them: {', '.join(unknown[:5])}.",
    }
    return [
        ResultWarning(code=code, message=message, source=_SOURCE)
        for code, message in messages.items()
        if isinstance(message, str)
    ]
