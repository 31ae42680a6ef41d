"""Rung 1, stage timing: which stage dominates the metric that matters? Cost: plain runs, no profiler."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from perfladder.environment import Snapshot, snapshot_of, take_snapshot
from perfladder.instrument import Instrumentation, Observer, Site, instrument, resolve_sites, stage_sites
from perfladder.models import Model, ResultWarning
from perfladder.rungs.base import RungContext, RungResult
from perfladder.stats import Interval, Samples, Summary, bootstrap_interval, ratio_of_medians, summarize
from perfladder.target import LoadedTarget, RunOutput
from perfladder.workload import Media, Metric

if TYPE_CHECKING:
    import torch

Clock = Callable[[], int]

_MAX_CALLS_PER_RUN = 500
"""A site called more often than this in one run is dropped from rung 1: its hooks (about 6 us a call) would show."""

_MAX_BARE_RUNS = 5
_LOW_MEMORY_FRAC = 0.1
_NS_PER_MS = 1e6


class StagesRequest(Model):
    """Rung 1 takes everything it needs from the workload."""


class StageTiming(Model):
    """One stage over all measured runs. Self time is without the stages inside it; all samples are one a run."""

    name: str
    owner_type: str
    aliases: list[str] = []
    calls_per_run: float
    items_per_run: float = Field(
        default=0.0, description="Resumptions of a generator: its items, and once more to its end."
    )
    total_ms: Samples
    self_ms: Samples
    device_total_ms: Samples | None = None
    device_self_ms: Samples | None = None
    call_ms: Summary
    share: float
    share_interval: Interval

    @property
    def cost_ms(self) -> Samples:
        """The samples that the shares come from: device time where the stage used a device, else host time."""
        return self.device_self_ms or self.self_ms


class CadenceTiming(Model):
    """Arrival of streamed chunks; latency of a chunk counts from the chunk before it (the first from the start).

    Where nothing is streamed but the workload says what a chunk is, each call is one chunk.
    """

    media_ms_per_chunk: float | None
    margin_ms: float | None
    chunks_per_run: float
    first_chunk_ms: Samples
    chunk_ms: Summary
    num_late_chunks: int | None
    headroom_ms: float | None


class MetricValue(Model):
    """The metric that matters, as this run has it."""

    name: Metric
    value: float
    unit: Literal["ms", "items/s", "bytes"]
    interval: Interval | None = None


class ScenarioTiming(Model):
    """End to end and stage by stage, for one set of inputs."""

    name: str
    wall_ms: Samples
    outside_ms: Samples
    outside_share: float
    outside_share_interval: Interval
    stages: list[StageTiming]
    cadence: CadenceTiming | None = None


class Observed(Model):
    """What the runs showed about the work that the workload file does not say."""

    output_type: str
    output_shapes: dict[str, list[int]]
    num_items: int | None
    stage_calls: dict[str, float]
    is_compile_warm: bool
    are_caches_warm: bool
    synchronization_points: list[str]


class StagesResult(RungResult):
    """Stage timing of the workload; `scenarios[0]` is the workload's own inputs."""

    rung: str = "stages"
    metric: MetricValue | None = None
    dominating: str | None = None
    first_call_ms: float | None = None
    warmup_ms: list[float] = []
    scenarios: list[ScenarioTiming] = []
    overhead_ratio: float | None = None
    overhead_ratio_interval: Interval | None = None
    peak_device_allocated_bytes: int | None = None
    peak_device_reserved_bytes: int | None = None
    peak_host_rss_bytes: int | None = None
    observed: Observed | None = None
    snapshot_before: Snapshot | None = Field(default=None, description="Load and clocks just before the first run.")

    @property
    def default(self) -> ScenarioTiming:
        """Timing of the workload's own inputs."""
        return self.scenarios[0]


@dataclass
class Call:
    """One observed span on one thread; `parent` is the span it lies in."""

    site: Site
    start_ns: int
    is_item: bool
    parent: Call | None
    end_ns: int = 0
    events: tuple[Any, Any] | None = None
    child_ns: int = 0
    child_device_ms: float = 0.0

    @property
    def duration_ns(self) -> int:
        """Host time of the span."""
        return self.end_ns - self.start_ns


