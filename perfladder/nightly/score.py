"""How far the last nights lie above the baseline, in units of what nights differ by; numbers only.

Levels are natural logarithms of times, one a night, the oldest first: a difference of 0.03 is 3 %.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np

MAX_WINDOW: Final = 5
"""Most nights that are looked at together. A change that five nights do not show is too small for the noise."""

SUSPECT: Final = 0.0008
"""Chance, for one window of a quiet history, that it looks slower. It decides how often a second measurement is taken,
and together with the two below how often an alarm is false: docs/benchmarks.md has what they give."""

FASTER: Final = 1e-4
LEAST_FASTER: Final = MAX_WINDOW
"""The same chance for the other side, and the nights that it takes."""

CONFIRM_ONE: Final = 0.05
CONFIRM_MORE: Final = 0.2
"""Chances that a second measurement of a quiet night lies above the limit, where one night is suspected, and where
several nights have shown the change already."""

CLIP: Final = 3.2
"""In a window of several nights each counts as no further from the baseline than so many standard deviations, so that
one wild night does not make the nights after it suspicious."""

WILD: Final = 1.5
"""A single night must lie this many times further from the baseline than any quiet night of the past."""

_LEAST_OWN: Final = 1.0
_LARGEST_CORRELATION: Final = 0.8
_CORRELATION_ERRORS: Final = 0.7
_SMALL_SAMPLES: Final = (0.399, 0.994, 0.512, 0.844, 0.611, 0.857, 0.669, 0.872)


@dataclass(frozen=True)
class Level:
    """What nights are compared with.

    Attributes:
        level: Of a typical night.
        scale: Standard deviation of a night's level around it.
        count: Nights that the level comes from.
        correlation: Of a night with the one before, from 0 up.
        freedom: Degrees of freedom of the scale.
    """

    level: float
    scale: float
    count: int
    correlation: float
    freedom: int

    def error(self, window: int) -> float:
        """Standard error of the mean of so many nights minus the level."""
        variance = mean_variance(window, self.correlation) + mean_variance(self.count, self.correlation)
        return self.scale * math.sqrt(variance)


@dataclass(frozen=True)
class Score:
    """The window of last nights that differs most from the baseline.

    Attributes:
        window: How many nights.
        z: Their distance from the baseline over its standard error; above 0 is slower.
        shift: How far they lie from it: the median of the nights.
    """

    window: int
    z: float
    shift: float


def robust_scale(values: np.ndarray) -> float:
    """Standard deviation of Gaussian values, which a few wild ones hardly change; 0 for fewer than two.

    Source:
        Rousseeuw and Croux (1993), "Alternatives to the Median Absolute Deviation": Qn, with the corrections for small
        samples of Croux and Rousseeuw (1992), "Time-Efficient Algorithms for Two Highly Robust Estimators of Scale".
    """
    n = len(values)
    if n < 2:
        return 0.0
    rows, columns = _pairs(n)
    half = n // 2 + 1
    place = half * (half - 1) // 2 - 1
    gaps = np.abs(values[rows] - values[columns])
    return float(np.partition(gaps, place)[place]) * 2.21914 * _small_sample_factor(n)


def level_of(levels: np.ndarray, residuals: np.ndarray, least_scale: float) -> Level:
    """The level of some good nights, and how far nights lie from it.

    Args:
        levels: Of the nights that the level is taken from, at least one.
        residuals: Of all nights that tell of noise, each from the level of its own stretch, in order.
        least_scale: What the scale cannot be below: noise seen within the nights.
    """
    count, scale = len(residuals), max(robust_scale(residuals), least_scale)
    correlation = _correlation(residuals, scale)
    # Of nights that resemble their neighbours fewer count, and their middle goes with them.
    scale /= math.sqrt(1 - mean_variance(count, correlation)) if correlation else 1.0
    independent = (1 - correlation**2) / (1 + correlation**2)
    return Level(
        level=typical(levels, scale),
        scale=scale,
        count=len(levels),
        correlation=correlation,
        # Qn is 0.82 times as efficient as the standard deviation; in short series it is off by more than that.
        freedom=max(2, round(0.82 * independent * (count - 1) - 3)),
    )


def slower_window(
    level: Level, nights: np.ndarray, *, wildest: float = 0.0, least_window: int = 1, chance: float = SUSPECT
) -> Score | None:
    """Look at the last night alone, at the last two, and so on; the most suspicious window, None if none is.

    Args:
        level: What they are compared with.
        nights: Levels of the last nights, tonight's last.
        wildest: How far the wildest quiet night of the past lay above the baseline.
        least_window: The smallest window to look at.
        chance: That one window of a quiet history is suspicious.
    """
    deviations = nights[-MAX_WINDOW:] - level.level
    own, limit = float(deviations[-1]), student_limit(chance, level.freedom)
    if own < _LEAST_OWN * level.scale:
        return None
    best: Score | None = None
    total = 0.0
    for window in range(1, len(deviations) + 1):
        deviation = float(deviations[-window])
        total += min(max(deviation, -CLIP * level.scale), CLIP * level.scale)
        mean = own if window == 1 else total / window
        if window < least_window or (window == 1 and own < WILD * wildest):
            continue
        z = mean / level.error(window)
        if z >= limit and (best is None or z > best.z):
            best = Score(window, z, float(np.median(deviations[-window:])))
    return best


def faster_window(level: Level, nights: np.ndarray) -> Score | None:
    """The same for nights that lie below the baseline, which become the next one without being measured again.

    Therefore several nights must show it, and for certain: a baseline that is too low makes what follows look slower.
    """
    mirrored = Level(-level.level, level.scale, level.count, level.correlation, level.freedom)
    found = slower_window(mirrored, -nights, least_window=LEAST_FASTER, chance=FASTER)
    return None if found is None else Score(found.window, -found.z, -found.shift)


def is_confirmed(level: Level, score: Score, second: float) -> bool:
    """Whether a second measurement of the last night shows the change too.

    It must lie above the baseline by more than chance, and by at least half of what was suspected: a night that was
    wild for once does not come back.
    """
    chance = CONFIRM_ONE if score.window == 1 else CONFIRM_MORE
    deviation = second - level.level
    return deviation >= max(student_limit(chance, level.freedom) * level.error(1), score.shift / 2)


@cache
def student_limit(probability: float, freedom: int) -> float:
    """The value that Student's t exceeds with this probability."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1 - probability))


