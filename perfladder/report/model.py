"""`Report`: everything that a reader of a run needs, collected from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeVar

import yaml
from pydantic import Field

from perfladder.findings import Finding, collect_findings, smallest_next_experiment
from perfladder.ladder import RUNGS, load_results
from perfladder.models import SCHEMA_VERSION, Model, ResultWarning
from perfladder.nsight.command import KernelFilter
from perfladder.nsight.diagnosis import Verdict
from perfladder.peaks import Peaks
from perfladder.profiling.graph_rows import GraphRow
from perfladder.profiling.shares import Share
from perfladder.report.load import LoadView
from perfladder.rundir import RunDirectory, RunRecord, read_model
from perfladder.rungs.base import R, RungResult
from perfladder.rungs.harness import HarnessResult
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.ncu import NcuResult, ProfiledLaunch
from perfladder.rungs.regions import RegionsResult, RegionSummary, ResidualSummary
from perfladder.rungs.stages import CadenceTiming, MetricValue, Observed, StagesResult
from perfladder.stats import Interval, Summary
from perfladder.target import LoadedInfo
from perfladder.timing.ranks import RankTable
from perfladder.timing.results import (
    Compilations,
    GenerationTiming,
    HostMemory,
    StageMemory,
    StageOverlap,
    Steadiness,
)
from perfladder.trace.copies import CopySite
from perfladder.trace.critical import Boundness
from perfladder.trace.kernels import KernelSummary
from perfladder.trace.launches import FamilyRow
from perfladder.trace.ranking import RankedGroup
from perfladder.trace.residual import SyncSite
from perfladder.trace.roofline import RooflineRow
from perfladder.trace.timeline import Overlap
from perfladder.workload import Workload, parse_workload

_TOP_KERNELS = 15


class StageRow(Model):
    """One line of the stage table, in ms a run."""

    name: str
    owner_type: str
    calls_per_run: float
    self_ms: Summary
    total_ms: Summary
    device_self_ms: Summary | None
    overlap_ms: Summary | None
    memory: StageMemory | None
    share: float
    share_interval: Interval


class StageTable(Model):
    """Stage timing of one scenario."""

    scenario: str
    wall_ms: Summary
    stages: list[StageRow]
    outside_ms: Summary
    outside_share: float
    overlap_ms: Summary | None
    overlaps: list[StageOverlap]
    cadence: CadenceTiming | None
    generation: GenerationTiming | None
    steadiness: Steadiness | None


class RegionTable(Model):
    """Regions of the profiled window."""

    profiled_ms: float | None
    profiled_ratio: float | None
    unprofiled_ms: float | None
    device_busy_ms: float | None
    regions: list[RegionSummary]
    residual: ResidualSummary | None


class HarnessVerdict(Model):
    """What the replay says of itself."""

    stage: str | None
    is_faithful: bool | None
    parity: Literal["exact", "within_tolerance", "different"] | None
    timing_ratio: float | None
    timing_ratio_interval: Interval | None
    alone_timing_ratio: float | None = None
    unfaithful_because: list[str]


class KernelTableView(Model):
    """The most expensive kernels of one replayed call; rows by module are by position, repeated ones together."""

    stage: str | None
    kind: Literal["kernels", "operators"] | None
    total_us: float
    num_kernels: int
    attributed_share: float | None
    attributed_share_by_function: float | None = None
    unprofiled_ms: float | None
    device_busy_ms: float | None
    kernels: list[KernelSummary] = Field(description="By possible win, the largest first.")
    by_kernel: list[Share]
    by_operator: list[Share]
    by_function: list[Share] = []
    by_block: list[Share]
    graphs: list[GraphRow] = []
    families: list[FamilyRow]
    copies: list[CopySite]
    synchronizations: list[SyncSite]
    bound: Boundness | None
    roofline: list[RooflineRow]
    peaks: Peaks | None
    flops: int | None
    work_known_share: float | None
    flops_known_share: float | None
    ranking: list[RankedGroup]
    operator_ranking: list[RankedGroup]
    win_model: str
    overlap: Overlap | None = Field(default=None, description="Communication beside compute.")


class NcuView(Model):
    """What Nsight Compute says of one kernel; its raw values stay in the rung's own file."""

    kernel: str | None
    chosen: KernelFilter | None
    verdict: Verdict | None
    statement: str | None
    launches: list[ProfiledLaunch]