@dataclass
class RunTiming:
    """One run: its wall time and the spans in it."""

    start_ns: int
    end_ns: int
    calls: list[Call]
    item_end_ns: list[int] = field(default_factory=list)

    @property
    def wall_ms(self) -> float:
        """End to end, device included."""
        return (self.end_ns - self.start_ns) / _NS_PER_MS


class StageTimer(Observer):
    """Notes when each call begins and ends, on the host and (by events) on the device; synchronizes nothing."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self.clock = clock
        self.device = device
        self.calls: list[Call] = []
        self._open = threading.local()

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Begin a span."""
        return self._begin(site, is_item=False)

    def enter_item(self, site: Site) -> Call:
        """Begin the span of one resumption of a generator."""
        return self._begin(site, is_item=True)

    def leave(self, site: Site, token: Call, result: Any) -> None:
        """End the span."""
        if token.events:
            token.events[1].record()
        token.end_ns = self.clock()
        if token.parent is not None:
            token.parent.child_ns += token.duration_ns
        if getattr(self._open, "call", None) is token:
            self._open.call = token.parent
        self.calls.append(token)

    def take(self) -> list[Call]:
        """Hand over the spans of the run that has just ended; a call left open in a thread is no parent in the next."""
        calls, self.calls = self.calls, []
        self._open = threading.local()
        return calls

    def _begin(self, site: Site, *, is_item: bool) -> Call:
        call = Call(site, 0, is_item, getattr(self._open, "call", None))
        self._open.call = call
        if self.device.type != "cpu":
            call.events = _event_pair(self.device)
            call.events[0].record()
        call.start_ns = self.clock()
        return call


def run(context: RungContext, request: StagesRequest | None = None) -> StagesResult:
    """Time the stages in the broad session, before anything there is profiled."""
    return context.broad.call(measure, request or StagesRequest(), timeout_s=context.workload.timeout_s)


def measure(loaded: LoadedTarget, request: StagesRequest, *, clock: Clock = time.perf_counter_ns) -> StagesResult:
    """Run the workload cold, warm it up, and time it with its stages observed.

    Raises:
        InputError: A stage that the workload names does not exist.
        WorkloadError: The workload raised.
    """
    workload = loaded.workload
    snapshot = take_snapshot()
    is_auto = workload.stages == "auto"
    # The workload's own call is what is timed end to end: as a stage it would hide what is outside the others.
    found = stage_sites(loaded.obj) if is_auto else resolve_sites(loaded.obj, workload.stages)
    sites = [site for site in found if not (is_auto and site.path == workload.call)]
    first = _bare_run(loaded, None, clock)[0]
    warmup = [_bare_run(loaded, None, clock)[0].wall_ms for _ in range(workload.warmup_runs)]
    sites, warnings = _choose_sites(loaded, sites, is_auto, clock)
    _reset_peak_memory(loaded)
    scenarios, output, bare_ms = [], RunOutput(None), []
    for name in (None, *workload.scenarios):
        if name is not None:
            _bare_run(loaded, name, clock)
        timings, bare, scenario_output, state = _timed_runs(loaded, sites, name, clock)
        if name is None:
            bare_ms, output = bare, scenario_output
        scenarios.append(_scenario(name or "default", timings, state, workload.media, loaded.device))
        warnings += _state_warnings(state)
    if workload.metric == "cadence_p95" and not output.is_streamed:
        message = "metric cadence_p95: the call does not stream its output, so each call counts as one chunk."
        warnings.append(ResultWarning(code="CADENCE_OF_CALLS", message=message))
    default = scenarios[0]
    allocated, reserved = _peak_device_memory(loaded)
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    wall_ms = default.wall_ms.values
    result = StagesResult(
        dominating=default.stages[0].name if default.stages else None,
        first_call_ms=first.wall_ms,
        warmup_ms=warmup,
        scenarios=scenarios,
        overhead_ratio=float(np.median(wall_ms) / np.median(bare_ms)),
        overhead_ratio_interval=bootstrap_interval(ratio_of_medians, wall_ms, bare_ms),
        peak_device_allocated_bytes=allocated,
        peak_device_reserved_bytes=reserved,
        peak_host_rss_bytes=rss_bytes,
        observed=_observed(loaded, output, default),
        snapshot_before=snapshot,
        warnings=_snapshot_warnings(snapshot, loaded.device) + warnings,
    )
    return result.model_copy(update={"metric": _metric(workload.metric, workload.items_per_call, result)})


