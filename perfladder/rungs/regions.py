"""Rung 2, region attribution: how much time is in which module or method, and how much outside any? Cost: one profiled window."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from pydantic import Field

from perfladder.instrument import instrument
from perfladder.models import Model, ResultWarning
from perfladder.rungs.annotate import Annotator, instrumentation_warnings, region_sites
from perfladder.rungs.base import RungContext, RungResult
from perfladder.rungs.stages import StagesResult
from perfladder.target import LoadedTarget
from perfladder.trace.attribution import attribute
from perfladder.trace.labels import RUN_KIND
from perfladder.trace.operators import OperatorRow, key_averages
from perfladder.trace.regions import RegionNode, RegionReport, RunAttribution, report_regions
from perfladder.trace.residual import HostSplit
from perfladder.trace.timeline import Timeline, report_timeline
from perfladder.trace.warnings import TraceWarning

_MAX_WINDOW_S = 60.0
_US_PER_MS = 1e3
TRACE_FILE = "regions.trace.json"


class RegionsRequest(Model):
    """How long the profiled window is, and where its trace goes."""

    trace_path: str
    runs: int = Field(default=3, gt=0)
    unprofiled_ms: float | None = Field(default=None, description="Median of a run without the profiler, from rung 1.")


class RegionSummary(Model):
    """One region of the flat, non-overlapping set: medians over the profiled runs."""

    region_id: str
    name: str
    module_type: str
    calls_per_run: float
    cpu_ms: float
    cpu_share: float
    device_ms: float | None
    device_share: float | None


class ResidualSummary(Model):
    """What lies outside every region: medians over the profiled runs; `host` is from the median run."""

    cpu_ms: float
    cpu_share: float
    device_ms: float | None
    device_share: float | None
    host: HostSplit


class RegionsResult(RungResult):
    """Where the time of a run is, by module and method."""

    rung: str = "regions"
    num_runs: int = 0
    profiled_ms: float | None = None
    unprofiled_ms: float | None = None
    profiled_ratio: float | None = None
    device_busy_frac: float | None = None
    regions: list[RegionSummary] = []
    residual: ResidualSummary | None = None
    runs: list[RunAttribution] = []
    region_tree: list[RegionNode] = []
    key_averages: dict[str, list[OperatorRow]] = {}
    timeline: Timeline | None = None
    num_events: int = 0
    analysis_s: float | None = None


def run(context: RungContext, request: RegionsRequest | None = None) -> RegionsResult:
    """Profile one window in the broad session; nothing is timed in that process after it."""
    stages = context.result(StagesResult)
    unprofiled_ms = stages.default.wall_ms.summary.p50 if stages else None
    request = request or RegionsRequest(
        trace_path=str(context.folder / TRACE_FILE),
        runs=3 if unprofiled_ms is None else max(1, min(3, int(_MAX_WINDOW_S * 1000 / max(unprofiled_ms, 1e-3)))),
        unprofiled_ms=unprofiled_ms,
    )
    return context.broad.call(measure, request, timeout_s=context.workload.timeout_s)


def measure(loaded: LoadedTarget, request: RegionsRequest) -> RegionsResult:
    """Profile a window of runs with every module and method annotated, and attribute it.

    Raises:
        RungError: The profiler gave nothing, or another one was active.
        WorkloadError: The workload raised.
    """
    from perfladder.trace.record import record_window, span

    sites = region_sites(loaded.obj)
    path = Path(request.trace_path)
    with record_window(path, activities=loaded.activities) as window:
        # One run inside the profiler, before anything is annotated, absorbs its first-use costs.
        _run_once(loaded)
        with instrument(sites, Annotator()) as state:
            for index in range(request.runs):
                loaded.prepare_run()
                with span(RUN_KIND, str(index)):
                    loaded.run()
                    loaded.synchronize()
    start = time.perf_counter()
    trace = window.read()
    attribution = attribute(trace)
    report = report_regions(trace, attribution)
    timeline = report_timeline(trace)
    types = {site.path: site.owner_type for site in state.sites}
    profiled_ms = float(np.median([run.wall_time_us for run in report.runs])) / _US_PER_MS
    return RegionsResult(
        num_runs=len(report.runs),
        profiled_ms=profiled_ms,
        unprofiled_ms=request.unprofiled_ms,
        profiled_ratio=profiled_ms / request.unprofiled_ms if request.unprofiled_ms else None,
        device_busy_frac=_busy_frac(report),
        regions=summarize_regions(report, types),
        residual=_residual(report),
        runs=list(report.runs),
        region_tree=list(report.region_tree),
        key_averages=key_averages(trace, only_runs=True),
        timeline=timeline,
        num_events=trace.num_events,
        analysis_s=round(time.perf_counter() - start, 3),
        artifacts={"trace": path.name},
        warnings=[
            *instrumentation_warnings(state),
            *trace_warnings(trace.warnings),
            *trace_warnings(report.warnings),
            *trace_warnings(timeline.warnings),
        ],
    )


def _run_once(loaded: LoadedTarget) -> None:
    loaded.prepare_run()
    loaded.run()
    loaded.synchronize()


def summarize_regions(report: RegionReport, types: dict[str, str]) -> list[RegionSummary]:
    """Flat regions over all runs, the most expensive first."""
    rows = {row.region_id: row for run in report.runs for row in run.regions}
    summaries = []
    for region_id, row in rows.items():
        found = [next((r for r in run.regions if r.region_id == region_id), None) for run in report.runs]
        there = [r for r in found if r is not None]
        summaries.append(
            RegionSummary(
                region_id=region_id,
                name=row.name,
                module_type=types.get(row.name, ""),
                calls_per_run=sum(r.calls for r in there) / len(found),
                cpu_ms=_median([r.cpu_time_us if r else 0.0 for r in found]) / _US_PER_MS,
                cpu_share=_median([r.cpu_time_fraction if r else 0.0 for r in found]),
                device_ms=_median_or_none([r.device_time_us if r else 0.0 for r in found], _US_PER_MS),
                device_share=_median_or_none([r.device_time_fraction if r else 0.0 for r in found]),
            )
        )
    return sorted(summaries, key=lambda s: -(s.cpu_ms if s.device_ms is None else s.device_ms))


def trace_warnings(warnings: Iterable[TraceWarning]) -> list[ResultWarning]:
    """Warnings of the trace engine as warnings of a result."""
    return [ResultWarning(code=str(w.code), message=w.message, source=w.source) for w in warnings]


def _residual(report: RegionReport) -> ResidualSummary:
    residuals = [run.residual for run in report.runs]
    middle = sorted(residuals, key=lambda r: r.cpu_time_us)[len(residuals) // 2]
    return ResidualSummary(
        cpu_ms=_median([r.cpu_time_us for r in residuals]) / _US_PER_MS,
        cpu_share=_median([r.cpu_time_fraction for r in residuals]),
        device_ms=_median_or_none([r.device_time_us for r in residuals], _US_PER_MS),
        device_share=_median_or_none([r.device_time_fraction for r in residuals]),
        host=middle.host,
    )


def _busy_frac(report: RegionReport) -> float | None:
    fractions = [run.device.busy_us / run.device.window_us for run in report.runs if run.device is not None]
    return _median(fractions) if fractions else None


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _median_or_none(values: list[float | None], divisor: float = 1.0) -> float | None:
    there = [value for value in values if value is not None]
    return _median(there) / divisor if len(there) == len(values) else None