class RungLine(Model):
    """How one rung ended."""

    name: str
    status: str
    reason: str | None
    duration_s: float | None
    warnings: list[ResultWarning]


class Report(Model):
    """The report of one run; `report.json` holds exactly this."""

    schema_version: int = SCHEMA_VERSION
    run: RunRecord
    run_dir: str
    workload: Workload
    environment: LoadedInfo | None
    metric: MetricValue | None
    observed: Observed | None
    overhead_ratio: float | None
    overhead_ratio_interval: Interval | None
    num_overhead_pairs: int
    dominating: str | None
    dominating_by: str | None
    compilations: dict[str, Compilations]
    first_call_ms: float | None
    first_call_stages_ms: dict[str, float]
    peak_device_allocated_bytes: int | None
    peak_host_rss_bytes: int | None
    host_memory: HostMemory | None
    ranks: RankTable | None
    load: LoadView | None = Field(description="Throughput, requests at once, cold starts, energy.")
    stages: list[StageTable] = Field(description="The workload's own inputs first, then one entry a scenario.")
    regions: RegionTable | None
    harness: HarnessVerdict | None
    kernels: KernelTableView | None
    ncu: NcuView | None = None
    findings: list[Finding]
    rungs: list[RungLine]
    artifacts: dict[str, str]
    next_experiment: str | None
    next_command: str | None = Field(default=None, description="The same as a command, where there is one.")


def build_report(run_dir: Path) -> Report:
    """Read a run's files and collect its report; measures nothing.

    Raises:
        InputError: There is no run, or a file of it is damaged or from a newer perfladder.
    """
    run = RunDirectory.open(run_dir)
    results = load_results(run)
    environment_path = run.path / "environment.json"
    environment = read_model(environment_path, LoadedInfo) if environment_path.exists() else None
    workload = parse_workload(
        yaml.safe_load((run.path / "workload.yaml").read_text()), what=f"{run.path}/workload.yaml"
    )
    stages = _done(results, StagesResult)
    findings = (
        collect_findings(workload, environment, results, source=run.record.workload_source) if environment else []
    )
    first = smallest_next_experiment(findings)
    return Report(
        run=_as_it_ended(run.record),
        run_dir=str(run.path),
        workload=workload,
        environment=environment,
        metric=stages.metric if stages else None,
        observed=stages.observed if stages else None,
        overhead_ratio=stages.overhead_ratio if stages else None,
        overhead_ratio_interval=stages.overhead_ratio_interval if stages else None,
        num_overhead_pairs=stages.num_overhead_pairs if stages else 0,
        dominating=stages.dominating if stages else None,
        dominating_by=stages.dominating_by if stages else None,
        compilations=stages.compilations if stages else {},
        first_call_ms=stages.first_call_ms if stages else None,
        first_call_stages_ms=stages.first_call_stages_ms if stages else {},
        peak_device_allocated_bytes=stages.peak_device_allocated_bytes if stages else None,
        peak_host_rss_bytes=stages.peak_host_rss_bytes if stages else None,
        host_memory=stages.host_memory if stages else None,
        ranks=stages.ranks if stages else None,
        load=LoadView.of(stages) if stages else None,
        stages=_stage_tables(stages) if stages else [],
        regions=_regions(_done(results, RegionsResult)),
        harness=_harness(_done(results, HarnessResult)),
        kernels=_kernels(_done(results, KernelsResult)),
        ncu=_ncu(_done(results, NcuResult)),
        findings=findings,
        rungs=[
            RungLine(name=name, status=r.status, reason=r.reason, duration_s=r.duration_s, warnings=r.warnings)
            for name, r in results.items()
        ],
        artifacts=_artifacts(run, results),
        next_experiment=first.next_experiment if first else None,
        next_command=first.next_command if first else None,
    )


