"""What the ranks of one job saw together: who is slowest, how far apart they are, and the job's own numbers.

All ranks run on one machine and start a run together; their clocks are the machine's monotonic one, so that moments can
be compared between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from perfladder.models import Model, ResultWarning
from perfladder.stats import Samples, bootstrap_interval

if TYPE_CHECKING:
    from perfladder.timing.results import ScenarioTiming, StagesResult, StageTiming

_NS_PER_MS = 1e6
_END = ""
"""The boundary at a run's end, beside those at the end of each stage."""


class Skew(Model):
    """How far the ranks are apart, the last behind the first or the longest above the shortest; over the runs."""

    p50_ms: float
    p95_ms: float


class StageSkew(Model):
    """How much longer a stage takes on its slowest rank than on its fastest."""

    name: str
    ranks: list[int] = Field(description="The ranks that have this stage.")
    slowest_rank: int
    total_ms: Skew


class RankStage(Model):
    """One stage on one rank: medians over the runs."""

    name: str
    total_ms: float
    self_ms: float
    device_total_ms: float | None
    device_self_ms: float | None


class RankTiming(Model):
    """One rank's runs of the workload's own inputs.

    Attributes:
        lag_ms: How far it was behind the first rank where it was most behind, at the end of a stage or of the run; the
            median. It tells who is slow also when the others then wait, so that all end together.
    """

    rank: int
    first_call_ms: float | None
    wall_ms: Samples
    outside_ms: float
    stages: list[RankStage]
    lag_ms: float
    num_runs_slowest: int
    peak_device_allocated_bytes: int | None
    peak_host_rss_bytes: int | None


class RankTable(Model):
    """The ranks side by side, for the workload's own inputs."""

    world_size: int
    slowest_rank: int
    start: Skew
    end: Skew
    wall: Skew
    stages: list[StageSkew]
    ranks: list[RankTiming]


_PEAKS = ("peak_device_allocated_bytes", "peak_device_reserved_bytes", "peak_host_rss_bytes")


def merge_ranks(results: Sequence[StagesResult]) -> StagesResult:
    """The job's result from those of its ranks: of each run, what its slowest rank saw.

    A run's wall time is the longest of any rank. Its stages are those of the rank that was most behind; what another
    rank took longer than that one counts as outside every stage. What is no sample of a run comes from the rank that is
    slowest over all runs, and peak memory is that of the rank with most.

    Args:
        results: Those of rank 0, 1 and so on.
    """
    behind = [_lags_ms([result.scenarios[k] for result in results]) for k in range(len(results[0].scenarios))]
    slowest = int(np.argmax(np.median(behind[0], axis=1)))
    base = results[slowest]
    scenarios = [
        _merged_scenario([result.scenarios[k] for result in results], lags_ms.argmax(axis=0), slowest)
        for k, lags_ms in enumerate(behind)
    ]
    return base.model_copy(
        update={
            "scenarios": scenarios,
            "first_call_ms": _largest([result.first_call_ms for result in results]),
            "warmup_ms": [max(runs) for runs in zip(*(result.warmup_ms for result in results), strict=False)],
            **{name: _largest([getattr(result, name) for result in results]) for name in _PEAKS},
            "warnings": merge_warnings([result.warnings for result in results]),
            "ranks": rank_table(results, behind[0], slowest),
        }
    )


def rank_table(results: Sequence[StagesResult], lags_ms: np.ndarray, slowest: int) -> RankTable:
    """The ranks side by side.

    Args:
        results: Those of rank 0, 1 and so on.
        lags_ms: How far each rank was behind, [ranks, runs].
        slowest: The rank that is slowest over all runs.
    """
    timings = [result.default for result in results]
    starts_ms = np.array([timing.run_start_ns for timing in timings]) / _NS_PER_MS
    walls_ms = np.array([timing.wall_ms.values for timing in timings])
    return RankTable(
        world_size=len(results),
        slowest_rank=slowest,
        start=_skew(starts_ms - starts_ms.min()),
        end=_skew(starts_ms - starts_ms.min() + walls_ms),
        wall=_skew(walls_ms),
        stages=_stage_skews(timings),
        ranks=[
            _rank_timing(rank, result, lags_ms[rank], int((lags_ms.argmax(axis=0) == rank).sum()))
            for rank, result in enumerate(results)
        ],
    )


def merge_warnings(warnings: Sequence[Sequence[ResultWarning]]) -> list[ResultWarning]:
    """Each warning once; one that not every rank has says whose it is.

    Args:
        warnings: Those of rank 0, 1 and so on.
    """
    holders: dict[tuple[str, str, str], list[int]] = {}
    for rank, own in enumerate(warnings):
        for warning in own:
            holders.setdefault((warning.code, warning.message, warning.source), []).append(rank)
    return [
        ResultWarning(
            code=code,
            message=message if len(ranks) == len(warnings) else f"Rank {', '.join(map(str, ranks))}: {message}",
            source=source,
        )
        for (code, message, source), ranks in holders.items()
    ]


def _lags_ms(timings: Sequence[ScenarioTiming]) -> np.ndarray:
    """How far each rank was behind the first at its worst point, [ranks, runs].

    On an accelerator the host does not know when a stage ends, so only the end of a run counts.
    """
    ends = [_boundaries_ms(timing) for timing in timings]
    common = set.intersection(*(set(own) for own in ends))
    behind = []
    for name in common:
        moments = np.array([own[name] for own in ends])
        behind.append(moments - moments.min(axis=0))
    lags: np.ndarray = np.max(behind, axis=0)
    return lags


