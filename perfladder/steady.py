"""Is a series of timings steady? Where warm-up ends, whether it drifts, whether it has two modes; pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from perfladder.errors import InputError
from perfladder.models import Model
from perfladder.stats import lag1_autocorrelation

_MIN_SAMPLES = 10
_WINDOW = 3
_MAD_TO_STD = 1.4826
"""Of a normal distribution: 1 / 0.6745, its third quartile."""

_DRIFT_LEVEL = 0.01
_MAX_AUTOCORRELATION = 0.95
_CLEAR_RISE_IN_STEPS = 10
"""Autoregressive noise of lag 1 0.74 reaches half of it in 1 % of simulated series of 20, and that of 0.9 all of it."""


class WarmupEnd(Model):
    """Where the steady state begins."""

    index: int = Field(description="The first steady sample; what lies before it is warm-up.")
    is_steady: bool
    tolerance: float | None = Field(default=None, description="Relative distance from the level that counts as steady.")
    reason: str


class Drift(Model):
    """Whether a series goes up or down as a whole."""

    is_drifting: bool
    change: float | None = Field(
        default=None, description="Relative, from the first sample to the last, along the line."
    )
    p_value: float | None = None
    autocorrelation: float | None = Field(default=None, description="Lag 1, about the line, corrected for its bias.")
    reason: str


class Bimodality(Model):
    """Whether a series lies on two levels."""

    is_bimodal: bool
    low: float | None = Field(default=None, description="Median of the lower group.")
    high: float | None = Field(default=None, description="Median of the upper group.")
    upper_frac: float | None = Field(default=None, description="Part of the samples in the upper group.")
    separation: float | None = Field(
        default=None, description="Ashman's D of the two groups; None: they have no spread."
    )
    num_switches: int | None = Field(default=None, description="Times the series goes from one group to the other.")
    reason: str


def warmup_end(samples_ms: Sequence[float], *, limit: int, min_tolerance: float = 0.05) -> WarmupEnd:
    """Find the first sample from which on the series stays at its own level.

    The level is the median of the second half. A sample is at the level when it and the median of the three samples
    from it on lie within the tolerance: four robust standard deviations about it (from the median absolute deviation of
    the last three quarters), and at least `min_tolerance`. Warm-up ends at the first sample, up to `limit`, from which
    all samples of the first half have that median at the level. One late outlier is no warm-up; a slow first call is.

    Args:
        samples_ms: In the order of the runs, from the very first; 10 or more, and at least twice the warm-up.
        limit: The most samples that may be called warm-up.
        min_tolerance: Differences below it do not matter.

    Returns:
        `is_steady` is False, and `index` the limit, where no sample qualifies or there are too few to tell.

    Raises:
        InputError: Samples that are not finite or not above 0, or a negative limit.

    Source:
        A rule of our own. Marginal-error rules (MSER-5, White 1997) cut steady, autocorrelated series too, and need
        far more samples than a warm-up has. False alarms: see the test on simulated series.
    """
    values = _checked(samples_ms)
    if limit < 0:
        raise InputError(f"limit is {limit}; expected the number of samples that may be warm-up, from 0 up.")
    last = min(limit, len(values))
    if len(values) < _MIN_SAMPLES:
        reason = f"{len(values)} samples are too few to see where warm-up ends; {_MIN_SAMPLES} are needed."
        return WarmupEnd(index=last, is_steady=False, reason=reason)
    level = float(np.median(values[len(values) // 2 :]))
    spread = _MAD_TO_STD * float(np.median(np.abs(values[len(values) // 4 :] - level))) / level
    tolerance = max(min_tolerance, 4 * spread)
    windows = np.lib.stride_tricks.sliding_window_view(values, _WINDOW)[: len(values) // 2]
    are_off = np.abs(np.median(windows, axis=1) / level - 1) > tolerance
    earliest = int(np.flatnonzero(are_off)[-1]) + 1 if are_off.any() else 0
    while earliest < len(windows) and abs(values[earliest] / level - 1) > tolerance:
        earliest += 1
    if earliest > limit or earliest == len(windows):
        reason = (
            f"The samples do not stay within {tolerance:.0%} of {level:.4g} ms from any of the first {last + 1} on."
        )
        return WarmupEnd(index=last, is_steady=False, tolerance=tolerance, reason=reason)
    reason = f"From sample {earliest} on (counted from 0) they stay within {tolerance:.0%} of {level:.4g} ms."
    return WarmupEnd(index=earliest, is_steady=True, tolerance=tolerance, reason=reason)


def find_drift(samples: Sequence[float], *, min_change: float = 0.02) -> Drift:
    """Find a trend of at least `min_change` on the Theil-Sen line: significant at 1 % by Mann-Kendall, or plain to see.

    Neighbouring runs resemble each other, which looks like a trend to the plain test; its variance is widened by the
    series' own autocorrelation, so that in short series only a strong trend shows. What a line leaves of a smooth,
    bent rise is autocorrelated just so: therefore a line that covers ten times the typical step from one sample to the
    next is a drift whatever the test says.

    Args:
        samples: Above 0, in the order of the runs; 10 or more.
        min_change: Relative; smaller changes do not count, however significant.

    Raises:
        InputError: Samples that are not finite or not above 0.

    Source:
        Yue and Wang (2004), "The Mann-Kendall Test Modified by Effective Sample Size"; the autocorrelation is taken
        about the line. Its bias is that of Kendall (1954), "Note on Bias in the Estimation of Autocorrelation", with
        the terms for a removed line instead of a removed mean: r + (2 + 4 r) / n estimates it. Student's quantiles at
        the effective sample size, and the second criterion, are ours; the tests show their false alarms.
    """
    values = _checked(samples)
    n = len(values)
    if n < _MIN_SAMPLES:
        return Drift(is_drifting=False, reason=f"{n} samples are too few to see a drift; {_MIN_SAMPLES} are needed.")
    if np.all(values == values[0]):
        return Drift(is_drifting=False, change=0.0, p_value=1.0, autocorrelation=0.0, reason="All samples are equal.")
    from scipy.special import stdtr
    from scipy.stats import kendalltau, theilslopes

    position = np.arange(n)
    slope = float(theilslopes(np.log(values), position).slope)
    change = math.expm1(slope * (n - 1))
    raw = lag1_autocorrelation(np.log(values) - slope * position)
    autocorrelation = float(np.clip((n * raw + 2) / (n - 4), 0.0, _MAX_AUTOCORRELATION))
    lags = np.arange(1, n)
    inflation = 1 + 2 * float(((1 - lags / n) * autocorrelation**lags).sum())
    variance = 2 * (2 * n + 5) / (9 * n * (n - 1)) * inflation
    score = abs(float(kendalltau(position, values).statistic)) / math.sqrt(variance)
    p_value = float(2 * stdtr(max(n / inflation - 2, 1.0), -score))
    typical_step = _MAD_TO_STD * float(np.median(np.abs(np.diff(np.log(values)))))
    is_clear = abs(slope) * (n - 1) > _CLEAR_RISE_IN_STEPS * typical_step
    is_drifting = abs(change) >= min_change and (p_value < _DRIFT_LEVEL or is_clear)
    told = f"From the first to the last of {n} samples the line {'rises' if change > 0 else 'falls'} {abs(change):.1%}"
    verdict = "a drift" if is_drifting else "no drift that stands out from the noise"
    return Drift(
        is_drifting=is_drifting,
        change=change,
        p_value=p_value,
        autocorrelation=autocorrelation,
        reason=f"{told} (p = {p_value:.2g}): {verdict}.",
    )


def find_bimodality(samples: Sequence[float], *, min_separation: float = 0.05) -> Bimodality:
    """Find two levels: the best split in two groups leaves them far apart for the spread that is left inside.

    The sorted samples are split where the groups' squared deviations are least, each group having at least three
    samples and a tenth of all, so that outliers are no mode. Two modes are claimed when Ashman's D is above 4 + 25 / n
    and the medians differ by at least `min_separation`. D is 2.65 for a normal distribution cut in the middle and 3.46
    for a flat one; short series reach more by chance, hence the term in n, which simulations gave.

    Args:
        samples: Above 0; 10 or more. Their order only counts for `num_switches`.
        min_separation: Relative; closer levels do not matter.

    Raises:
        InputError: Samples that are not finite or not above 0.

    Source:
        Fisher (1958), "On Grouping for Maximum Homogeneity" (the split); Ashman, Bird and Zepf (1994), "Detecting
        Bimodality in Astronomical Datasets" (D; theirs is of fitted components and so asks only for 2).
    """
    values = _checked(samples)
    n = len(values)
    if n < _MIN_SAMPLES:
        return Bimodality(is_bimodal=False, reason=f"{n} samples are too few to see modes; {_MIN_SAMPLES} are needed.")
    ordered = np.sort(values)
    logs = np.log(ordered)
    size = _best_split(logs, smallest=max(3, math.ceil(n / 10)))
    lower, upper = logs[:size], logs[size:]
    spread = math.sqrt((float(lower.var(ddof=1)) + float(upper.var(ddof=1))) / 2)
    distance = float(upper.mean() - lower.mean())
    # Equal samples differ by rounding of the logarithm only.
    separation = distance / spread if spread > 1e-12 else None
    low, high = float(np.median(ordered[:size])), float(np.median(ordered[size:]))
    is_apart = high / low - 1 >= min_separation and ordered[size] > ordered[size - 1]
    is_bimodal = bool(is_apart and (separation is None or separation > 4 + 25 / n))
    is_upper = values > ordered[size - 1]
    num_switches = int((is_upper[1:] != is_upper[:-1]).sum())
    if is_bimodal:
        reason = (
            f"{n - size} of {n} samples lie near {high:.4g}, the others near {low:.4g} ({high / low - 1:.1%} apart); "
            f"the series changes between the two {num_switches} times."
        )
    else:
        reason = f"No split of the {n} samples in two groups sets them clearly apart."
    return Bimodality(
        is_bimodal=is_bimodal,
        low=low,
        high=high,
        upper_frac=(n - size) / n,
        separation=separation,
        num_switches=num_switches,
        reason=reason,
    )


def _best_split(ordered: np.ndarray, smallest: int) -> int:
    """Size of the lower group that leaves the least sum of squared deviations within the two groups."""
    centred = ordered - ordered.mean()
    sizes = np.arange(smallest, len(ordered) - smallest + 1)
    below = np.cumsum(centred)[sizes - 1]
    # The groups' sums are `below` and its opposite: the more they explain between groups, the less is left within.
    between = below**2 / sizes + below**2 / (len(ordered) - sizes)
    return int(sizes[np.argmax(between)])


def _checked(samples: Sequence[float]) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if num_bad := int((~(np.isfinite(values) & (values > 0))).sum()):
        raise InputError(f"{num_bad} of {len(values)} samples are not times above 0 (NaN, infinite, zero or negative).")
    return values