def _as_it_ended(record: RunRecord) -> RunRecord:
    """A run that still says `running` although its process is gone was killed."""
    if record.status != "running" or record.process_id is None or Path(f"/proc/{record.process_id}").exists():
        return record
    missing = [
        rung.name for rung in RUNGS if not rung.is_optional and rung.name not in {entry.name for entry in record.rungs}
    ]
    error = f"its process ended without finishing; not climbed: {', '.join(missing) or 'nothing, but the report'}"
    return record.model_copy(update={"status": "interrupted", "error": error})


def _done(results: dict[str, RungResult], kind: type[R]) -> R | None:
    return next((r for r in results.values() if isinstance(r, kind) and r.status == "done"), None)


def _stage_tables(result: StagesResult) -> list[StageTable]:
    return [
        StageTable(
            scenario=timing.name,
            wall_ms=timing.wall_ms.summary,
            stages=[
                StageRow(
                    name=stage.name,
                    owner_type=stage.owner_type,
                    calls_per_run=stage.calls_per_run,
                    self_ms=stage.self_ms.summary,
                    total_ms=stage.total_ms.summary,
                    device_self_ms=stage.device_self_ms.summary if stage.device_self_ms else None,
                    overlap_ms=stage.overlap_ms.summary if stage.overlap_ms else None,
                    memory=stage.memory,
                    share=stage.share,
                    share_interval=stage.share_interval,
                )
                for stage in timing.stages
            ],
            outside_ms=timing.outside_ms.summary,
            outside_share=timing.outside_share,
            overlap_ms=timing.overlap_ms.summary if timing.overlap_ms else None,
            overlaps=timing.overlaps,
            cadence=_without_samples(timing.cadence),
            generation=_without_samples(timing.generation),
            steadiness=timing.steadiness,
        )
        for timing in result.scenarios
    ]


M = TypeVar("M", CadenceTiming, GenerationTiming)


def _without_samples(timing: M | None) -> M | None:
    """Raw samples stay in the rung's own file."""
    if timing is None:
        return None
    raw: dict[str, list[float]] = {name: [] for name in type(timing).model_fields if name.endswith("_samples_ms")}
    return timing.model_copy(update=raw)


def _regions(result: RegionsResult | None) -> RegionTable | None:
    if result is None:
        return None
    return RegionTable(**{name: getattr(result, name) for name in RegionTable.model_fields})


def _harness(result: HarnessResult | None) -> HarnessVerdict | None:
    if result is None:
        return None
    return HarnessVerdict(**{name: getattr(result, name) for name in HarnessVerdict.model_fields})


def _kernels(result: KernelsResult | None) -> KernelTableView | None:
    if result is None:
        return None
    shown = {name: getattr(result, name) for name in KernelTableView.model_fields if name != "overlap"}
    shown |= {name: getattr(result.positions, name) for name in ("kernels", "by_block", "ranking", "roofline")}
    shown["kernels"] = sorted(result.positions.kernels, key=lambda row: -(row.possible_win_us or 0.0))
    top = {name: value[:_TOP_KERNELS] for name, value in shown.items() if isinstance(value, list)}
    return KernelTableView(**(shown | top), overlap=result.timeline.overlap if result.timeline else None)


def _ncu(result: NcuResult | None) -> NcuView | None:
    if result is None:
        return None
    return NcuView(**{name: getattr(result, name) for name in NcuView.model_fields})


def _artifacts(run: RunDirectory, results: dict[str, RungResult]) -> dict[str, str]:
    found = {
        "run": "run.json",
        "workload": "workload.yaml",
        "environment": "environment.json",
        "session log": "session.log",
        "replay log": "replay.log",
        "launches log": "launches.log",
    }
    found |= {f"session log {path.suffixes[0][1:]}": path.name for path in sorted(run.path.glob("session.rank*.log"))}
    for entry in run.record.rungs:
        found[f"{entry.name} result"] = f"{entry.folder}/{entry.name}.json"
        for label, name in results[entry.name].artifacts.items():
            found[f"{entry.name} {label}"] = f"{entry.folder}/{name}"
    return {label: path for label, path in found.items() if (run.path / path).exists()}
