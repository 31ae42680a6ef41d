"""Where a whole series of levels changed: the steps that pay for themselves, in one look at all nights."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from perfladder.nightly.levels import LEAST_SCALE
from perfladder.nightly.score import robust_scale

PENALTY: Final = 4.0
"""A step must explain this many times log(n) variances: see docs/benchmarks.md for how often quiet series have one."""

LEAST_LENGTH: Final = 3
"""Nights between two steps, so that no wild night is a level of its own."""

MIN_NIGHTS: Final = 3
"""With fewer nights it is not known how much they differ."""

_CLIP: Final = 3.0
_WIDTH: Final = 5


def series_scale(levels: np.ndarray) -> float:
    """Standard deviation of a night's level, from the differences of neighbours, which few steps can change."""
    if len(levels) < MIN_NIGHTS:
        return LEAST_SCALE
    return max(LEAST_SCALE, robust_scale(np.diff(levels)[-400:]) / math.sqrt(2))


def find_changes(levels: np.ndarray) -> list[int]:
    """Places at which a new level begins; the first level's beginning is none of them.

    The series is cut where that lowers the sum of squared distances from the means of the parts by more than a
    penalty for each cut; the best cuts of all are found. Wild nights are moved nearer to the median of their neighbours
    first.

    Args:
        levels: Natural logarithms, the oldest first.

    Source:
        Jackson et al. (2005), "An Algorithm for Optimal Partitioning of Data on an Interval".
    """
    count = len(levels)
    if count < 2 * LEAST_LENGTH:
        return []
    values = _tamed(levels, series_scale(levels)) / series_scale(levels)
    sums, squares = (np.concatenate(([0.0], np.cumsum(part))) for part in (values, values**2))
    penalty = PENALTY * math.log(count)
    best, last = np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
    best[0] = -penalty
    for end in range(LEAST_LENGTH, count + 1):
        starts = np.arange(end - LEAST_LENGTH + 1)
        lengths = end - starts
        cost = squares[end] - squares[starts] - (sums[end] - sums[starts]) ** 2 / lengths
        total = best[starts] + cost + penalty
        place = int(np.argmin(total))
        best[end], last[end] = total[place], place
    found, end = [], count
    while (start := int(last[end])) > 0:
        found.append(start)
        end = start
    return found[::-1]


def _tamed(levels: np.ndarray, scale: float) -> np.ndarray:
    from scipy.ndimage import median_filter

    middle = median_filter(levels, size=_WIDTH, mode="nearest")
    tamed: np.ndarray = middle + np.clip(levels - middle, -_CLIP * scale, _CLIP * scale)
    return tamed
