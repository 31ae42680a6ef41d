"""Rung 4, kernel attribution: which kernels, from which call and module? Cost: one profiled replay, passed twice.

Where CUDA graphs replay, a further pass without them tells what their kernels are.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from perfladder.capturing.store import CapturedCall
from perfladder.errors import RungError, WorkloadError
from perfladder.instrument import instrument
from perfladder.models import Model, ResultWarning
from perfladder.peaks import Peaks, find_peaks
from perfladder.profiling.graph_rows import GraphRow, split_by_replay, summarize_replays
from perfladder.profiling.kernel_evidence import collect_evidence
from perfladder.profiling.positions import PositionRows, block_of, module_of, take_positions
from perfladder.profiling.shares import Share, sum_shares
from perfladder.profiling.warnings import ProfileWarningCode, instrumentation_warnings, trace_warnings, warn
from perfladder.rungs.base import RungContext, RungResult
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.cost import CostEstimate
from perfladder.rungs.harness import HarnessResult
from perfladder.rungs.regions import busy_ms
from perfladder.rungs.stages import StagesResult
from perfladder.target import LoadedTarget
from perfladder.trace.attribution import attribute
from perfladder.trace.copies import CopySite
from perfladder.trace.critical import Boundness
from perfladder.trace.dynamo import RUNTIME_NAME
from perfladder.trace.graphs import GraphReplay
from perfladder.trace.kernels import KernelSummary, KernelTable, list_kernels, summarize_kernels
from perfladder.trace.labels import RUN_KIND, WARMUP_KIND
from perfladder.trace.launches import FamilyRow
from perfladder.trace.ranking import MODEL, RankedGroup
from perfladder.trace.regions import middle_run, report_regions
from perfladder.trace.repeats import leads, take_typical
from perfladder.trace.residual import HostSplit, IdleSplit, SyncSite
from perfladder.trace.roofline import RooflineRow
from perfladder.trace.timeline import Timeline, report_timeline
from perfladder.trace.waits import WaitModel, model_run_waits
from perfladder.trace.work import OperatorCall

if TYPE_CHECKING:
    from perfladder.capturing.replay import Replay
    from perfladder.functional.sites import ModuleSites
    from perfladder.trace.model import Trace

TRACE_FILE = "kernels.trace.json"
FUNCTIONS_TRACE_FILE = "functions.trace.json"
GRAPH_OFF_TRACE_FILE = "graph-off.trace.json"
_MAX_ROWS = 500
_PROFILED_RATIO = 3.0
"""Of a profiled replay with every call marked to a plain one."""
_ANALYSIS_S = 4.0
"""Reading small traces, and measuring the device's peaks."""
_NO_OPERATOR = "(no operator)"
_GRAPH_LAUNCH = "(CUDA graph launch)"


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