def _bare_run(loaded: LoadedTarget, scenario: str | None, clock: Clock) -> tuple[RunTiming, RunOutput]:
    loaded.prepare_run(scenario)
    start = clock()
    output = loaded.run(scenario, clock=clock)
    loaded.synchronize()
    return RunTiming(start, clock(), [], output.item_end_ns), output


def _choose_sites(
    loaded: LoadedTarget, sites: list[Site], is_auto: bool, clock: Clock
) -> tuple[list[Site], list[ResultWarning]]:
    """One observed run tells which sites are reached, and which are called too often to be a stage."""
    timer = StageTimer(clock, loaded.device)
    with instrument(sites, timer) as state:
        _bare_run(loaded, None, clock)
    counts: dict[str, int] = {}
    for call in timer.take():
        counts[call.site.path] = counts.get(call.site.path, 0) + 1
    warnings = [
        ResultWarning(code="SITE_NOT_OBSERVABLE", message=f"{path}: {reason}")
        for path, reason in state.unobservable.items()
    ]
    chosen = []
    for site in sites:
        count = counts.get(state.aliases.get(site.path, site.path), 0)
        if count == 0 and not is_auto:
            warnings.append(
                ResultWarning(
                    code="STAGE_NEVER_CALLED", message=f"Stage {site.path!r} was not called in a run of the workload."
                )
            )
        elif count > _MAX_CALLS_PER_RUN:
            warnings.append(
                ResultWarning(
                    code="STAGE_CALLED_TOO_OFTEN",
                    message=f"{site.path!r} is called {count} times a run and is left out of stage timing; "
                    "see the regions.",
                )
            )
        elif count:
            chosen.append(site)
    return chosen, warnings


def _timed_runs(
    loaded: LoadedTarget, sites: list[Site], scenario: str | None, clock: Clock
) -> tuple[list[RunTiming], list[float], RunOutput, Instrumentation]:
    """Measured runs with the stages observed, with bare ones between them that show what observing costs."""
    timer = StageTimer(clock, loaded.device)
    timings: list[RunTiming] = []
    bare_ms: list[float] = []
    output = RunOutput(None)
    states: list[Instrumentation] = []
    for index in range(loaded.workload.measured_runs):
        if index < _MAX_BARE_RUNS:
            bare_ms.append(_bare_run(loaded, scenario, clock)[0].wall_ms)
        with instrument(sites, timer) as state:
            timing, output = _bare_run(loaded, scenario, clock)
        timing.calls = timer.take()
        timings.append(timing)
        states.append(state)
    lost = list(dict.fromkeys(path for state in states for path in state.lost))
    num_cut_off = sum(state.num_cut_off for state in states)
    return timings, bare_ms, output, replace(states[-1], lost=lost, num_cut_off=num_cut_off)


def _scenario(
    name: str, runs: list[RunTiming], state: Instrumentation, media: Media | None, device: torch.device
) -> ScenarioTiming:
    for timing in runs:
        _charge_device_children(timing.calls)
    wall_ms = [timing.wall_ms for timing in runs]
    uses_device = device.type != "cpu"
    timed = [_stage(site, runs, wall_ms, state, uses_device) for site in state.sites]
    stages = sorted((stage for stage in timed if stage is not None), key=lambda stage: -stage.share)
    outside_ms = [_outside_ms(timing, uses_device) for timing in runs]
    return ScenarioTiming(
        name=name,
        wall_ms=Samples(launches=[wall_ms]),
        outside_ms=Samples(launches=[outside_ms]),
        outside_share=sum(outside_ms) / sum(wall_ms),
        outside_share_interval=_share_interval(outside_ms, wall_ms),
        stages=stages,
        cadence=_cadence(runs, media),
    )


