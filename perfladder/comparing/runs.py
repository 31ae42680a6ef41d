"""Compare two versions by their finished runs, or by what was measured for the comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import numpy as np

from perfladder.comparing.differences import comparison_warnings, list_differences, require_same_work
from perfladder.comparing.judge import Judge
from perfladder.comparing.model import Change, OneSided, RunComparison, ScenarioChange, Where
from perfladder.comparing.profiled import (
    compare_counts,
    compare_families,
    compare_regions,
    kernels_moved,
    rung_warnings,
)
from perfladder.comparing.sides import MeasuredSide, read_side
from perfladder.errors import InputError
from perfladder.stats import MIN_LAUNCHES, Samples
from perfladder.timing.results import ScenarioTiming, StagesResult, StageTiming

MIN_EFFECT: Final = 0.02
"""Relative change below which none counts, unless another one is asked for."""

LAUNCHES: Final = 6
"""Pairs of processes of an interleaved comparison, unless the workload's `launches` says otherwise: an even number, so
that each side is loaded first as often as the other."""

OUTSIDE: Final = "(outside every stage)"

Runs = str | Path | Sequence[str | Path]


def compare_runs(
    baseline: Runs,
    candidate: Runs,
    *,
    min_effect: float = MIN_EFFECT,
    aa_noise_floor: float | None = None,
    runs_dir: str | Path = "runs",
) -> RunComparison:
    """Compare two versions of one workload by their run directories.

    The runs were made after each other, so the unit of every verdict is a process launch: measure each side with
    `launches: 5` or more, or give five runs a side. With fewer, all is `undecided` and only ratios are told.

    Args:
        baseline: A run's folder, its id, `latest`, a workload's name or a commit; or several of them.
        candidate: The same for the other version.
        min_effect: Relative change below which none counts.
        aa_noise_floor: Relative change that the same code shows on this machine; no smaller one is believed.
        runs_dir: Where runs are looked for that are not given as folders.

    Raises:
        InputError: There is no such run, it was not measured, or the sides do not do the same work.
    """
    from perfladder.find_runs import find_runs

    sides = []
    for where, named in (("baseline", baseline), ("candidate", candidate)):
        names = [named] if isinstance(named, (str, Path)) else list(named)
        paths = [path for name in names for path in find_runs(str(name), Path(runs_dir))]
        sides.append(read_side(paths, f"{where} {', '.join(map(str, names))}"))
    return compare_read(*sides, min_effect=min_effect, aa_noise_floor=aa_noise_floor)


def compare_read(
    baseline: MeasuredSide, candidate: MeasuredSide, *, min_effect: float, aa_noise_floor: float | None = None
) -> RunComparison:
    """Compare two sides that were read from run directories.

    Raises:
        InputError: They share a run, or do not do the same work.
    """
    shared = {path.resolve() for path in baseline.paths} & {path.resolve() for path in candidate.paths}
    if shared:
        raise InputError(f"Both sides name the run {min(shared)}; name another one, such as an earlier commit.")
    judge = Judge(interleaved=False, min_effect=min_effect, aa_noise_floor=aa_noise_floor)
    return compare_sides(baseline, candidate, judge)


def compare_sides(baseline: MeasuredSide, candidate: MeasuredSide, judge: Judge) -> RunComparison:
    """Compare what was measured of both sides.

    Raises:
        InputError: They do not do the same work, or `judge.min_effect` is no relative change.
    """
    from perfladder import __version__

    check_min_effect(judge.min_effect)
    require_same_work(baseline.workload, candidate.workload)
    prints = baseline.fingerprints, candidate.fingerprints
    protocol = list_differences(prints[0].protocol.fields, prints[1].protocol.fields)
    environments = [side.info.environment.model_dump(mode="json") for side in (baseline, candidate)]
    scenarios = _compare_scenarios(baseline.stages, candidate.stages, judge)
    metric = _compare_metric(baseline, candidate, judge, scenarios[0].end_to_end)
    # Profiled windows of interleaved sides do not exist, and one value a run directory is never a pair.
    launches = Judge(interleaved=False, min_effect=judge.min_effect)
    return RunComparison(
        perfladder_version=__version__,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        workload=candidate.workload.name,
        method="interleaved" if judge.interleaved else "sequential",
        baseline=baseline.summary,
        candidate=candidate.summary,
        min_effect=judge.min_effect,
        aa_noise_floor=judge.aa_noise_floor,
        metric_name=candidate.workload.metric,
        verdict=metric.verdict,
        reason=metric.reason,
        next_step=_next_step(metric, judge),
        metric=metric,
        configuration=list_differences(prints[0].configuration.fields, prints[1].configuration.fields),
        environment=list_differences(*environments),
        protocol=protocol,
        scenarios=scenarios,
        counts=compare_counts(baseline, candidate),
        regions=compare_regions(baseline, candidate, launches),
        families=compare_families(baseline, candidate, launches),
        kernels_moved=kernels_moved(baseline, candidate),
        warnings=[*comparison_warnings(baseline, candidate, protocol), *rung_warnings(baseline, candidate)],
    )


def check_min_effect(value: float) -> None:
    """Refuse what is no relative change.

    Raises:
        InputError: It is negative, NaN or infinite.
    """
    if not 0 <= value < math.inf:
        raise InputError(f"min_effect is {value}; expected a relative change such as 0.02, from 0 up.")


def _compare_scenarios(baseline: StagesResult, candidate: StagesResult, judge: Judge) -> list[ScenarioChange]:
    """Scenarios are part of the work, so both sides have the same."""
    others = {timing.name: timing for timing in candidate.scenarios}
    return [_compare_scenario(one, others[one.name], judge) for one in baseline.scenarios if one.name in others]


def _compare_scenario(baseline: ScenarioTiming, candidate: ScenarioTiming, judge: Judge) -> ScenarioChange:
    sides = [{stage.name: stage for stage in side.stages} for side in (baseline, candidate)]
    stages = [_compare_stage(sides[0][name], sides[1][name], judge) for name in sides[0] if name in sides[1]]
    stages.append(judge.change(OUTSIDE, baseline.outside_ms, candidate.outside_ms))
    cadences = baseline.cadence, candidate.cadence
    first_output = None
    if cadences[0] is not None and cadences[1] is not None and max(c.chunks_per_run for c in cadences if c) > 1:
        first_output = judge.change("first chunk", cadences[0].first_chunk_ms, cadences[1].first_chunk_ms)
    return ScenarioChange(
        name=baseline.name,
        end_to_end=judge.change("end to end", baseline.wall_ms, candidate.wall_ms),
        first_output=first_output,
        stages=sorted(stages, key=lambda row: -abs(row.change)),
        only_one_side=[*_only("baseline", sides[0], sides[1]), *_only("candidate", sides[1], sides[0])],
    )


def _compare_stage(baseline: StageTiming, candidate: StageTiming, judge: Judge) -> Change:
    on_device = baseline.device_self_ms is not None and candidate.device_self_ms is not None
    times = [stage.cost_ms if on_device else stage.self_ms for stage in (baseline, candidate)]
    return judge.change(baseline.name, times[0], times[1])


def _only(where: Where, own: dict[str, StageTiming], others: dict[str, StageTiming]) -> list[OneSided]:
    return [
        OneSided(name=name, only=where, value=stage.cost_ms.summary.p50, unit="ms")
        for name, stage in own.items()
        if name not in others
    ]


def _compare_metric(baseline: MeasuredSide, candidate: MeasuredSide, judge: Judge, end_to_end: Change) -> Change:
    """The workload's own metric as a time or a size, of which less is better."""
    name = candidate.workload.metric
    if name == "latency_p50":
        return end_to_end.model_copy(update={"name": "latency_p50"})
    samples = metric_samples(baseline), metric_samples(candidate)
    if samples[0] is None or samples[1] is None:
        return end_to_end.model_copy(update={"name": f"end to end (no {name} was measured)"})
    if name == "throughput":
        return judge.change("time of an item (throughput)", samples[0], samples[1])
    launches = Judge(interleaved=False, min_effect=judge.min_effect, aa_noise_floor=judge.aa_noise_floor)
    return launches.change(name, samples[0], samples[1], "bytes" if name == "peak_memory" else "ms")


