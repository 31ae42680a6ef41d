"""Series of nightly levels with known noise, and a known step where wanted, judged night by night."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from perfladder.nightly.levels import DOUBTFUL, QUIET, SLOWER, Past, judge_levels
from perfladder.nightly.model import Rules

NOISE = 0.01
"""Standard deviation of a night's level: 1 %."""

_RECENT = 130
"""Nights that are handed to the judge: more than it looks at."""


class Series(NamedTuple):
    """Levels of nights, and what a second measurement of each would have given."""

    levels: np.ndarray
    second: np.ndarray


class Told(NamedTuple):
    """What was said over a series of nights."""

    nights: int
    suspected: int
    alarms: int
    alarm_nights: int
    first_alarm: int | None


Make = Callable[[np.random.Generator, int], Series]


def gaussian(rng: np.random.Generator, nights: int) -> Series:
    """Independent nights; a second measurement is as independent."""
    return Series(NOISE * rng.standard_normal(nights), NOISE * rng.standard_normal(nights))


def half_shared(rng: np.random.Generator, nights: int) -> Series:
    """Half of the variance is of the night, which a second measurement shares."""
    night = rng.standard_normal(nights)
    own = rng.standard_normal((2, nights))
    found = NOISE * math.sqrt(0.5) * (night + own)
    return Series(found[0], found[1])


def heavy_tailed(rng: np.random.Generator, nights: int) -> Series:
    """Student's t with 3 degrees of freedom, of the same variance."""
    found = NOISE / math.sqrt(3) * rng.standard_t(3, (2, nights))
    return Series(found[0], found[1])


def outlier_nights(rng: np.random.Generator, nights: int) -> Series:
    """In 2 of 100 nights the first measurement is 5 to 20 % slower, the second is not."""
    series = gaussian(rng, nights)
    return Series(series.levels + _outliers(rng, nights), series.second)


def outliers_half_lasting(rng: np.random.Generator, nights: int) -> Series:
    """The same, and half of these nights are as slow when they are measured again."""
    series, outliers = gaussian(rng, nights), _outliers(rng, nights)
    return Series(series.levels + outliers, series.second + outliers * (rng.random(nights) < 0.5))


def _outliers(rng: np.random.Generator, nights: int) -> np.ndarray:
    return (rng.random(nights) < 0.02) * np.log1p(rng.uniform(0.05, 0.2, nights))


def autocorrelated(rng: np.random.Generator, nights: int) -> Series:
    """Each night has half of the night before in it; a second measurement shares half of the variance."""
    from scipy.signal import lfilter

    lasting = lfilter([1.0], [1.0, -0.5], rng.standard_normal(nights) * math.sqrt(0.75))
    own = rng.standard_normal((2, nights))
    found = NOISE * (math.sqrt(0.75) * lasting + 0.5 * own)
    return Series(found[0], found[1])


def autocorrelated_wholly(rng: np.random.Generator, nights: int) -> Series:
    """Each night has half of the night before in it, and a second measurement gives the same as the first."""
    from scipy.signal import lfilter

    found = NOISE * lfilter([1.0], [1.0, -0.5], rng.standard_normal(nights) * math.sqrt(0.75))
    return Series(found, found.copy())


def drifting(rng: np.random.Generator, nights: int) -> Series:
    """Slower by 0.02 % each night, 2 % in a hundred."""
    series, drift = gaussian(rng, nights), 2e-4 * np.arange(nights)
    return Series(series.levels + drift, series.second + drift)


NOISES: dict[str, Make] = {
    "gaussian": gaussian,
    "half of the variance shared": half_shared,
    "heavy-tailed": heavy_tailed,
    "outlier nights": outlier_nights,
    "outlier nights, half of them lasting": outliers_half_lasting,
    "drift": drifting,
    "autocorrelated": autocorrelated,
    "autocorrelated, wholly shared": autocorrelated_wholly,
}


def judge_series(series: Series, rules: Rules, *, first: int = 0, until_alarm: bool = False) -> Told:
    """Judge a series night by night; a second measurement is taken when one is asked for.

    Args:
        series: What was measured.
        rules: When nights count as different.
        first: Count what is said from this night on.
        until_alarm: Whether to end with the first alarm that counts.
    """
    levels = series.levels.copy()
    states, parts = np.zeros(len(levels), np.int8), np.zeros(len(levels), np.int64)
    suspected = alarms = alarm_nights = judged = 0
    for night, level in enumerate(series.levels):
        start = max(0, night - _RECENT)
        past = Past(levels[start:night], states[start:night], parts[start:night])
        found = judge_levels(past, float(level), rules)
        counts = night >= first and found.kind != "no_baseline_yet"
        judged += counts
        parts[night] = parts[night - 1]
        if found.kind == "suspected":
            suspected += counts
            second = float(series.second[night])
            found = judge_levels(past, float(level), rules, second=second)
            levels[night] = (level + second) / 2
            states[night] = DOUBTFUL
        if found.kind == "regression":
            states[night - found.window + 1 : night + 1] = SLOWER
            alarm_nights += counts
            alarms += counts and found.is_new
            if counts and until_alarm:
                return Told(judged, suspected, alarms, alarm_nights, night)
        elif found.kind == "improvement":
            parts[night - found.window + 1 :] = parts[night] + 1
    return Told(judged, suspected, alarms, alarm_nights, None)


def judge_step(make: Make, rules: Rules, *, history: int, step: float, seed: int | list[int]) -> int | None:
    """The night, from 1 on, in which a step after some nights of history is reported; None: not within three."""
    series = make(np.random.default_rng(seed), history + 3)
    late = np.arange(history + 3) >= history
    told = judge_series(
        Series(series.levels + step * late, series.second + step * late), rules, first=history, until_alarm=True
    )
    return None if told.first_alarm is None else told.first_alarm - history + 1


assert QUIET == 0, "states begin as quiet"
