"""The history of a workload as a series: every night with its interval, and the nights on which its level changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, Literal

import numpy as np
from pydantic import Field

from perfladder.comparing.differences import list_differences
from perfladder.comparing.model import Difference
from perfladder.errors import InputError
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.nightly.changes import MIN_NIGHTS, find_changes, series_scale
from perfladder.nightly.history import differences_of, history_before
from perfladder.nightly.levels import LEAST_SCALE
from perfladder.nightly.model import Night, Rules, VerdictKind
from perfladder.nightly.score import student_limit, typical
from perfladder.stats import Interval
from perfladder.workload import Metric

_MAX_CAUSES: Final = 8


class TrendPoint(Model):
    """One measurement of a night."""

    run_id: str
    run_dir: str
    mlflow_run_id: str | None = None
    started_at: str
    commit: str | None = None
    is_dirty: bool = False
    value: float
    interval: Interval | None = Field(
        default=None, description="95 %, from the launches of that night; None for fewer than three."
    )
    verdict: VerdictKind | None = None
    is_second: bool = Field(default=False, description="Whether it repeats the first measurement of its night.")
    is_comparable: bool = Field(
        default=True, description="Of the same work and hardware as the last night; others have another level."
    )
    is_disturbed: bool = Field(default=False, description="Whether the machine was not in its usual state.")
    stages_ms: dict[str, float] = {}
    families_us: dict[str, float] = {}


class TrendChange(Model):
    """A step of the level between two nights."""

    at: str = Field(description="Run id of the first night of the new level.")
    started_at: str
    before: float = Field(description="The level before, in the unit of the metric.")
    after: float
    ratio: float = Field(description="After over before; above 1 is slower.")
    interval: Interval = Field(description="Of the ratio, 95 %.")
    last_commit: str | None = Field(description="Of the last night before.")
    first_commit: str | None
    causes: list[Difference] = Field(description="What else was not the same after it.")


class TrendLevel(Model):
    """A stretch of nights between two changes."""

    first: str = Field(description="Run id.")
    last: str
    level: float
    num_nights: int


class Trend(Model):
    """All that a trend page shows of one workload."""

    schema_version: int = SCHEMA_VERSION
    workload: str
    metric: Metric
    unit: Literal["ms", "bytes"]
    points: list[TrendPoint] = Field(description="By time.")
    changes: list[TrendChange] = Field(description="Among comparable nights, by time.")
    levels: list[TrendLevel] = Field(description="Between the changes.")
    noise: float | None = Field(
        description="Relative; standard deviation of a night's level around it; null where fewer than three nights can "
        "be compared."
    )


class Trends(Model):
    """The series of several workloads."""

    schema_version: int = SCHEMA_VERSION
    runs_dir: str
    trends: list[Trend]


def trend_data(nights: Sequence[Night], rules: Rules | None = None) -> Trend:
    """The series of one workload, with its changes marked.

    Args:
        nights: Of one workload, in any order; second measurements too.
        rules: Changes below their `min_effect` are not marked.

    Raises:
        InputError: There are no nights, or they are of several workloads.
    """
    if len({night.workload for night in nights}) != 1:
        names = ", ".join(sorted({night.workload for night in nights})) or "none"
        raise InputError(f"A trend is of the nights of one workload; these are of: {names}.")
    ordered = sorted(nights, key=lambda night: (night.started_at, night.run_id))
    firsts = [night for night in ordered if night.second_of is None] or ordered
    last = firsts[-1]
    history = history_before(last, ordered)
    kept = [*history.nights, *([] if history.unusual(last) else [last])]
    levels = np.array([history.level(night) for night in kept])
    min_effect = (rules or Rules()).min_effect
    starts = [0, *_large(levels, find_changes(levels), min_effect), len(kept)]
    return Trend(
        workload=last.workload,
        metric=last.metric,
        unit=last.unit,
        points=[_point(night, last, history.usual) for night in ordered],
        changes=[_change(kept, levels, starts, place) for place in range(1, len(starts) - 1)],
        levels=[
            TrendLevel(
                first=kept[start].run_id,
                last=kept[end - 1].run_id,
                level=math.exp(typical(levels[start:end], LEAST_SCALE)),
                num_nights=end - start,
            )
            for start, end in pairwise(starts)
            if end > start
        ],
        noise=None if len(levels) < MIN_NIGHTS else math.expm1(series_scale(levels)),
    )


def trends_of(runs_dir: Path, nights: Mapping[str, Sequence[Night]]) -> Trends:
    """The series of several workloads, by their names; those without nights are left out."""
    return Trends(runs_dir=str(runs_dir.resolve()), trends=[trend_data(found) for found in nights.values() if found])


def _large(levels: np.ndarray, places: list[int], min_effect: float) -> list[int]:
    """Places of steps that count; a step that does not is left out, and its sides are one level."""
    kept: list[int] = []
    for number, place in enumerate(places):
        start = kept[-1] if kept else 0
        end = places[number + 1] if number + 1 < len(places) else len(levels)
        if abs(float(np.median(levels[place:end]) - np.median(levels[start:place]))) >= min_effect:
            kept.append(place)
    return kept


def _point(night: Night, last: Night, usual: frozenset[str]) -> TrendPoint:
    return TrendPoint(
        run_id=night.run_id,
        run_dir=night.run_dir,
        mlflow_run_id=night.mlflow_run_id,
        started_at=night.started_at,
        commit=night.commit,
        is_dirty=night.is_dirty,
        value=night.value,
        interval=_interval(night),
        verdict=night.verdict,
        is_second=night.second_of is not None,
        is_comparable=not differences_of(night, last),
        is_disturbed=not set(night.disturbances) <= usual,
        stages_ms=night.stages_ms,
        families_us=night.families_us,
    )


def _interval(night: Night) -> Interval | None:
    logs = np.log(night.launches)
    if len(logs) < 3:
        return None
    reach = student_limit(0.025, len(logs) - 1) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    return Interval(low=night.value * math.exp(-reach), high=night.value * math.exp(reach))


def _change(nights: list[Night], levels: np.ndarray, starts: list[int], place: int) -> TrendChange:
    scale = series_scale(levels)
    sides = [levels[starts[place - 1] : starts[place]], levels[starts[place] : starts[place + 1]]]
    before, after = (typical(side, scale) for side in sides)
    reach = 1.96 * scale * math.sqrt(sum(1 / len(side) for side in sides))
    last, first = nights[starts[place] - 1], nights[starts[place]]
    return TrendChange(
        at=first.run_id,
        started_at=first.started_at,
        before=math.exp(before),
        after=math.exp(after),
        ratio=math.exp(after - before),
        interval=Interval(low=math.exp(after - before - reach), high=math.exp(after - before + reach)),
        last_commit=last.commit,
        first_commit=first.commit,
        causes=list_differences(last.software, first.software)[:_MAX_CAUSES],
    )
