"""Rung 1, stage timing: which stage dominates the metric that matters? Cost: plain runs, no profiler."""

from __future__ import annotations

import resource
import time
from dataclasses import replace
from typing import Any

import numpy as np

from perfladder.environment import take_snapshot
from perfladder.instrument import Instrumentation, Site, instrument
from perfladder.models import Model, ResultWarning
from perfladder.rungs.base import RungContext
from perfladder.rungs.cost import CostEstimate
from perfladder.session import Caller
from perfladder.stats import bootstrap_interval
from perfladder.steady import WarmupEnd
from perfladder.target import LoadedTarget
from perfladder.timing.choose import candidate_sites, choose_sites
from perfladder.timing.compilation import compilations_of, compile_warnings
from perfladder.timing.dominance import dominating_stage
from perfladder.timing.load import repeat_in_launches, with_load
from perfladder.timing.machine import end_warnings, require_idle, snapshot_warnings
from perfladder.timing.memory import (
    DEVICE_NOISE_BYTES,
    HOST_NOISE_BYTES,
    find_growth,
    measure_memory,
    peak_device_memory,
    reset_peak_memory,
)
from perfladder.timing.results import (
    CadenceTiming,
    MemoryGrowth,
    MetricValue,
    Observed,
    ScenarioTiming,
    StageMemory,
    StagesResult,
    StageTiming,
)
from perfladder.timing.runs import Runs, bare_run, number_of_pairs, overhead_of, timed_runs
from perfladder.timing.scenario import cold_stages_ms, scenario_timing
from perfladder.timing.steadiness import settle, steadiness_of, steadiness_warnings
from perfladder.timing.timer import Call, Clock, RunTiming, StageTimer
from perfladder.user_code import RunOutput
from perfladder.workload import Metric, Workload

__all__ = [
    "CadenceTiming",
    "Call",
    "MetricValue",
    "Observed",
    "RunTiming",
    "ScenarioTiming",
    "StageTimer",
    "StageTiming",
    "StagesRequest",
    "StagesResult",
    "judged",
    "measure",
    "observe_output",
    "run",
]


class StagesRequest(Model):
    """Rung 1 takes everything it needs from the workload."""


def estimate(context: RungContext) -> CostEstimate:
    """Nothing is known of a workload that has not run yet."""
    workload = context.workload
    runs = 1 + workload.warmup_runs + workload.measured_runs * (1 + len(workload.scenario_names))
    launches = f", in {workload.num_launches} processes" if workload.num_launches > 1 else ""
    return CostEstimate(basis=f"{runs} runs or more of a workload that has not run yet{launches}")


def run(context: RungContext, request: StagesRequest | None = None) -> StagesResult:
    """Time the stages in the broad session, before anything there is profiled; then what else the workload asks for."""

    def measure_in(session: Caller) -> StagesResult:
        return session.call(measure, request or StagesRequest(), timeout_s=context.workload.timeout_s)

    result = repeat_in_launches(context, measure_in)
    # What each of its ranks and launches has found is not yet what the job's numbers say.
    return with_load(context, judged(context.workload, result))


