"""Which stages and kernel families moved when a workload's level did."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final, Literal

import numpy as np

from perfladder.nightly.levels import LEAST_SCALE
from perfladder.nightly.model import Moved, Night, PartOfRun
from perfladder.nightly.score import level_of, student_limit
from perfladder.stats import Interval

_CHANCE: Final = 0.0025
"""On each side; a part is named where its interval of 99.5 % holds no 1, for a workload has many parts."""

_MIN_NIGHTS: Final = 5
_MAX_NAMED: Final = 6

_Times = Callable[[Night], Mapping[str, float]]


def moved_parts(before: Sequence[Night], after: Sequence[Night], min_effect: float) -> list[Moved]:
    """Stages and kernel families with another time, the largest change of each kind first.

    Args:
        before: The baseline's nights.
        after: The nights of the change, second measurements too.
        min_effect: Relative change below which none is named.
    """
    stages = _moved("stage", "ms", lambda night: night.stages_ms, before, after, min_effect)
    replayed = {night.replayed_stage for night in after}
    alike = [night for night in before if replayed == {night.replayed_stage} and night.families_us]
    measured = [night for night in after if night.families_us]
    families = _moved("family", "us", lambda night: night.families_us, alike, measured, min_effect)
    return [*stages, *families]


def _moved(
    part: PartOfRun,
    unit: Literal["ms", "us"],
    times: _Times,
    before: Sequence[Night],
    after: Sequence[Night],
    min_effect: float,
) -> list[Moved]:
    names = dict.fromkeys(name for night in after for name in times(night))
    found = []
    for name in names:
        sides = [[times(night)[name] for night in nights if name in times(night)] for nights in (before, after)]
        row = _row(part, unit, name, sides[0], sides[1], min_effect)
        if row is not None:
            found.append(row)
    return sorted(found, key=lambda row: -abs(row.after - row.before))[:_MAX_NAMED]


def _row(
    part: PartOfRun,
    unit: Literal["ms", "us"],
    name: str,
    before: Sequence[float],
    after: Sequence[float],
    min_effect: float,
) -> Moved | None:
    if len(before) < _MIN_NIGHTS or min(*before, *after) <= 0:
        return None
    logs = np.log(before)
    level = level_of(logs, logs - np.median(logs), LEAST_SCALE)
    shift, error = math.log(median(after)) - level.level, level.error(len(after))
    if abs(shift) < max(min_effect, student_limit(_CHANCE, level.freedom) * error):
        return None
    reach = student_limit(0.025, level.freedom) * error
    return Moved(
        part=part,
        name=name,
        unit=unit,
        before=math.exp(level.level),
        after=median(after),
        ratio=math.exp(shift),
        interval=Interval(low=math.exp(shift - reach), high=math.exp(shift + reach)),
    )