class KernelsResult(RungResult):
    """Kernels of the replayed stage, or its operators by self time on a CPU; times are per replayed call.

    A row has the median over the profiled replays where there are at least 3 of them, and sums are of rows.
    """

    rung: str = "kernels"
    stage: str | None = None
    kind: Literal["kernels", "operators"] | None = None
    call_index: int | None = None
    repeats: int = 0
    total_us: float = 0.0
    repeat_us: list[float] = Field(
        default=[], description="All time of each profiled replay, as measured; empty where fewer than 3 were made."
    )
    attributed_share: float | None = Field(
        default=None, description="The part of the time assigned to both an operator and a module."
    )
    attributed_share_by_function: float | None = Field(
        default=None,
        description="The part assigned to a named call, a compiled region or a launch site of a module; None if none "
        "was marked.",
    )
    unprofiled_ms: float | None = None
    device_busy_ms: float | None = None
    num_kernels: int = 0
    kernels: list[KernelSummary] = []
    by_kernel: list[Share] = []
    by_operator: list[Share] = []
    by_function: list[Share] = Field(default=[], description="By the named call; empty if none was marked.")
    by_module: list[Share] = []
    by_block: list[Share] = []
    graphs: list[GraphRow] = Field(default=[], description="CUDA graph replays, by the region that makes them.")
    families: list[FamilyRow] = Field(default=[], description="By what the kernels do.")
    copies: list[CopySite] = Field(default=[], description="By kind and call site.")
    synchronizations: list[SyncSite] = Field(default=[], description="Where the stage made the host wait.")
    bound: Boundness | None = Field(default=None, description="Whether host or device sets the pace.")
    host: HostSplit | None = Field(
        default=None, description="What the host's time is made of, in the middle one of the profiled replays."
    )
    idle: IdleSplit | None = Field(default=None, description="Busy and idle time of the device, in the same replay.")
    waits: WaitModel | None = Field(default=None, description="What the host's waits cost in a plain call.")
    roofline: list[RooflineRow] = Field(default=[], description="Achieved against the peaks, by operator and region.")
    peaks: Peaks | None = None
    flops: int | None = Field(default=None, description="Of the whole call, by formulas on shapes.")
    work_known_share: float | None = Field(default=None, description="Of the kernel time, whose work was counted.")
    flops_known_share: float | None = Field(default=None, description="Of the kernel time, for which a formula exists.")
    ranking: list[RankedGroup] = Field(
        default=[], description="By operator and region, the largest possible win first."
    )
    operator_ranking: list[RankedGroup] = Field(default=[], description="The same by operator, over all regions.")
    by_position: PositionRows | None = Field(
        default=None, description="The rows by module, with repeated modules taken together; None in older results."
    )
    win_model: str = MODEL
    timeline: Timeline | None = None

    @property
    def positions(self) -> PositionRows:
        """Rows over repeated modules; those of single modules where the result is too old to have others."""
        return self.by_position or PositionRows(
            kernels=self.kernels,
            by_module=self.by_module,
            by_block=self.by_block,
            ranking=self.ranking,
            roofline=self.roofline,
        )

    @property
    def replaceable(self) -> list[Share]:
        """The operators that one could replace, so without the runtime of `torch.compile`, if there are any."""
        return [share for share in self.by_operator if share.name != RUNTIME_NAME] or self.by_operator