def _boundaries_ms(timing: ScenarioTiming) -> dict[str, np.ndarray]:
    """When the run and each of its stages ended, on the machine's clock."""
    starts_ms = np.array(timing.run_start_ns) / _NS_PER_MS
    ends = {_END: starts_ms + np.array(timing.wall_ms.values)}
    for stage in timing.stages:
        if stage.end_ms is not None:
            ends[stage.name] = starts_ms + np.array(stage.end_ms.values)
    return ends


def _merged_scenario(timings: Sequence[ScenarioTiming], picked: np.ndarray, slowest: int) -> ScenarioTiming:
    """One scenario of the job; `picked` is the rank whose stages count in each run."""
    job_ms = np.max([timing.wall_ms.values for timing in timings], axis=0)
    own_ms = _pick([timing.wall_ms for timing in timings], picked)
    outside_ms = _pick([timing.outside_ms for timing in timings], picked) + job_ms - own_ms
    names = dict.fromkeys(stage.name for timing in (timings[slowest], *timings) for stage in timing.stages)
    stages = [_merged_stage(name, timings, picked, slowest, job_ms) for name in names]
    return timings[slowest].model_copy(
        update={
            **_picked_samples(timings[slowest], timings, picked),
            "run_start_ns": np.min([timing.run_start_ns for timing in timings], axis=0).tolist(),
            "wall_ms": _samples(job_ms),
            "outside_ms": _samples(outside_ms),
            "stages": sorted(stages, key=lambda stage: -stage.share),
            **_share("outside_share", outside_ms, job_ms),
        }
    )


def _merged_stage(
    name: str, timings: Sequence[ScenarioTiming], picked: np.ndarray, slowest: int, job_ms: np.ndarray
) -> StageTiming:
    own = [next((stage for stage in timing.stages if stage.name == name), None) for timing in timings]
    base = own[slowest] or next(stage for stage in own if stage is not None)
    merged = _picked_samples(base, own, picked)
    cost_ms = np.array((merged.get("device_self_ms") or merged["self_ms"]).values)
    return base.model_copy(update={**merged, **_share("share", cost_ms, job_ms)})


def _picked_samples(base: Model, own: Sequence[Model | None], picked: np.ndarray) -> dict[str, Samples]:
    """Every field of `base` that has one sample a run on each rank, with each run's from the rank picked for it."""
    merged = {}
    for field in type(base).model_fields:
        if isinstance(getattr(base, field), Samples):
            samples = [getattr(model, field) if model else None for model in own]
            if all(found is None or len(found.values) == len(picked) for found in samples):
                merged[field] = _samples(_pick(samples, picked))
    return merged


def _pick(samples: Sequence[Samples | None], picked: np.ndarray) -> np.ndarray:
    """For each run the sample of the rank that is picked for it; 0 where that one does not have the stage."""
    rows = np.array([own.values if own else [0.0] * len(picked) for own in samples])
    return rows[picked, np.arange(len(picked))]


def _share(name: str, part_ms: np.ndarray, wall_ms: np.ndarray) -> dict[str, Any]:
    interval = bootstrap_interval(
        lambda part, wall: part.sum(axis=-1) / wall.sum(axis=-1), part_ms.tolist(), wall_ms.tolist(), paired=True
    )
    return {name: float(part_ms.sum() / wall_ms.sum()), f"{name}_interval": interval}


def _samples(values: np.ndarray) -> Samples:
    return Samples(launches=[values.tolist()])


def _stage_skews(timings: Sequence[ScenarioTiming]) -> list[StageSkew]:
    """The stages that several ranks have, those that differ most first."""
    skews = []
    for name in dict.fromkeys(stage.name for timing in timings for stage in timing.stages):
        totals = {
            rank: (stage.device_total_ms or stage.total_ms).values
            for rank, timing in enumerate(timings)
            for stage in timing.stages
            if stage.name == name
        }
        if len(totals) > 1:
            slowest = max(totals, key=lambda rank: float(np.median(totals[rank])))
            skew = _skew(np.array(list(totals.values())))
            skews.append(StageSkew(name=name, ranks=list(totals), slowest_rank=slowest, total_ms=skew))
    return sorted(skews, key=lambda skew: -skew.total_ms.p50_ms)


def _rank_timing(rank: int, result: StagesResult, lags_ms: np.ndarray, num_runs_slowest: int) -> RankTiming:
    timing = result.default
    return RankTiming(
        rank=rank,
        first_call_ms=result.first_call_ms,
        wall_ms=timing.wall_ms,
        outside_ms=_median(timing.outside_ms),
        stages=[
            RankStage(
                name=stage.name,
                total_ms=_median(stage.total_ms),
                self_ms=_median(stage.self_ms),
                device_total_ms=_median(stage.device_total_ms) if stage.device_total_ms else None,
                device_self_ms=_median(stage.device_self_ms) if stage.device_self_ms else None,
            )
            for stage in timing.stages
        ],
        lag_ms=float(np.median(lags_ms)),
        num_runs_slowest=num_runs_slowest,
        peak_device_allocated_bytes=result.peak_device_allocated_bytes,
        peak_host_rss_bytes=result.peak_host_rss_bytes,
    )


def _median(samples: Samples) -> float:
    return float(np.median(samples.values))


def _skew(values: np.ndarray) -> Skew:
    """Largest minus smallest of all ranks in each run; `values` is [ranks, runs]."""
    apart = np.ptp(values, axis=0)
    return Skew(p50_ms=float(np.median(apart)), p95_ms=float(np.percentile(apart, 95)))


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