def typical(levels: np.ndarray, scale: float) -> float:
    """Mean of the levels, those far from the median moved nearer to it."""
    middle = float(np.median(levels))
    return middle + float(np.clip(levels - middle, -2 * scale, 2 * scale).mean())


@cache
def mean_variance(count: int, correlation: float) -> float:
    """Variance of the mean of so many nights of variance 1, each correlated with the one before."""
    lags = np.arange(1, count)
    return float(1 + 2 * ((1 - lags / count) @ correlation**lags)) / count


def _correlation(residuals: np.ndarray, scale: float) -> float:
    """Of a residual with the one before: corrected for being too small in short series, then made smaller by its error.

    Rounded, so that what follows from it is computed once.
    """
    n = len(residuals)
    if n < 8 or scale == 0:
        return 0.0
    clipped = np.clip(residuals, -3 * scale, 3 * scale)
    clipped = clipped - clipped.mean()
    total = float(clipped @ clipped)
    found = float(clipped[1:] @ clipped[:-1]) / total if total else 0.0
    certain = found + (1 + 4 * found) / n - _CORRELATION_ERRORS / math.sqrt(n)
    return round(min(_LARGEST_CORRELATION, max(0.0, certain)), 2)


@cache
def _pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.triu_indices(n, 1)


def _small_sample_factor(n: int) -> float:
    if n <= 9:
        return _SMALL_SAMPLES[n - 2]
    return n / (n + 1.4) if n % 2 else n / (n + 3.8)