def metric_samples(side: MeasuredSide) -> Samples | None:
    """The workload's own metric as times in ms, or bytes, of which less is better; None where it was not measured.

    For `throughput` it is the time of an item. A percentile above the median has one value for each launch, memory and
    cadence one for each run directory.
    """
    name, wall_ms, cold_start = side.workload.metric, side.stages.default.wall_ms, side.stages.cold_start
    if name == "latency_p50":
        return wall_ms
    if name == "throughput":
        return _scaled(wall_ms, side.workload.items_per_call)
    if name == "latency_p95":
        return _of_each_launch(wall_ms, _p95)
    if name == "cold_start" and cold_start is not None:
        return cold_start.total_ms
    values = _metric_of_each_run(side)
    return Samples(launches=[[value] for value in values]) if values else None


def _metric_of_each_run(side: MeasuredSide) -> list[float]:
    return [result.metric.value for result in side.all_stages if result.metric is not None]


def _scaled(samples: Samples, divisor: int) -> Samples:
    return Samples(launches=[[value / divisor for value in launch] for launch in samples.launches])


def _of_each_launch(samples: Samples, statistic: Callable[[list[float]], float]) -> Samples:
    return Samples(launches=[[statistic(launch)] for launch in samples.launches])


def _p95(values: list[float]) -> float:
    return float(np.percentile(values, 95))


def _next_step(metric: Change, judge: Judge) -> str | None:
    if metric.verdict != "undecided":
        return None
    if metric.interval is None and judge.interleaved:
        return f"Measure in more processes: --set launches={LAUNCHES}."
    if metric.interval is None:
        return (
            f"Run both sides with --set launches={MIN_LAUNCHES}, or measure them in turns: perfladder compare WORKLOAD "
            "--interleave, with --baseline-commit or --baseline-set."
        )
    how = "--set launches, --pairs" if judge.interleaved else "more launches, or --interleave"
    return f"Measure more ({how}) on a machine that does nothing else."
