"""The numbers of a rung's result as metrics: names end in their unit, and parts of a name are divided by slashes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import singledispatch

from perfladder.rungs.base import RungResult
from perfladder.rungs.harness import HarnessResult
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.ncu import NcuResult
from perfladder.rungs.regions import RegionsResult
from perfladder.rungs.stages import MetricValue, ScenarioTiming, StagesResult

_UNITS = ("_ms", "_us", "_s", "_bytes", "_frac", "_share", "_ratio", "_error", "_per_run", "_tflops", "_gb_per_s")
_METRIC_UNITS = {"ms": "ms", "items/s": "items_per_s", "bytes": "bytes"}
_MAX_ROWS = 50
"""Of a long table, the largest rows become metrics; the whole table is in the result file."""

_MAX_STALLS = 5

Pairs = Iterable[tuple[str, float | None]]


def metrics_of(result: RungResult) -> dict[str, float]:
    """All metrics of a result; what is absent or not finite is left out, never 0."""
    pairs = (
        [*_plain_numbers(result), *_more(result)] if result.status == "done" else [("duration_s", result.duration_s)]
    )
    return finite(pairs)


def finite(pairs: Pairs) -> dict[str, float]:
    """Those that have a finite value."""
    return {name: float(value) for name, value in pairs if value is not None and math.isfinite(value)}


def metric_that_matters(metric: MetricValue) -> dict[str, float]:
    """The workload's own metric, with the ends of its interval: `latency_p50_ms`, `latency_p50_low_ms`."""
    unit = _METRIC_UNITS[metric.unit]
    base = metric.name.removesuffix(f"_{unit}")
    found = {f"{base}_{unit}": metric.value}
    if metric.interval is not None:
        found |= {f"{base}_low_{unit}": metric.interval.low, f"{base}_high_{unit}": metric.interval.high}
    return found


def headline(result: StagesResult) -> dict[str, float]:
    """What the parent run shows of rung 1: the metric that matters, memory, and each stage in the first scenario."""
    if result.metric is None:
        return {}
    parts = ("stage/", "peak_", *metric_that_matters(result.metric))
    return {name: value for name, value in metrics_of(result).items() if name.startswith(parts)}


def _plain_numbers(result: RungResult) -> Pairs:
    """Top-level numbers whose names end in a unit, and counts: enough for a rung that is not known here."""
    for name, value in result:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and (name.endswith(_UNITS) or name.startswith("num_")):
            yield name, value


@singledispatch
def _more(result: RungResult) -> Pairs:
    """What the plain numbers of a known result leave out."""
    return ()


@_more.register
def _(result: StagesResult) -> Pairs:
    if result.metric is not None:
        yield from metric_that_matters(result.metric).items()
    yield from _load(result)
    yield from _ranks(result)
    for scenario in result.scenarios:
        prefix = "" if scenario is result.scenarios[0] else f"scenario/{scenario.name}/"
        for name, value in _scenario(scenario):
            yield prefix + name, value


def _ranks(result: StagesResult) -> Pairs:
    """Each rank beside the job's own numbers, which are those of its slowest rank in each run."""
    if result.ranks is None:
        return
    yield "ranks/start_skew_p50_ms", result.ranks.start.p50_ms
    yield "ranks/end_skew_p50_ms", result.ranks.end.p50_ms
    for own in result.ranks.ranks:
        prefix = f"rank/{own.rank}"
        yield f"{prefix}/wall_ms_p50", own.wall_ms.summary.p50
        yield f"{prefix}/lag_ms", own.lag_ms
        yield f"{prefix}/num_runs_slowest", own.num_runs_slowest
        yield f"{prefix}/peak_host_rss_bytes", own.peak_host_rss_bytes
        yield f"{prefix}/peak_device_allocated_bytes", own.peak_device_allocated_bytes
        for stage in own.stages:
            yield f"{prefix}/stage/{stage.name}/self_ms_p50", stage.self_ms