def measure(loaded: LoadedTarget, request: StagesRequest, *, clock: Clock = time.perf_counter_ns) -> StagesResult:
    """Run the workload cold, warm it up, and time it with its stages observed; then look at memory in a run of its own.

    Raises:
        InputError: A stage that the workload names does not exist.
        NotPossibleHereError: The workload demands an idle device, and this one is not.
        WorkloadError: The workload raised.
    """
    from perfladder._torch_private import compile_counters

    workload = loaded.workload
    snapshot = take_snapshot()
    if workload.require_idle_device:
        require_idle(snapshot, loaded.device)
    candidates, unresolved = candidate_sites(loaded)
    counters = [compile_counters()]
    first, cold_ms = _first_run(loaded, candidates, clock)
    counters.append(compile_counters())
    warmup = [bare_run(loaded, None, clock)[0].wall_ms for _ in range(workload.warmup_runs)]
    sites, warnings = choose_sites(loaded, candidates, unresolved, clock)
    counters.append(compile_counters())
    reset_peak_memory(loaded)
    num_pairs = number_of_pairs(loaded.agreed(first.wall_ms))
    runs = timed_runs(loaded, sites, None, clock, workload.measured_runs, num_pairs)

    def measure_more(count: int) -> list[RunTiming]:
        more = timed_runs(loaded, sites, None, clock, count, 0)
        runs.states += more.states
        return more.timings

    warmup, timings, end = settle(
        warmup, runs.timings, limit=workload.warmup_limit, measure_more=measure_more, agreed=loaded.agreed
    )
    counters.append(compile_counters())
    allocated, reserved = peak_device_memory(loaded)
    after = take_snapshot()
    scenarios = [_scenario(loaded, "default", replace(runs, timings=timings), warnings, end)]
    for name in workload.scenario_names:
        bare_run(loaded, name, clock)
        scenario_runs = timed_runs(loaded, sites, name, clock, workload.measured_runs, 0)
        scenarios.append(_scenario(loaded, name, scenario_runs, warnings, None))
    if workload.metric == "cadence_p95" and not runs.output.is_streamed:
        message = "metric cadence_p95: the call does not stream its output, so each call counts as one chunk."
        warnings.append(ResultWarning(code="CADENCE_OF_CALLS", message=message))
    rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    observed = observe_output(loaded, runs.output, scenarios[0])
    growth = (
        find_growth(runs.resident_bytes, noise_bytes=HOST_NOISE_BYTES),
        find_growth(runs.allocated_bytes, noise_bytes=DEVICE_NOISE_BYTES),
    )
    runs.output = RunOutput(None)
    by_stage, host_memory = measure_memory(loaded, sites)
    scenarios[0] = _with_memory(scenarios[0], by_stage)
    compilations = compilations_of(counters)
    ratio, ratio_interval = overhead_of(runs.pairs_ms)
    result = StagesResult(
        first_call_ms=first.wall_ms,
        first_call_stages_ms={site.path: cold_ms[site.path] for site in sites if site.path in cold_ms},
        warmup_ms=warmup,
        scenarios=scenarios,
        overhead_ratio=ratio,
        overhead_ratio_interval=ratio_interval,
        num_overhead_pairs=len(runs.pairs_ms),
        compilations=compilations,
        peak_device_allocated_bytes=allocated,
        peak_device_reserved_bytes=reserved,
        peak_host_rss_bytes=rss_bytes,
        host_memory=host_memory,
        host_memory_growth=growth[0],
        device_memory_growth=growth[1] if runs.allocated_bytes else None,
        observed=observed,
        snapshot_before=snapshot,
        snapshot_after=after,
        warnings=[
            *snapshot_warnings(snapshot, loaded.device),
            *warnings,
            *end_warnings(after, loaded.device),
            *compile_warnings(compilations),
            *_growth_warnings(host=growth[0], device=growth[1]),
        ],
    )
    return judged(workload, result)


def _first_run(loaded: LoadedTarget, candidates: list[Site], clock: Clock) -> tuple[RunTiming, dict[str, float]]:
    """The cold run, with what each stage took in it; hooks would become part of a graph that is compiled there."""
    from perfladder.profiling.discover import find_parts

    if loaded.compiled_modules or any(part.is_compiled for part in find_parts(loaded.obj)):
        return bare_run(loaded, None, clock)[0], {}
    timer = StageTimer(clock, loaded.device)
    with instrument(candidates, timer):
        timing = bare_run(loaded, None, clock)[0]
    timing.calls = timer.take()
    return timing, cold_stages_ms(timing)


def judged(workload: Workload, result: StagesResult) -> StagesResult:
    """With the metric that matters and the stage that dominates it."""
    dominating, by = dominating_stage(workload.metric, result.default)
    metric = _metric(workload.metric, workload.items_per_call, result)
    return result.model_copy(update={"metric": metric, "dominating": dominating, "dominating_by": by})


def _scenario(
    loaded: LoadedTarget, name: str, runs: Runs, warnings: list[ResultWarning], end: WarmupEnd | None
) -> ScenarioTiming:
    """Attribute a scenario's runs and judge them; adds to `warnings`."""
    state = runs.state
    timing = scenario_timing(name, runs.timings, state, loaded.workload.media, loaded.device)
    steadiness = steadiness_of(timing.wall_ms.values, end)
    warnings += [*_state_warnings(state), *steadiness_warnings(name, steadiness)]
    return timing.model_copy(update={"steadiness": steadiness})


def _with_memory(timing: ScenarioTiming, by_stage: dict[str, StageMemory]) -> ScenarioTiming:
    stages = [stage.model_copy(update={"memory": by_stage.get(stage.name)}) for stage in timing.stages]
    return timing.model_copy(update={"stages": stages})


def _growth_warnings(**growth: MemoryGrowth) -> list[ResultWarning]:
    return [
        ResultWarning(code="MEMORY_GROWS", message=f"The {where}'s memory in use grows from run to run. {found.reason}")
        for where, found in growth.items()
        if found.is_growing
    ]


def _metric(name: Metric, items_per_call: int, result: StagesResult) -> MetricValue | None:
    if name == "cold_start":
        return None  # from launches of its own
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


def observe_output(loaded: LoadedTarget, output: RunOutput, timing: ScenarioTiming) -> Observed:
    """What the last output and the calls of a run show about the work."""
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