def _stage(
    site: Site, runs: list[RunTiming], wall_ms: list[float], state: Instrumentation, uses_device: bool
) -> StageTiming | None:
    per_run = [[call for call in timing.calls if call.site is site] for timing in runs]
    if not any(per_run):
        return None
    # A recursive call lies inside its own stage: only the outermost one counts towards the total.
    outer = [[call for call in calls if not _lies_in_own_site(call)] for calls in per_run]
    self_ms = [sum(call.duration_ns - call.child_ns for call in calls) / _NS_PER_MS for calls in per_run]
    device_self_ms = (
        [sum(_device_ms(c) - c.child_device_ms for c in calls) for calls in per_run] if uses_device else None
    )
    cost_ms = device_self_ms or self_ms
    return StageTiming(
        name=site.path,
        owner_type=site.owner_type,
        aliases=[alias for alias, path in state.aliases.items() if path == site.path],
        calls_per_run=sum(not call.is_item for calls in per_run for call in calls) / len(runs),
        items_per_run=sum(call.is_item for calls in per_run for call in calls) / len(runs),
        total_ms=Samples(launches=[[sum(c.duration_ns for c in calls) / _NS_PER_MS for calls in outer]]),
        self_ms=Samples(launches=[self_ms]),
        device_total_ms=Samples(launches=[[sum(map(_device_ms, calls)) for calls in outer]]) if uses_device else None,
        device_self_ms=Samples(launches=[device_self_ms]) if device_self_ms else None,
        call_ms=summarize([call.duration_ns / _NS_PER_MS for calls in per_run for call in _timed_spans(calls)]),
        share=sum(cost_ms) / sum(wall_ms),
        share_interval=_share_interval(cost_ms, wall_ms),
    )


def _timed_spans(calls: list[Call]) -> list[Call]:
    """Calling a generator function does nothing yet: its resumptions are what takes time."""
    return [call for call in calls if call.is_item] or calls


def _lies_in_own_site(call: Call) -> bool:
    parent = call.parent
    while parent is not None:
        if parent.site is call.site:
            return True
        parent = parent.parent
    return False


def _device_ms(call: Call) -> float:
    """Time on the device's stream from the call's first point to its last; read after the run was synchronized."""
    return float(call.events[0].elapsed_time(call.events[1])) if call.events else 0.0


def _charge_device_children(calls: list[Call]) -> None:
    for call in calls:
        if call.parent is not None:
            call.parent.child_device_ms += _device_ms(call)


def _outside_ms(timing: RunTiming, uses_device: bool) -> float:
    """Wall time in no stage: what the union of the outermost spans leaves, so that parallel stages count once."""
    outermost = [call for call in timing.calls if call.parent is None]
    if uses_device:
        return max(0.0, timing.wall_ms - sum(map(_device_ms, outermost)))
    covered_ns, reached_ns = 0, timing.start_ns
    for call in sorted(outermost, key=lambda call: call.start_ns):
        # A thread may go on with a call after the run has ended.
        start_ns, end_ns = max(call.start_ns, reached_ns), min(call.end_ns, timing.end_ns)
        if end_ns > start_ns:
            covered_ns += end_ns - start_ns
            reached_ns = end_ns
    return timing.wall_ms - covered_ns / _NS_PER_MS


def _share_interval(part_ms: list[float], wall_ms: list[float]) -> Interval:
    return bootstrap_interval(lambda part, wall: part.sum(axis=-1) / wall.sum(axis=-1), part_ms, wall_ms, paired=True)


def _cadence(runs: list[RunTiming], media: Media | None) -> CadenceTiming | None:
    streamed = [timing for timing in runs if timing.item_end_ns]
    if not streamed and media is None:
        return None
    if not streamed:
        streamed = [replace(timing, item_end_ns=[timing.end_ns]) for timing in runs]
    arrivals = [np.array([timing.start_ns, *timing.item_end_ns]) for timing in streamed]
    chunk_ms = [gap for times in arrivals for gap in (np.diff(times) / _NS_PER_MS).tolist()]
    summary = summarize(chunk_ms)
    limit_ms = media.chunk_ms - media.margin_ms if media else None
    return CadenceTiming(
        media_ms_per_chunk=media.chunk_ms if media else None,
        margin_ms=media.margin_ms if media else None,
        chunks_per_run=len(chunk_ms) / len(streamed),
        first_chunk_ms=Samples(launches=[[float(times[1] - times[0]) / _NS_PER_MS for times in arrivals]]),
        chunk_ms=summary,
        num_late_chunks=sum(gap > limit_ms for gap in chunk_ms) if limit_ms is not None else None,
        headroom_ms=limit_ms - summary.p95 if limit_ms is not None else None,
    )


