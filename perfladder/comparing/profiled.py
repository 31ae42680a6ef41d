"""Changes in profiled windows: regions of rung 2, kernel families and kernels of rung 4, counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Literal

from perfladder.comparing.judge import Judge
from perfladder.comparing.model import Change, CountChange, KernelMove, OneSided, ProfiledChange, Where
from perfladder.comparing.sides import MeasuredSide
from perfladder.models import ResultWarning
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.regions import RegionsResult, RegionSummary
from perfladder.stats import Samples

_MAX_ROWS = 20
_OUTSIDE = "(outside every region)"
_COMPILATIONS = ("graphs", "graph_breaks", "recompiles", "limit_hits")

Unit = Literal["ms", "us"]
Values = Sequence[Mapping[str, float]]


def compare_regions(baseline: MeasuredSide, candidate: MeasuredSide, judge: Judge) -> ProfiledChange | None:
    """Rung 2 of both sides; device time where both have it."""
    sides = baseline.regions, candidate.regions
    if not sides[0] or not sides[1]:
        return None
    on_device = all(_has_device_time(result) for side in sides for result in side)
    rows, one_sided = _compare([[_region_times(r, on_device) for r in side] for side in sides], "ms", judge)
    where = "on the device" if on_device else "of the host"
    return ProfiledChange(rung="regions", what=f"time {where} in a profiled run", rows=rows, only_one_side=one_sided)


def compare_families(baseline: MeasuredSide, candidate: MeasuredSide, judge: Judge) -> ProfiledChange | None:
    """Rung 4 of both sides by kernel family, where the same stage was replayed."""
    if _why_no_kernels(baseline, candidate) is not None:
        return None
    sides = [[family_times(result) for result in side.kernels] for side in (baseline, candidate)]
    rows, one_sided = _compare(sides, "us", judge)
    first = baseline.kernels[0]
    what = f"{first.kind} of one profiled call of {first.stage}"
    return ProfiledChange(rung="kernels", what=what, rows=rows, only_one_side=one_sided)


def kernels_moved(baseline: MeasuredSide, candidate: MeasuredSide, limit: int = 15) -> list[KernelMove]:
    """Kernels by how much their time in one call has changed, the largest change first."""
    if _why_no_kernels(baseline, candidate) is not None:
        return []
    sides = [_kernel_totals(side.kernels) for side in (baseline, candidate)]
    families = {row.kernel: row.family for side in (candidate, baseline) for r in side.kernels for row in r.kernels}
    moves = [
        KernelMove(
            name=name,
            family=families[name],
            baseline_us=sides[0].get(name, (0.0, 0))[0],
            candidate_us=sides[1].get(name, (0.0, 0))[0],
            baseline_count=sides[0].get(name, (0.0, 0))[1],
            candidate_count=sides[1].get(name, (0.0, 0))[1],
        )
        for name in families
    ]
    return sorted((move for move in moves if move.change_us), key=lambda move: -abs(move.change_us))[:limit]


def compare_counts(baseline: MeasuredSide, candidate: MeasuredSide) -> list[CountChange]:
    """Counts that differ: of torch.compile, calls of stages, kernels of a call."""
    one, other = _counts(baseline), _counts(candidate)
    return [
        CountChange(name=name, baseline=one[name], candidate=other[name])
        for name in one
        if name in other and one[name] != other[name]
    ]


def rung_warnings(baseline: MeasuredSide, candidate: MeasuredSide) -> list[ResultWarning]:
    """Why rung 2 or 4 is not compared although a side has it."""
    reasons = []
    if bool(baseline.regions) != bool(candidate.regions):
        reasons.append(f"only the {'baseline' if baseline.regions else 'candidate'} has regions (rung 2)")
    why = _why_no_kernels(baseline, candidate)
    if why is not None and (baseline.kernels or candidate.kernels):
        reasons.append(why)
    if not reasons:
        return []
    return [ResultWarning(code="RUNG_NOT_COMPARED", message=f"Not everything is compared: {'; '.join(reasons)}.")]


def _why_no_kernels(baseline: MeasuredSide, candidate: MeasuredSide) -> str | None:
    if not baseline.kernels or not candidate.kernels:
        has = "baseline" if baseline.kernels else "candidate"
        return f"only the {has} has kernels (rung 4)"
    replayed = {(result.stage, result.kind) for side in (baseline, candidate) for result in side.kernels}
    if len(replayed) > 1:
        named = " and ".join(sorted(f"{kind} of {stage}" for stage, kind in replayed))
        return f"rung 4 has {named}, which are not the same"
    return None


def _compare(sides: Sequence[Values], unit: Unit, judge: Judge) -> tuple[list[Change], list[OneSided]]:
    """One value a run directory: each counts as a process launch of its own."""
    named = [{name: [run.get(name, 0.0) for run in side] for run in side for name in run} for side in sides]
    rows = [
        judge.change(name, _one_a_launch(named[0][name]), _one_a_launch(named[1][name]), unit)
        for name in named[0]
        if name in named[1]
    ]
    found: list[tuple[Where, dict[str, list[float]], dict[str, list[float]]]] = [
        ("baseline", named[0], named[1]),
        ("candidate", named[1], named[0]),
    ]
    one_sided = [
        OneSided(name=name, only=where, value=fmean(own[name]), unit=unit)
        for where, own, others in found
        for name in own
        if name not in others
    ]
    rows.sort(key=lambda row: -abs(row.change))
    return rows[:_MAX_ROWS], sorted(one_sided, key=lambda row: -row.value)[:_MAX_ROWS]


def _one_a_launch(values: Iterable[float]) -> Samples:
    return Samples(launches=[[value] for value in values])


def _has_device_time(result: RegionsResult) -> bool:
    return bool(result.regions) and all(region.device_ms is not None for region in result.regions)


def _region_times(result: RegionsResult, on_device: bool) -> dict[str, float]:
    times: dict[str, float] = {}
    for region in result.regions:
        times[region.name] = times.get(region.name, 0.0) + _region_ms(region, on_device)
    if result.residual is not None:
        times[_OUTSIDE] = (result.residual.device_ms or 0.0) if on_device else result.residual.cpu_ms
    return times


def _region_ms(region: RegionSummary, on_device: bool) -> float:
    return (region.device_ms or 0.0) if on_device else region.cpu_ms


def family_times(result: KernelsResult) -> dict[str, float]:
    """Time in us of each kernel family in one call of the replayed stage."""
    return {row.family: row.total_us for row in result.families if row.region_id is None}


def _kernel_totals(results: Sequence[KernelsResult]) -> dict[str, tuple[float, int]]:
    """Time in us and launches of each kernel in one call, the mean over the runs of the side."""
    totals: dict[str, tuple[float, int]] = {}
    for result in results:
        for row in result.kernels:
            time_us, count = totals.get(row.kernel, (0.0, 0))
            totals[row.kernel] = time_us + row.total_us, count + row.count
    return {name: (time_us / len(results), count // len(results)) for name, (time_us, count) in totals.items()}


def _counts(side: MeasuredSide) -> dict[str, float]:
    stages = side.stages
    # Every part counts: a graph that breaks in the first call breaks in all.
    found: dict[str, float] = {
        name: sum(getattr(part, name) for part in stages.compilations.values()) for name in _COMPILATIONS
    }
    found |= {f"calls of {stage.name} a run": stage.calls_per_run for stage in stages.default.stages}
    if side.kernels:
        first = side.kernels[0]
        found[f"{first.kind} in a call of {first.stage}"] = first.num_kernels
    return found
