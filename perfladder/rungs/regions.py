"""Rung 2, region attribution: which module or method holds the time, and how much is outside? Cost: one window."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from perfladder.models import Model, ResultWarning
from perfladder.rungs.base import RungContext, RungResult
from perfladder.rungs.cost import CostEstimate
from perfladder.rungs.stages import StagesResult
from perfladder.sites import resolve_sites
from perfladder.target import LoadedTarget
from perfladder.timing.ranks import merge_warnings
from perfladder.trace.copies import CopySite, list_copies
from perfladder.trace.kernels import list_kernels
from perfladder.trace.lanes import RunLanes, lay_out_run
from perfladder.trace.operators import OperatorRow
from perfladder.trace.regions import RegionNode, RegionReport, RunAttribution, middle_run
from perfladder.trace.residual import HostSplit
from perfladder.trace.timeline import Timeline
from perfladder.trace.waits import WaitModel, model_run_waits

if TYPE_CHECKING:
    from perfladder.profiling.window import ProfiledRuns

_MAX_PLAIN_BYTES = 32 << 20
_MAX_WINDOW_S = 60.0
_US_PER_MS = 1e3
_PROFILED_RATIO = 2.0
"""Of a profiled run to a plain one: 1.3 to 1.9 on host-bound pipelines."""
_ANALYSIS_S = 2.0
"""Starting the profiler for the first time in a process, and reading a small trace."""
TRACE_FILE = "regions.trace.json"


class RegionsRequest(Model):
    """How long the profiled window is, and where its trace goes."""

    trace_path: str
    runs: int = Field(default=3, gt=0)
    unprofiled_ms: float | None = Field(default=None, description="Median of a run without the profiler, from rung 1.")
    memory_limit_bytes: int | None = Field(
        default=None, gt=0, description="How much the process may grow; None: half of what is free, 4 GiB at most."
    )
    stages: list[str] = Field(default=[], description="Stages of rung 1 that are no modules: regions too.")
    shown_rank: int = Field(default=0, description="Whose tables to show, where there are several ranks.")


class RegionSummary(Model):
    """One region of the flat, non-overlapping set: means over the profiled runs."""

    region_id: str
    name: str
    module_type: str
    calls_per_run: float
    cpu_ms: float
    cpu_share: float
    device_ms: float | None
    device_share: float | None


class ResidualSummary(Model):
    """What lies outside every region: means over the profiled runs; `host` is from the median run."""

    cpu_ms: float
    cpu_share: float
    device_ms: float | None
    device_share: float | None
    host: HostSplit


class RankRegions(Model):
    """What one of several ranks saw; its trace is a file of its own in the same folder."""

    rank: int
    is_shown: bool = Field(description="Whether the rung's own tables are of this rank: the slowest in rung 1.")
    trace: str
    profiled_ms: float | None
    device_busy_ms: float | None
    residual_share: float | None
    regions: list[RegionSummary]


class RegionsResult(RungResult):
    """Where the time of a run is, by module and method."""

    rung: str = "regions"
    num_runs: int = 0
    profiled_ms: float | None = None
    unprofiled_ms: float | None = None
    profiled_ratio: float | None = None
    device_busy_ms: float | None = Field(default=None, description="Any kernel, copy or fill at work, a run.")
    regions: list[RegionSummary] = Field(default_factory=list)
    residual: ResidualSummary | None = None
    runs: list[RunAttribution] = Field(default_factory=list)
    region_tree: list[RegionNode] = Field(default_factory=list)
    lanes: RunLanes | None = Field(default=None, description="The run of median duration over time, region by region.")
    key_averages: dict[str, list[OperatorRow]] = Field(default_factory=dict)
    timeline: Timeline | None = None
    copies: list[CopySite] = Field(default=[], description="Of a run, by kind and call site.")
    waits: WaitModel | None = Field(
        default=None, description="What the host's waits cost in a plain run; None where that cannot be modelled."
    )
    num_events: int = 0
    analysis_s: float | None = None
    ranks: list[RankRegions] = Field(
        default_factory=list, description="Where there are several ranks; all else here is then of the one shown."
    )

    @classmethod
    def of_ranks(cls, results: Sequence[RegionsResult]) -> RegionsResult:
        """The regions of the rank that is shown, with the trace of every rank."""
        ranks = [own for result in results for own in result.ranks]
        shown = next(result for result in results if result.ranks[0].is_shown)
        return shown.model_copy(
            update={
                "ranks": ranks,
                "artifacts": shown.artifacts | {f"trace_rank{own.rank}": own.trace for own in ranks},
                "warnings": merge_warnings([result.warnings for result in results]),
            }
        )


def estimate(context: RungContext) -> CostEstimate:
    """Profiled runs, and reading their trace; how many events they make is not known."""
    stages = context.result(StagesResult)
    if stages is None:
        return CostEstimate(basis="profiled runs of unknown duration")
    run_ms = stages.default.wall_ms.summary.p50
    runs = 1 + _num_runs(run_ms)
    return CostEstimate(
        time_s=runs * run_ms * _PROFILED_RATIO / 1000 + _ANALYSIS_S,
        basis=f"{runs} profiled runs, at {_PROFILED_RATIO:g} times {run_ms:.3g} ms, and reading the trace",
    )


def _num_runs(run_ms: float | None) -> int:
    return 3 if run_ms is None else max(1, min(3, int(_MAX_WINDOW_S * 1000 / max(run_ms, 1e-3))))


def run(context: RungContext, request: RegionsRequest | None = None) -> RegionsResult:
    """Profile one window in the broad session; nothing is timed in that process after it."""
    stages = context.result(StagesResult)
    unprofiled_ms = stages.default.wall_ms.summary.p50 if stages else None
    request = request or RegionsRequest(
        trace_path=str(context.folder / TRACE_FILE),
        runs=_num_runs(unprofiled_ms),
        unprofiled_ms=unprofiled_ms,
        stages=[stage.name for stage in stages.default.stages if not stage.is_module] if stages else [],
        shown_rank=stages.ranks.slowest_rank if stages and stages.ranks else 0,
    )
    result = context.broad.call(measure, request, timeout_s=context.workload.timeout_s)
    missing = [own.rank for own in result.ranks if not (context.folder / own.trace).is_file()]
    if not missing:
        return result
    message = f"Of {len(result.ranks)} ranks these have no trace file: {missing}."
    warning = ResultWarning(code="MISSING_RANKS", message=message)
    return result.model_copy(update={"warnings": [*result.warnings, warning]})


def measure(loaded: LoadedTarget, request: RegionsRequest) -> RegionsResult:
    """Profile a window of runs with every module and method annotated, and attribute it.

    Raises:
        RungError: The profiler gave nothing, or another one was active.
        WorkloadError: The workload raised.
    """
    # These bring torch, which the ladder's own process does without.
    from perfladder.profiling.discover import find_sites
    from perfladder.profiling.prebound import prebound_warnings
    from perfladder.profiling.window import Call, profile_runs

    path = loaded.own_path(Path(request.trace_path))
    call = Call(run=lambda: _run_and_wait(loaded), prepare=loaded.prepare_run)
    sites = find_sites(loaded.obj)
    profiled = profile_runs(
        sites,
        [call],
        repeats=request.runs,
        trace_path=path,
        activities=loaded.activities,
        memory_limit_bytes=request.memory_limit_bytes,
        stages=resolve_sites(loaded.obj, request.stages),
    )
    report = profiled.report
    types = {region_id: part.module_type for region_id, part in sites.owner.items()}
    trace, attribution = profiled.trace, profiled.attribution
    profiled_ms = _median([run.wall_time_us for run in report.runs]) / _US_PER_MS
    key_averages = profiled.key_averages()
    result = RegionsResult(
        num_runs=len(report.runs),
        profiled_ms=profiled_ms,
        unprofiled_ms=request.unprofiled_ms,
        profiled_ratio=profiled_ms / request.unprofiled_ms if request.unprofiled_ms else None,
        device_busy_ms=busy_ms(report),
        regions=summarize_regions(report, types),
        residual=_residual(report),
        runs=list(report.runs),
        region_tree=list(report.region_tree),
        lanes=_lanes(profiled),
        key_averages=key_averages,
        timeline=profiled.timeline,
        copies=_copies(profiled),
        waits=model_run_waits(trace, attribution, report.runs, request.unprofiled_ms),
        num_events=profiled.trace.num_events,
        analysis_s=profiled.analysis_s,
        artifacts={"trace": compress_large(path).name},
        warnings=[*prebound_warnings(loaded.obj, sites), *profiled.warnings],
    )
    if loaded.place is None:
        return result
    own = _own_rank(loaded.place.rank, result, is_shown=loaded.place.rank == request.shown_rank)
    return result.model_copy(update={"ranks": [own]})


def _lanes(profiled: ProfiledRuns) -> RunLanes | None:
    runs = profiled.report.runs
    return lay_out_run(profiled.trace, profiled.attribution, runs.index(middle_run(runs))) if runs else None


def _copies(profiled: ProfiledRuns) -> list[CopySite]:
    from perfladder.profiling.kernel_evidence import per_call

    if not profiled.trace.has_device_work:
        return []
    table = list_kernels(profiled.trace, profiled.attribution, only_runs=True)
    return [per_call(site, len(profiled.report.runs)) for site in list_copies(table)]


def _own_rank(rank: int, result: RegionsResult, *, is_shown: bool) -> RankRegions:
    return RankRegions(
        rank=rank,
        is_shown=is_shown,
        trace=result.artifacts["trace"],
        profiled_ms=result.profiled_ms,
        device_busy_ms=result.device_busy_ms,
        residual_share=result.residual.cpu_share if result.residual else None,
        regions=result.regions,
    )


def _run_and_wait(loaded: LoadedTarget) -> None:
    loaded.run()
    loaded.synchronize()


def compress_large(path: Path, *, above_bytes: int = _MAX_PLAIN_BYTES) -> Path:
    """Replace a large trace by its gzip file, and return the path of what is there now."""
    if path.stat().st_size <= above_bytes:
        return path
    compressed = path.with_name(path.name + ".gz")
    try:
        with path.open("rb") as source, gzip.open(compressed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except BaseException:
        compressed.unlink(missing_ok=True)
        raise
    path.unlink()
    return compressed


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
                module_type=types.get(region_id, ""),
                calls_per_run=sum(r.calls for r in there) / len(found),
                **_totals([(r.cpu_time_us, r.device_time_us) if r else (0.0, 0.0) for r in found], report),
            )
        )
    return sorted(summaries, key=lambda s: -(s.cpu_ms if s.device_ms is None else s.device_ms))


def _residual(report: RegionReport) -> ResidualSummary:
    residuals = [run.residual for run in report.runs]
    middle = sorted(residuals, key=lambda r: r.cpu_time_us)[len(residuals) // 2]
    return ResidualSummary(
        **_totals([(r.cpu_time_us, r.device_time_us) for r in residuals], report),
        host=middle.host,
    )


def _totals(times_us: list[tuple[float, float | None]], report: RegionReport) -> dict[str, float | None]:
    """Mean times a run, and shares of the sums over all runs: so that shares add up to 1 and agree with the times."""
    cpu_us, whole_us = sum(cpu for cpu, _ in times_us), sum(run.wall_time_us for run in report.runs)
    totals: dict[str, float | None] = {
        "cpu_ms": cpu_us / len(times_us) / _US_PER_MS,
        "cpu_share": cpu_us / max(whole_us, 1e-9),
        "device_ms": None,
        "device_share": None,
    }
    if all(run.device_time_us is not None for run in report.runs):
        device_us = sum(device or 0.0 for _, device in times_us)
        totals["device_ms"] = device_us / len(times_us) / _US_PER_MS
        totals["device_share"] = device_us / max(sum(run.device_time_us or 0.0 for run in report.runs), 1e-9)
    return totals


def busy_ms(report: RegionReport) -> float | None:
    """Device time of a run by interval union over its streams, median over the runs; the profiler hardly changes it."""
    busy_us = [run.device.busy_us for run in report.runs if run.device is not None]
    return _median(busy_us) / _US_PER_MS if busy_us else None


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))
