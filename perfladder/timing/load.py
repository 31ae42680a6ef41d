"""What rung 1 measures beyond the runs of one process: more launches, throughput, energy, load, cold starts.

Each is asked for by the workload, except throughput and energy. What fails here costs its own numbers only.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from perfladder.errors import PerfladderError, WorkloadTimeoutError
from perfladder.models import ResultWarning
from perfladder.rungs.base import RungContext
from perfladder.session import Caller
from perfladder.stats import bootstrap_interval
from perfladder.timing.cold_start import ColdLaunch, ColdRequest, ColdStart, cold_start_of, measure_cold
from perfladder.timing.concurrency import ConcurrencyLevel, ConcurrencyRequest, measure_concurrency
from perfladder.timing.energy import Energy, EnergyRequest, measure_energy
from perfladder.timing.launches import merge_launches
from perfladder.timing.results import MetricValue, StagesResult
from perfladder.timing.throughput import Saturation, Throughput, saturation_of, throughput_of
from perfladder.workload import Workload

Warnings = list[ResultWarning]


def with_load(context: RungContext, result: StagesResult) -> StagesResult:
    """Add throughput, energy, concurrency and cold start to the timing of a workload."""
    workload = context.workload
    warnings: Warnings = []
    cold_start = _measure_cold_starts(context, warnings) if workload.metric == "cold_start" else None
    return result.model_copy(
        update={
            "metric": _cold_metric(cold_start) if cold_start else _with_basis(result),
            "throughput": _throughput(workload, result),
            "saturation": _saturation(workload, result),
            "energy": _measure_energy(context),
            "concurrency": _measure_levels(context, warnings) if workload.concurrency else [],
            "cold_start": cold_start,
            "warnings": [*result.warnings, *warnings],
        }
    )


def repeat_in_launches(context: RungContext, measure: Callable[[Caller], StagesResult]) -> StagesResult:
    """Measure in the broad session, then in processes of their own, as many as the workload asks for; join the samples.

    Args:
        context: Of the rung.
        measure: Measures rung 1 in a session.
    """
    workload = context.workload
    # The launches of a cold start are measured apart.
    count = 1 if workload.metric == "cold_start" else workload.num_launches
    results, warnings = [measure(context.broad)], []
    for number in range(2, count + 1):
        context.tell(f"stages: launch {number} of {count}")
        try:
            with _fresh(context) as launch:
                results.append(measure(launch))
        except PerfladderError as error:
            warnings.append(_launch_failed(number, count, error))
    merged = merge_launches(results) if len(results) > 1 else results[0]
    return merged.model_copy(update={"warnings": [*merged.warnings, *warnings]})


def _throughput(workload: Workload, result: StagesResult) -> list[Throughput]:
    names = [None, *workload.scenario_names]
    return [
        throughput_of(timing.name, timing.wall_ms, workload.input_set(name).items_per_call)
        for name, timing in zip(names, result.scenarios, strict=True)
    ]


def _saturation(workload: Workload, result: StagesResult) -> Saturation | None:
    if workload.sweep is None:
        return None
    wall_ms = {timing.name: timing.wall_ms for timing in result.scenarios}
    items = {name: workload.input_set(name).items_per_call for name in workload.sweep.scenario_names}
    return saturation_of(workload.sweep, wall_ms, items)


def _measure_energy(context: RungContext) -> Energy:
    if context.workload.nproc > 1:
        return Energy(reason="it is not counted for several ranks, which may share a device")
    try:
        return context.broad.call(measure_energy, EnergyRequest(), timeout_s=context.workload.timeout_s)
    except PerfladderError as error:
        return Energy(reason=str(error))


def _measure_levels(context: RungContext, warnings: Warnings) -> list[ConcurrencyLevel]:
    """Every level in one process of its own: what requests do to the shared object stays there."""
    numbers, timeout_s = context.workload.concurrency, context.workload.timeout_s
    levels: list[ConcurrencyLevel] = []
    with _fresh(context) as launch:
        for number in numbers:
            context.tell(f"stages: {number} requests at once")
            request = ConcurrencyRequest(concurrency=number, num_requests=number * context.workload.measured_runs)
            try:
                levels.append(launch.call(measure_concurrency, request, timeout_s=timeout_s))
            except PerfladderError as error:
                levels.append(ConcurrencyLevel(concurrency=number, failure=str(error)))
                if isinstance(error, WorkloadTimeoutError):
                    break
    warnings += [warning for level in levels if (warning := _level_warning(level)) is not None]
    missing = [ConcurrencyLevel(concurrency=n, failure="not tried") for n in numbers[len(levels) :]]
    return levels + missing


def _level_warning(level: ConcurrencyLevel) -> ResultWarning | None:
    if level.failure is not None:
        message = f"{level.concurrency} requests at once: {level.failure.splitlines()[0]}"
        return ResultWarning(code="CONCURRENCY_NOT_MEASURED", message=message)
    if level.num_errors:
        message = (
            f"{level.concurrency} requests at once: {level.num_errors} of {level.num_requests} raised. The commonest: "
            f"{next(iter(level.errors))}"
        )
        return ResultWarning(code="CONCURRENT_REQUESTS_FAILED", message=message)
    return None


def _measure_cold_starts(context: RungContext, warnings: Warnings) -> ColdStart | None:
    """Launches that share a compile cache of their own, empty at first; one that fills it is not counted."""
    count = context.workload.num_launches
    launches: list[ColdLaunch] = []
    with tempfile.TemporaryDirectory(prefix="perfladder-compile-cache-") as folder:
        number = 0
        while number < count:
            number += 1
            context.tell(f"stages: cold start {number} of {count}")
            try:
                launch = _launch_cold(context, Path(folder), is_first=not launches)
            except PerfladderError as error:
                warnings.append(_launch_failed(number, count, error))
                continue
            launches.append(launch)
            if launch.compile_cache == "empty":
                number -= 1
    is_any_counted = any(launch.compile_cache != "empty" for launch in launches)
    return cold_start_of(launches) if is_any_counted else None


def _launch_cold(context: RungContext, cache: Path, *, is_first: bool) -> ColdLaunch:
    timeout_s = context.workload.timeout_s
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    assert context.open_fresh is not None
    with context.open_fresh(variables) as launch:
        load_s = launch.load().load_s
        calls = launch.call(measure_cold, ColdRequest(), timeout_s=timeout_s)
    is_compiled = calls.num_graphs > 0
    return ColdLaunch(
        load_ms={name: 1000 * seconds for name, seconds in load_s.items()},
        calls=calls,
        compile_cache="not_used" if not is_compiled else "empty" if is_first else "filled",
    )


def _cold_metric(cold_start: ColdStart) -> MetricValue:
    total_ms = cold_start.total_ms.values
    interval = bootstrap_interval(lambda values: np.median(values, axis=-1), total_ms)
    return MetricValue(
        name="cold_start",
        value=float(np.median(total_ms)),
        unit="ms",
        interval=interval,
        interval_basis=f"{len(total_ms)} process launches",
    )


def _with_basis(result: StagesResult) -> MetricValue | None:
    """The metric, whose interval speaks for the runs of all launches."""
    count = len(result.default.wall_ms.launches)
    if result.metric is None or result.metric.interval is None or count == 1:
        return result.metric
    return result.metric.model_copy(update={"interval_basis": f"runs of {count} processes together"})


def _fresh(context: RungContext) -> contextlib.AbstractContextManager[Caller]:
    """A new process; where there is none to be had, as in a notebook, the session that is there."""
    return context.open_fresh({}) if context.open_fresh is not None else contextlib.nullcontext(context.broad)


def _launch_failed(number: int, count: int, error: PerfladderError) -> ResultWarning:
    return ResultWarning(code="LAUNCH_FAILED", message=f"Launch {number} of {count} gave no samples: {error}")