def _metric(name: Metric, items_per_call: int, result: StagesResult) -> MetricValue:
    wall_ms = result.default.wall_ms.values
    if name == "peak_memory":
        peak = result.peak_device_allocated_bytes or result.peak_host_rss_bytes or 0
        return MetricValue(name=name, value=float(peak), unit="bytes")
    if name == "cadence_p95":
        assert result.default.cadence is not None, "the workload's check asks for 'media' with this metric"
        return MetricValue(name=name, value=result.default.cadence.chunk_ms.p95, unit="ms")
    if name == "throughput":
        items_per_s = [items_per_call * 1000 / ms for ms in wall_ms]
        interval = bootstrap_interval(lambda values: np.median(values, axis=-1), items_per_s)
        return MetricValue(name=name, value=float(np.median(items_per_s)), unit="items/s", interval=interval)
    percent = {"latency_p50": 50, "latency_p95": 95}[name]
    interval = bootstrap_interval(lambda values: np.percentile(values, percent, axis=-1), wall_ms)
    return MetricValue(name=name, value=float(np.percentile(wall_ms, percent)), unit="ms", interval=interval)


def _observed(loaded: LoadedTarget, output: RunOutput, timing: ScenarioTiming) -> Observed:
    shapes = {path: list(leaf.shape) for path, leaf in _shaped_leaves(output.value)}
    between = "after every run" if loaded.device.type != "cpu" else "none needed on a CPU"
    return Observed(
        output_type=type(output.value).__name__,
        output_shapes=shapes,
        num_items=len(output.item_end_ns) if output.is_streamed else None,
        stage_calls={stage.name: stage.calls_per_run for stage in timing.stages},
        is_compile_warm=bool(loaded.compiled_modules),
        are_caches_warm=True,
        synchronization_points=["before every run", between, "none inside a run"],
    )


def _shaped_leaves(value: Any, path: str = "output") -> list[tuple[str, Any]]:
    """Tensors and arrays in an output, a few levels deep."""
    if hasattr(value, "shape") and not callable(value.shape):
        return [(path, value)]
    if isinstance(value, dict):
        pairs = [(f"{path}.{key}", inner) for key, inner in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = [(f"{path}.{index}", inner) for index, inner in enumerate(value[:4])]
    else:
        return []
    return [leaf for name, inner in pairs for leaf in _shaped_leaves(inner, name)]


def _state_warnings(state: Instrumentation) -> list[ResultWarning]:
    warnings = [
        ResultWarning(
            code="HOOK_LOST", message=f"The observation of {path!r} was removed by other code during the run."
        )
        for path in state.lost
    ]
    if state.num_cut_off:
        message = f"{state.num_cut_off} observed calls never returned and were closed at the end of their run."
        warnings.append(ResultWarning(code="CALLS_CUT_OFF", message=message))
    return warnings


def _snapshot_warnings(snapshot: Snapshot, device: torch.device) -> list[ResultWarning]:
    """What in the machine's state before the first run may disturb the timings."""
    warnings = []
    state = snapshot_of(snapshot, device)
    if state is not None and state.other_processes:
        others = ", ".join(f"{process.name} (pid {process.pid})" for process in state.other_processes)
        message = f"Other processes use {device}: {others}. Timings and free memory depend on what they do."
        warnings.append(ResultWarning(code="DEVICE_SHARED", message=message))
    if state is not None and state.free_memory_bytes is not None and state.total_memory_bytes:
        free_frac = state.free_memory_bytes / state.total_memory_bytes
        if free_frac < _LOW_MEMORY_FRAC:
            free = f"{state.free_memory_bytes / 2**30:.1f} GiB ({free_frac:.0%})"
            message = f"Only {free} of {device} are free before the first run."
            warnings.append(ResultWarning(code="DEVICE_MEMORY_LOW", message=message))
    if snapshot.is_busy:
        message = (
            f"The machine's load is {snapshot.load_average_1m:.1f} on {snapshot.num_cpus} CPUs; timings will be noisy."
        )
        warnings.append(ResultWarning(code="MACHINE_BUSY", message=message))
    return warnings


def _event_pair(device: torch.device) -> tuple[Any, Any]:
    import torch

    return torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)


def _reset_peak_memory(loaded: LoadedTarget) -> None:
    if loaded.device.type != "cpu":
        import torch

        torch.accelerator.reset_peak_memory_stats(loaded.device)


def _peak_device_memory(loaded: LoadedTarget) -> tuple[int | None, int | None]:
    if loaded.device.type == "cpu":
        return None, None
    import torch

    return (
        torch.accelerator.max_memory_allocated(loaded.device),
        torch.accelerator.max_memory_reserved(loaded.device),
    )