def estimate(context: RungContext) -> CostEstimate:
    """Profiled replays, and once for each device and version of torch its peaks."""
    harness, stages = context.result(HarnessResult), context.result(StagesResult)
    if harness is None or stages is None or not harness.calls:
        return CostEstimate(basis="no replay to profile")
    call_ms = harness.calls[len(harness.calls) // 2].replayed_ms.summary.p50
    replays = 2 * KernelsRequest(folder="", trace_path="").repeats + 2
    return CostEstimate(
        time_s=replays * call_ms * _PROFILED_RATIO / 1000 + _ANALYSIS_S,
        memory_bytes=stages.peak_device_reserved_bytes or stages.peak_host_rss_bytes,
        basis=f"{replays} profiled replays, at {_PROFILED_RATIO:g} times {call_ms:.3g} ms, and measuring peaks",
    )


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
    from perfladder import _torch_private
    from perfladder.capturing.replay import Replay
    from perfladder.functional.kinds import kinds_of_numbered
    from perfladder.functional.rows import name_functions, share_by_function, split_by_function
    from perfladder.profiling.observers import Annotator
    from perfladder.trace.record import record_window, span

    deadline = time.monotonic() + loaded.workload.timeout_s
    replay = Replay(loaded, Path(request.folder))
    call = replay.manifest.calls[len(replay.manifest.calls) // 2]
    site, path, sites = replay.site, Path(request.trace_path), _sites(replay)
    all_threads = _torch_private.can_record_all_threads()
    with replay:
        with record_window(path, activities=loaded.activities, all_threads=all_threads) as window:
            # One replay inside the profiler, before anything is annotated, absorbs its first-use costs.
            with span(WARMUP_KIND, "0"):
                replay.replay(call)
            with instrument(sites.sites, Annotator(sites.labels)) as state:
                _repeat(replay, call, request.repeats)
        # Marking calls slows the host, so that is a pass of its own: no time of the host comes from it.
        marked, marking_warnings = _marked(replay, call, request, sites)
        counted, uncounted = _count_work(replay, call, sites)
        trace = window.read()
        attribution = attribute(trace)
        table = take_typical(list_kernels(trace, attribution, only_runs=True), request.repeats)
        replays, graph_warnings = _pair_replays(replay, call, request, sites, table, deadline)
    report, timeline = report_regions(trace, attribution), report_timeline(trace, attribution)
    peaks = find_peaks(loaded.device, None if request.cache_folder is None else Path(request.cache_folder))
    middle = middle_run(report.runs)
    evidence = collect_evidence(
        table,
        attribution,
        middle.device,
        repeats=request.repeats,
        calls=counted,
        peaks=peaks,
        unprofiled_ms=request.unprofiled_ms,
        busy_ms=busy_ms(report),
        stage_share=request.stage_share,
    )
    rows = split_by_replay(evidence.kernels, replays, request.repeats)
    if marked:
        seen = take_typical(list_kernels(marked, only_runs=True), request.repeats)
        rows = split_by_function(rows, summarize_kernels(seen))
    modules = [module_of(row.region) for row in rows]
    functions = name_functions(rows, modules, sites.opaque_names) if marked else []
    result = KernelsResult(
        stage=replay.manifest.stage,
        kind="operators" if table.is_host else "kernels",
        call_index=call.index,
        repeats=request.repeats,
        total_us=table.total_us / request.repeats,
        repeat_us=table.repeat_us(np.zeros(table.num_kernels, np.int64), 1)[0],
        attributed_share=sum(row.share for row in rows if row.region is not None and row.operator is not None),
        attributed_share_by_function=share_by_function(rows, functions) if marked else None,
        unprofiled_ms=request.unprofiled_ms,
        device_busy_ms=busy_ms(report),
        num_kernels=table.num_kernels // request.repeats,
        kernels=rows[:_MAX_ROWS],
        by_kernel=sum_shares(rows, [row.kernel for row in rows]),
        by_operator=sum_shares(rows, [_operator(row) for row in rows]),
        by_function=sum_shares(rows, functions) if marked else [],
        by_module=sum_shares(rows, modules),
        by_block=sum_shares(rows, [block_of(path, site.path) for path in modules]),
        graphs=summarize_replays(replays, request.repeats),
        families=evidence.families,
        copies=evidence.copies,
        synchronizations=evidence.synchronizations,
        bound=evidence.bound,
        host=middle.host,
        idle=middle.device,
        waits=model_run_waits(trace, attribution, report.runs, request.unprofiled_ms),
        roofline=evidence.roofline[:_MAX_ROWS],
        peaks=peaks,
        flops=sum(done.flops for done in counted) if counted else None,
        work_known_share=evidence.work_known_share,
        flops_known_share=evidence.flops_known_share,
        ranking=evidence.ranking[:_MAX_ROWS],
        operator_ranking=evidence.operator_ranking[:_MAX_ROWS],
        by_position=take_positions(
            rows,
            evidence,
            stage=site.path,
            calls=counted,
            kinds=kinds_of_numbered(sites.modules),
            peaks=peaks,
            limit=_MAX_ROWS,
        ),
        timeline=timeline,
        artifacts=_artifacts(path, is_marked=marked is not None),
        warnings=[
            *instrumentation_warnings(state),
            *trace_warnings(trace.warnings),
            *trace_warnings(report.warnings),
            *uncounted,
            *marking_warnings,
            *graph_warnings,
        ],
    )
    return result.model_copy(update={"warnings": [*result.warnings, *_order_warnings(result)]})


def _order_warnings(result: KernelsResult) -> list[ResultWarning]:
    """Whether the operator with the largest share is another one from replay to replay."""
    operators = result.replaceable
    if not operators or leads(operators[0], operators):
        return []
    times = zip(*(share.repeat_us for share in operators), strict=True)
    longest = [operators[values.index(max(values))].name for values in times]
    message = (
        f"The operator that takes longest is not the same in most of the {result.repeats} profiled replays "
        f"({', '.join(longest)}), so no finding names one."
    )
    return [warn(ProfileWarningCode.REPLAYS_DISAGREE, message)]


def _count_work(
    replay: Replay, call: CapturedCall, sites: ModuleSites
) -> tuple[list[OperatorCall], list[ResultWarning]]:
    """Count the work of the call's operators in a further replay; some code does not run while it is watched."""
    from perfladder.profiling.work import record_work

    args, kwargs = replay.prepare(call)
    try:
        with replay.settings(call):
            return record_work(lambda: replay.call(args, kwargs), sites.sites), []
    except WorkloadError as error:
        message = f"The work of the operators was not counted, so no roofline is known: {error}"
        return [], [ResultWarning(code="WORK_NOT_COUNTED", message=message)]


def _artifacts(path: Path, *, is_marked: bool) -> dict[str, str]:
    further = {"functions_trace": FUNCTIONS_TRACE_FILE} if is_marked else {}
    if path.with_name(GRAPH_OFF_TRACE_FILE).is_file():
        further["graph_off_trace"] = GRAPH_OFF_TRACE_FILE
    return {"trace": path.name, **further}


def _stage_share(stages: StagesResult | None, name: str | None) -> float | None:
    timed = stages.default.stages if stages is not None and stages.scenarios else []
    return next((stage.share for stage in timed if stage.name == name), None)


def _sites(replay: Replay) -> ModuleSites:
    """Every module of the stage; where the stage is a method, that method instead of its module."""
    from torch import nn

    from perfladder.functional.sites import ModuleSites, find_module_sites

    site = replay.site
    if site.is_module:
        return find_module_sites(site.owner, site.path, methods=False)
    is_part = isinstance(site.owner, nn.Module)
    found = find_module_sites(site.owner, site.path.rpartition(".")[0], methods=False) if is_part else ModuleSites()
    return found.with_method(site)


def _repeat(replay: Replay, call: CapturedCall, repeats: int) -> None:
    from perfladder.trace.record import span

    for index in range(repeats):
        with span(WARMUP_KIND, str(index)):  # inputs are copied to the device, which is work of no run
            args, kwargs = replay.prepare(call)
        with replay.settings(call), span(RUN_KIND, str(index)):
            replay.call(args, kwargs)
            replay.loaded.synchronize()


def _marked(
    replay: Replay, call: CapturedCall, request: KernelsRequest, sites: ModuleSites
) -> tuple[Trace | None, list[ResultWarning]]:
    """Replay once more with every named call marked."""
    from perfladder.functional.window import record_marked

    path = Path(request.trace_path).with_name(FUNCTIONS_TRACE_FILE)
    try:
        return record_marked(
            path, sites, lambda: _repeat(replay, call, request.repeats), activities=replay.loaded.activities
        )
    except (RungError, WorkloadError) as error:
        return None, [warn(ProfileWarningCode.FUNCTIONS_NOT_MARKED, f"Marking named calls failed: {error}")]


def _pair_replays(
    replay: Replay, call: CapturedCall, request: KernelsRequest, sites: ModuleSites, table: KernelTable, deadline: float
) -> tuple[list[GraphReplay], list[ResultWarning]]:
    """Find CUDA graph replays, and replay the call without graphs if there are any."""
    from torch import nn

    from perfladder.object_parts import named_modules_of
    from perfladder.profiling.graph_pass import GraphPass, pair_replays

    owner = replay.site.owner
    roots = [owner] if isinstance(owner, nn.Module) else [module for _, module in named_modules_of(owner)]
    plan = GraphPass(
        path=Path(request.trace_path).with_name(GRAPH_OFF_TRACE_FILE),
        sites=sites,
        modules=[module for root in roots for module in root.modules()],
        warm_up=lambda: replay.replay(call),
        run=lambda: _repeat(replay, call, 1),
        activities=replay.loaded.activities,
        deadline=deadline,
    )
    return pair_replays(table, plan)


def _operator(row: KernelSummary) -> str:
    return row.outer_operator or row.operator or (_GRAPH_LAUNCH if row.is_from_graph else _NO_OPERATOR)