def _load(result: StagesResult) -> Pairs:
    """Throughput of each scenario, latency with several requests at once, and energy."""
    for row in result.throughput:
        prefix = "" if row is result.throughput[0] else f"scenario/{row.scenario}/"
        yield f"{prefix}items_per_s_p50", row.items_per_s
    for level in result.concurrency:
        prefix = f"concurrency/{level.concurrency}"
        yield f"{prefix}/items_per_s", level.items_per_s
        yield f"{prefix}/num_errors", level.num_errors if level.failure is None else None
        if level.latency_ms is not None:
            latency_ms = level.latency_ms.summary
            yield f"{prefix}/latency_ms_p50", latency_ms.p50
            yield f"{prefix}/latency_ms_p95", latency_ms.p95
            yield f"{prefix}/latency_ms_p99", latency_ms.p99
    if result.energy is not None:
        yield "energy_j_per_run", result.energy.energy_j_per_run
        yield "energy_j_per_item", result.energy.energy_j_per_item
    if result.cold_start is not None:
        for name, samples in result.cold_start.parts_ms.items():
            yield f"cold_start/{name}_ms_p50", samples.summary.p50


def _scenario(scenario: ScenarioTiming) -> Pairs:
    wall_ms = scenario.wall_ms.summary
    yield from (("wall_ms_p50", wall_ms.p50), ("wall_ms_p95", wall_ms.p95), ("outside_share", scenario.outside_share))
    for stage in scenario.stages:
        prefix = f"stage/{stage.name}"
        yield f"{prefix}/self_ms_p50", stage.self_ms.summary.p50
        yield f"{prefix}/share", stage.share
        yield f"{prefix}/calls_per_run", stage.calls_per_run
        if stage.device_self_ms is not None:
            yield f"{prefix}/device_self_ms_p50", stage.device_self_ms.summary.p50
    if scenario.cadence is not None:
        cadence = scenario.cadence
        yield "cadence/first_chunk_ms_p50", cadence.first_chunk_ms.summary.p50
        yield "cadence/chunk_ms_p95", cadence.chunk_ms.p95
        yield "cadence/num_late_chunks", cadence.num_late_chunks
        yield "cadence/headroom_ms", cadence.headroom_ms


@_more.register
def _(result: HarnessResult) -> Pairs:
    if result.timing_ratio_interval is not None:
        yield "timing_low_ratio", result.timing_ratio_interval.low
        yield "timing_high_ratio", result.timing_ratio_interval.high
    yield "max_abs_error", result.max_abs_error
    yield "max_rel_error", result.max_rel_error


@_more.register
def _(result: RegionsResult) -> Pairs:
    for region in sorted(result.regions, key=lambda region: -region.cpu_share)[:_MAX_ROWS]:
        prefix = f"region/{region.name}"
        yield f"{prefix}/cpu_ms", region.cpu_ms
        yield f"{prefix}/cpu_share", region.cpu_share
        yield f"{prefix}/device_ms", region.device_ms
        yield f"{prefix}/device_share", region.device_share
    if result.residual is not None:
        yield from (
            ("outside_cpu_share", result.residual.cpu_share),
            ("outside_device_share", result.residual.device_share),
        )

    for own in result.ranks:
        yield f"rank/{own.rank}/profiled_ms", own.profiled_ms
        yield f"rank/{own.rank}/device_busy_ms", own.device_busy_ms
        yield f"rank/{own.rank}/outside_share", own.residual_share


@_more.register
def _(result: KernelsResult) -> Pairs:
    for kind, shares in (("operator", result.by_operator), ("module", result.by_module)):
        for row in shares[:_MAX_ROWS]:
            yield f"{kind}/{row.name}/total_us", row.total_us
            yield f"{kind}/{row.name}/share", row.share


@_more.register
def _(result: NcuResult) -> Pairs:
    """Utilization and waiting only: ncu's durations are of repeated kernels, and no metric beside other times."""
    for launch in result.launches:
        prefix = f"launch/{launch.index}"
        for row in launch.diagnosis.observations:
            yield f"{prefix}/{row.metric}", row.value
        for stall in launch.diagnosis.stalls[:_MAX_STALLS]:
            yield f"{prefix}/stall/{stall.reason}/share", stall.share
