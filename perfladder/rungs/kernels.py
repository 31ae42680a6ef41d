"""Rung 4, kernel attribution: which kernels, from which operator and module? Cost: one profiled replay."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from perfladder.capture.store import CapturedCall
from perfladder.errors import WorkloadError
from perfladder.instrument import Site, instrument, module_sites
from perfladder.models import Model, ResultWarning
from perfladder.peaks import Peaks, find_peaks
from perfladder.profiling.kernel_evidence import add_idle, collect_evidence
from perfladder.profiling.warnings import instrumentation_warnings, trace_warnings
from perfladder.rungs.base import RungContext, RungResult
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.harness import HarnessResult
from perfladder.rungs.regions import busy_ms
from perfladder.rungs.stages import StagesResult
from perfladder.target import LoadedTarget
from perfladder.trace.attribution import attribute
from perfladder.trace.copies import CopySite
from perfladder.trace.critical import Boundness
from perfladder.trace.kernels import KernelSummary, list_kernels
from perfladder.trace.labels import RUN_KIND, WARMUP_KIND
from perfladder.trace.launches import FamilyRow
from perfladder.trace.ranking import MODEL, RankedGroup
from perfladder.trace.regions import report_regions
from perfladder.trace.residual import SyncSite
from perfladder.trace.roofline import RooflineRow
from perfladder.trace.timeline import Timeline, report_timeline
from perfladder.trace.work import OperatorCall

TRACE_FILE = "kernels.trace.json"
_MAX_ROWS = 500
_BLOCK_DEPTH = 2


class KernelsRequest(Model):
    """Which capture to replay under the profiler, and where the trace goes."""

    folder: str
    trace_path: str
    repeats: int = Field(default=3, gt=0, description="Profiled repeats of the captured call in the middle.")
    unprofiled_ms: float | None = Field(
        default=None, description="Median of that call without the profiler, from rung 3."
    )
    stage_share: float | None = Field(default=None, description="The stage's share of the whole run, from rung 1.")
    cache_folder: str | None = Field(default=None, description="Where the device's measured peaks are kept.")


class Share(Model):
    """A part of all kernel time."""

    name: str
    total_us: float
    share: float
    count: int


class KernelsResult(RungResult):
    """Kernels of the replayed stage, or its operators by self time on a CPU; times are per replayed call."""

    rung: str = "kernels"
    stage: str | None = None
    kind: Literal["kernels", "operators"] | None = None
    call_index: int | None = None
    repeats: int = 0
    total_us: float = 0.0
    attributed_share: float | None = None
    unprofiled_ms: float | None = None
    device_busy_ms: float | None = None
    num_kernels: int = 0
    kernels: list[KernelSummary] = []
    by_kernel: list[Share] = []
    by_operator: list[Share] = []
    by_module: list[Share] = []
    by_block: list[Share] = []
    families: list[FamilyRow] = Field(default=[], description="By what the kernels do.")
    copies: list[CopySite] = Field(default=[], description="By kind and call site.")
    synchronizations: list[SyncSite] = Field(default=[], description="Where the stage made the host wait.")
    bound: Boundness | None = Field(default=None, description="Whether host or device sets the pace.")
    roofline: list[RooflineRow] = Field(default=[], description="Achieved against the peaks, by operator and region.")
    peaks: Peaks | None = None
    flops: int | None = Field(default=None, description="Of the whole call, by formulas on shapes.")
    work_known_share: float | None = Field(default=None, description="Of the kernel time, whose work was counted.")
    flops_known_share: float | None = Field(default=None, description="Of the kernel time, for which a formula exists.")
    ranking: list[RankedGroup] = Field(
        default=[], description="By operator and region, the largest possible win first."
    )
    operator_ranking: list[RankedGroup] = Field(default=[], description="The same by operator, over all regions.")
    win_model: str = MODEL
    timeline: Timeline | None = None


def run(context: RungContext, request: KernelsRequest | None = None) -> KernelsResult:
    """Profile the replay, in the process that the harness has timed it in."""
    captured, harness = context.result(CaptureResult), context.result(HarnessResult)
    if captured is None or captured.folder is None or harness is None:
        return KernelsResult(status="not_applicable", reason="There is no replay to attribute kernels in.")
    middle = harness.calls[len(harness.calls) // 2]
    request = request or KernelsRequest(
        folder=str(context.folder.parent / captured.folder),
        trace_path=str(context.folder / TRACE_FILE),
        unprofiled_ms=middle.replayed_ms.summary.p50,
        stage_share=_stage_share(context.result(StagesResult), captured.stage),
        cache_folder=None if context.cache_folder is None else str(context.cache_folder),
    )
    return context.replay.call(measure, request, timeout_s=context.workload.timeout_s)


def measure(loaded: LoadedTarget, request: KernelsRequest) -> KernelsResult:
    """Replay one captured call under the profiler with every module annotated.

    Raises:
        RungError: The profiler gave nothing, or another one was active.
        WorkloadError: The stage raised.
    """
    from perfladder.capture.replay import Replay
    from perfladder.profiling.observers import Annotator
    from perfladder.trace.record import record_window, span

    replay = Replay(loaded, Path(request.folder))
    call = replay.manifest.calls[len(replay.manifest.calls) // 2]
    site, path = replay.site, Path(request.trace_path)
    owner_path = site.path if site.is_module else site.path.rpartition(".")[0]
    sites = module_sites(site.owner, owner_path) if hasattr(site.owner, "named_modules") else []
    if not site.is_module:
        sites = [*(s for s in sites if s.owner is not site.owner), site]
    with replay, record_window(path, activities=loaded.activities) as window:
        # One replay inside the profiler, before anything is annotated, absorbs its first-use costs.
        with span(WARMUP_KIND, "0"):
            replay.replay(call)
        with instrument(sites, Annotator()) as state:
            for index in range(request.repeats):
                args, kwargs = replay.prepare(call)
                with replay.settings(call), span(RUN_KIND, str(index)):
                    replay.call(args, kwargs)
                    loaded.synchronize()
    trace = window.read()
    attribution = attribute(trace)
    table = list_kernels(trace, attribution, only_runs=True)
    report, timeline = report_regions(trace, attribution), report_timeline(trace, attribution)
    counted, uncounted = _count_work(replay, call, sites)
    peaks = find_peaks(loaded.device, None if request.cache_folder is None else Path(request.cache_folder))
    evidence = collect_evidence(
        table,
        attribution,
        add_idle([run.device for run in report.runs]),
        repeats=request.repeats,
        calls=counted,
        peaks=peaks,
        unprofiled_ms=request.unprofiled_ms,
        busy_ms=busy_ms(report),
        stage_share=request.stage_share,
    )
    rows = evidence.kernels
    modules = [_module(row) for row in rows]
    return KernelsResult(
        stage=replay.manifest.stage,
        kind="operators" if table.is_host else "kernels",
        call_index=call.index,
        repeats=request.repeats,
        total_us=table.total_us / request.repeats,
        attributed_share=sum(row.share for row in rows if row.region is not None and row.operator is not None),
        unprofiled_ms=request.unprofiled_ms,
        device_busy_ms=busy_ms(report),
        num_kernels=table.num_kernels // request.repeats,
        kernels=rows[:_MAX_ROWS],
        by_kernel=_shares(rows, [row.kernel for row in rows]),
        by_operator=_shares(rows, [row.outer_operator or row.operator or "(no operator)" for row in rows]),
        by_module=_shares(rows, modules),
        by_block=_shares(rows, [_block(path, site.path) for path in modules]),
        families=evidence.families,
        copies=evidence.copies,
        synchronizations=evidence.synchronizations,
        bound=evidence.bound,
        roofline=evidence.roofline[:_MAX_ROWS],
        peaks=peaks,
        flops=sum(done.flops for done in counted) if counted else None,
        work_known_share=evidence.work_known_share,
        flops_known_share=evidence.flops_known_share,
        ranking=evidence.ranking[:_MAX_ROWS],
        operator_ranking=evidence.operator_ranking[:_MAX_ROWS],
        timeline=timeline,
        artifacts={"trace": path.name},
        warnings=[
            *instrumentation_warnings(state),
            *trace_warnings(trace.warnings),
            *trace_warnings(report.warnings),
            *uncounted,
        ],
    )


def _count_work(
    replay: Replay, call: CapturedCall, sites: list[Site]
) -> tuple[list[OperatorCall], list[ResultWarning]]:
    """Count the work of the call's operators in a further replay; some code does not run while it is watched."""
    from perfladder.profiling.work import record_work

    args, kwargs = replay.prepare(call)
    try:
        with replay.settings(call):
            return record_work(lambda: replay.call(args, kwargs), sites), []
    except WorkloadError as error:
        message = f"The work of the operators was not counted, so no roofline is known: {error}"
        return [], [ResultWarning(code="WORK_NOT_COUNTED", message=message)]


def _stage_share(stages: StagesResult | None, name: str | None) -> float | None:
    timed = stages.default.stages if stages is not None and stages.scenarios else []
    return next((stage.share for stage in timed if stage.name == name), None)


def _module(row: KernelSummary) -> str:
    return row.region.partition(":")[2] if row.region else "(outside the stage)"


def _block(path: str, stage: str) -> str:
    """The module two levels below the stage that `path` lies in, such as `unet.up_blocks.1`."""
    if not path.startswith(f"{stage}."):
        return path
    return ".".join([stage, *path.removeprefix(f"{stage}.").split(".")[:_BLOCK_DEPTH]])


def _shares(rows: list[KernelSummary], names: list[str]) -> list[Share]:
    totals: dict[str, Share] = {}
    for row, name in zip(rows, names, strict=True):
        known = totals.get(name, Share(name=name, total_us=0.0, share=0.0, count=0))
        totals[name] = Share(
            name=name,
            total_us=known.total_us + row.total_us,
            share=known.share + row.share,
            count=known.count + row.count,
        )
    return sorted(totals.values(), key=lambda share: -share.total_us)
