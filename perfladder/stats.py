"""Percentiles, intervals, the set of samples that every timing keeps, and the comparison of two such sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from perfladder.errors import InputError
from perfladder.models import Model

Unit = Literal["runs", "launches", "launch_pairs"]
Verdict = Literal["faster", "slower", "no_difference", "undecided"]

_RESAMPLES = 2000
_FEW_RESAMPLES = 400
_MANY_PAIRS = 200
"""Above so many pairs fewer resamples are taken: their cost grows with the square, and the interval is narrow then."""
_CHUNK = 1 << 21
_LEVEL = 0.95
_POWER = 0.8

MIN_PAIRS = 10
"""Interleaved pairs for a verdict: 5 % of simulated A/A comparisons with 10 pairs were called different (independent
noise, 1000 trials), 3 % with 20. At CV 2.5 %, 10 pairs found a change of 5 % in 88 %, 20 in 99.7 %: 20 are advised."""

MIN_LAUNCHES = 5
"""Process launches a side for a verdict without interleaving (3.4 % of 1500 simulated A/A were called different)."""


class Summary(Model):
    """One distribution, in the unit of its samples."""

    n: int
    mean: float
    std: float
    min: float
    max: float
    p50: float
    p90: float
    p95: float
    p99: float


class Interval(Model):
    """A 95 % confidence interval."""

    low: float
    high: float


class Samples(Model):
    """Raw samples as process launches x runs, with their summary over all runs."""

    launches: list[list[float]] = Field(description="One inner list for each process launch, in run order.")

    @property
    def values(self) -> list[float]:
        """All runs of all launches."""
        return [value for launch in self.launches for value in launch]

    @property
    def summary(self) -> Summary:
        """The distribution over all runs."""
        return summarize(self.values)


def summarize(values: Sequence[float]) -> Summary:
    """Summarise at least one sample; percentiles interpolate linearly, `std` is that of the sample (n - 1)."""
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = (float(p) for p in np.percentile(array, [50, 90, 95, 99]))
    return Summary(
        n=len(array),
        mean=float(array.mean()),
        std=float(array.std(ddof=1)) if len(array) > 1 else 0.0,
        min=float(array.min()),
        max=float(array.max()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
    )


def bootstrap_interval(
    statistic: Callable[..., np.ndarray],
    *samples: Sequence[float],
    paired: bool = False,
    in_blocks: bool = False,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap (95 %) of a statistic of one or more sample sets.

    Args:
        statistic: Takes one array [resamples, n] for each sample set and reduces the last axis.
        samples: The sample sets.
        paired: Resample the sets with the same indices: they belong to the same runs.
        in_blocks: Resample blocks of consecutive runs, since runs of one process resemble their neighbours. Such an
            interval tells how exact this process's number is; another process may well give one outside it.
        seed: Makes the interval reproducible.

    Source:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. Blocks as in `compare_samples`,
        their length from the first sample set.
    """
    generator = np.random.default_rng(seed)
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]

    def indices(array: np.ndarray) -> np.ndarray:
        if in_blocks:
            return _block_indices(generator, len(array), _block_length(array))
        return generator.integers(0, len(array), (_RESAMPLES, len(array)))

    shared = indices(arrays[0]) if paired else None
    resampled = [array[shared if shared is not None else indices(array)] for array in arrays]
    low, high = np.percentile(statistic(*resampled), [2.5, 97.5])
    return Interval(low=float(low), high=float(high))


def interval_of_ratio(numerator: Sequence[float], denominator: Sequence[float], *, seed: int = 0) -> Interval:
    """95 % interval of the ratio of medians of two series, each measured on its own and in order; lengths may differ.

    Each side is resampled in blocks of its own length, since neighbours resemble each other, and its deviations are
    widened by what blocks take from a short series. What lasts over a whole side, such as a slower machine while the
    other one was measured, no resampling of it can show.

    Args:
        numerator: Times above 0.
        denominator: Likewise, in the same unit.
        seed: Makes the interval reproducible.

    Source:
        Blocks and widening as in `compare_samples`.
    """
    generator = np.random.default_rng(seed)
    top, bottom = (np.asarray(side, dtype=np.float64) for side in (numerator, denominator))
    spread = _log_median_deviations(generator, top) - _log_median_deviations(generator, bottom)
    centre = math.log(float(np.median(top)) / float(np.median(bottom)))
    low, high = np.exp(centre + np.percentile(spread, [2.5, 97.5]))
    return Interval(low=float(low), high=float(high))


def _log_median_deviations(generator: np.random.Generator, series: np.ndarray) -> np.ndarray:
    """How far the logarithm of the median goes from its own in resamples [resamples] of blocks of a series."""
    n, block_length = len(series), _block_length(series)
    logs = np.log(np.median(series[_block_indices(generator, n, block_length)], axis=-1))
    widening = math.sqrt(n / (n - block_length)) if n > block_length else 1.0
    result: np.ndarray = widening * (logs - math.log(float(np.median(series))))
    return result


def ratio_of_medians(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Ratio of medians along the last axis, for `bootstrap_interval`."""
    result: np.ndarray = np.median(numerator, axis=-1) / np.median(denominator, axis=-1)
    return result


def typical_ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Typical ratio of pairs along the last axis: the pseudo-median of its logarithms, exponentiated.

    What lasts over both runs of a pair cancels in it, which a ratio of medians does not see.

    Source:
        Hodges and Lehmann (1963), "Estimates of Location Based on Rank Tests".
    """
    result: np.ndarray = np.exp(_pseudo_median(np.log(numerator / denominator)))
    return result


class Comparison(Model):
    """Whether a candidate is faster than its baseline, and what the samples could have shown at all."""

    verdict: Verdict
    reason: str = Field(description="The verdict in words: why, and what it rests on.")
    unit: Unit = Field(
        description="One sample: an interleaved pair of runs, a process launch, or a pair of launches that took turns."
    )
    num_baseline: int = Field(description="Sample size of the baseline, in `unit`.")
    num_candidate: int = Field(description="Sample size of the candidate, in `unit`.")
    speedup: float | None = Field(
        description="Baseline over candidate, above 1 is faster: the typical ratio of pairs, or the ratio of medians."
    )
    interval: Interval | None = Field(default=None, description="Of the speedup, 95 %.")
    p_value: float | None = Field(
        default=None, description="Mann-Whitney, two-sided, of `unit`; no part of the verdict, since it knows no pairs."
    )
    block_length: int | None = Field(default=None, description="Consecutive pairs resampled together.")
    min_effect: float = Field(default=0.0, description="Relative change below which no verdict was wanted.")
    minimum_detectable_difference: float | None = Field(
        default=None, description="Relative; found in 80 % of such comparisons, at 95 % confidence."
    )
    noise_floor: float | None = Field(
        default=None, description="Relative; what two sides of the same code stay below in 95 % of such comparisons."
    )


def compare_samples(
    baseline: Samples,
    candidate: Samples,
    *,
    interleaved: bool,
    min_effect: float = 0.0,
    aa_noise_floor: float | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare two sides by a ratio of their times; the verdict rests on the 95 % interval of that ratio.

    Interleaved sides are compared pair by pair (run i of one side with run i of the other), by `typical_ratio`, so that
    what disturbs both cancels. Its interval is the wider of two: one from resampling blocks of consecutive pairs, so
    that what lasts over runs is not counted as if it were independent; and the one that the signed-rank test leaves,
    which is exact for independent pairs however few. Otherwise one sample is a process launch (the median of its runs):
    runs of one process are no independent samples of anything.

    Args:
        baseline: Times above 0, in any unit.
        candidate: Times in the same unit.
        interleaved: The sides took turns, run by run; best in changing order (AB BA AB ..).
        min_effect: Faster and slower need the interval to exclude 1 by more than this, 0.02 for 2 %.
        aa_noise_floor: From `noise_floor` on this machine: faster and slower need a change above it as well.
        seed: Makes the interval reproducible.

    Returns:
        `undecided` where the samples cannot tell: too few of them, times of zero, a change within `aa_noise_floor`, or
        an interval on both sides of `min_effect`. `no_difference` means none was seen; a difference below
        `minimum_detectable_difference` may well be missed.

    Raises:
        InputError: A side is empty or holds NaN, infinite or negative times; interleaved sides differ in length;
            `min_effect` or `aa_noise_floor` is not a number from 0 up.

    Source:
        Blocks: Politis and Romano (1992), circular block bootstrap; their length: `_block_length`.
        Signed-rank interval: Hollander, Wolfe and Chicken (2014), Nonparametric Statistical Methods, section 3.3.
        Interval of resampled pairs: Hesterberg (2015), "What Teachers Should Know about the Bootstrap", expanded
        percentiles, with sqrt(n / (n - block length)) for his sqrt(n / (n - 1)); of launches: plain percentiles, which
        for the median of 5 already span all of them.
        Launches as unit: Kalibera and Jones (2013), "Rigorous Benchmarking in Reasonable Time".
        Detectable difference: Bloom (1995), "Minimum Detectable Effects".
    """
    for name, value in (("min_effect", min_effect), ("aa_noise_floor", aa_noise_floor or 0.0)):
        if not 0 <= value < math.inf:
            raise InputError(f"{name} is {value}; expected a relative change such as 0.02, from 0 up.")
    unit: Unit = "runs" if interleaved else "launches"
    first, second = _sides({"baseline": baseline, "candidate": candidate}, unit)
    speedup = _ratio_of(first, second, unit)
    obstacle = _obstacle(first, second, unit)
    if obstacle is not None:
        return Comparison(
            verdict="undecided",
            reason=obstacle,
            unit=unit,
            num_baseline=len(first),
            num_candidate=len(second),
            speedup=speedup,
            min_effect=min_effect,
        )
    assert speedup is not None, "samples of zero are an obstacle"
    bootstrap = _resample(first, second, unit, seed)
    from scipy.stats import mannwhitneyu

    verdict, why = judge_interval(speedup, bootstrap.interval, min_effect, aa_noise_floor)
    reason = f"{why} {told_of_samples(unit, len(first), len(second), verdict, bootstrap.detectable)}"
    return Comparison(
        verdict=verdict,
        reason=reason,
        unit=unit,
        num_baseline=len(first),
        num_candidate=len(second),
        speedup=speedup,
        interval=bootstrap.interval,
        # Where all samples are equal, releases of scipy differ: 1, or not a number.
        p_value=float(mannwhitneyu(first, second).pvalue) if len({*first, *second}) > 1 else 1.0,
        block_length=bootstrap.block_length,
        min_effect=min_effect,
        minimum_detectable_difference=bootstrap.detectable,
        noise_floor=bootstrap.noise_floor,
    )


def noise_floor(
    samples: Samples, repeat: Samples | None = None, *, interleaved: bool = True, seed: int = 0
) -> float | None:
    """Relative difference that two sides of the same code stay below in 95 % of comparisons.

    Args:
        samples: One side of an A/A measurement; without `repeat` it is split in two.
        repeat: The other side, of the same code.
        interleaved: As in `compare_samples`. A split then takes every other run, so it tells of sides of half as many
            runs; otherwise the launches of `samples` are resampled as both sides.
        seed: Makes the number reproducible.

    Returns:
        The half-width of the ratio's interval, or how far the two measured sides lie apart where that is more (then
        something favours one of them). None where `compare_samples` would have been undecided.

    Raises:
        InputError: As in `compare_samples`.
    """
    unit: Unit = "runs" if interleaved else "launches"
    if repeat is None and interleaved:
        runs = samples.values
        samples, repeat = (Samples(launches=[half]) for half in (runs[: len(runs) // 2 * 2 : 2], runs[1::2]))
    first, second = _sides({"samples": samples, "repeat": samples if repeat is None else repeat}, unit)
    if _obstacle(first, second, unit) is not None:
        return None
    ratio = _ratio_of(first, second, unit)
    assert ratio is not None, "samples of zero are an obstacle"
    apart = abs(math.log(ratio))
    return max(_resample(first, second, unit, seed).noise_floor, math.expm1(apart))


_UNIT_IN_WORDS: dict[Unit, str] = {
    "runs": "an interleaved run",
    "launches": "a process launch",
    "launch_pairs": "a pair of process launches that took turns",
}


def told_of_samples(unit: Unit, num_baseline: int, num_candidate: int, verdict: Verdict, detectable: float) -> str:
    """What a verdict rests on, in words."""
    told = f"The unit is {_UNIT_IN_WORDS[unit]}, {num_baseline} and {num_candidate}."
    if verdict == "no_difference":
        told += f" A difference below {detectable:.1%} could have been missed."
    return told


@dataclass(frozen=True)
class _Bootstrap:
    """What resampling tells of the ratio."""

    interval: Interval
    noise_floor: float
    detectable: float
    block_length: int | None


def _sides(named: dict[str, Samples], unit: Unit) -> tuple[np.ndarray, np.ndarray]:
    """Both sides in `unit`: their runs, which must match one to one, or the medians of their launches."""
    for name, samples in named.items():
        _check(samples, name)
    first, second = named.values()
    if unit == "launches":
        return _launch_medians(first), _launch_medians(second)
    counts = [[len(launch) for launch in samples.launches] for samples in (first, second)]
    if counts[0] != counts[1]:
        what = " and ".join(f"{count} of {name}" for count, name in zip(counts, named, strict=True))
        raise InputError(f"Interleaved samples come in pairs, but the launches hold {what} runs.")
    return np.asarray(first.values, dtype=np.float64), np.asarray(second.values, dtype=np.float64)


def _check(samples: Samples, name: str) -> None:
    values = np.asarray(samples.values, dtype=np.float64)
    if not len(values) or not all(samples.launches):
        raise InputError(f"{name} holds no samples, or a launch without any; leave out launches that failed.")
    if num_bad := int((~np.isfinite(values)).sum()):
        raise InputError(f"{name} holds {num_bad} samples that are NaN or infinite; leave out runs that failed.")
    if num_bad := int((values < 0).sum()):
        raise InputError(f"{name} holds {num_bad} negative samples; a comparison needs times above 0.")


def _launch_medians(samples: Samples) -> np.ndarray:
    return np.array([np.median(launch) for launch in samples.launches])


def _obstacle(first: np.ndarray, second: np.ndarray, unit: Unit) -> str | None:
    if num_zeros := int((first == 0).sum() + (second == 0).sum()):
        return f"{num_zeros} samples are zero: below the clock's resolution, or not measured; a ratio says nothing."
    if unit == "runs" and len(first) < MIN_PAIRS:
        return f"{len(first)} interleaved pairs were measured; a verdict needs at least {MIN_PAIRS}, better 20."
    if unit == "launches" and min(len(first), len(second)) < MIN_LAUNCHES:
        return (
            f"The runs were not interleaved, so the unit is a process launch: there are {len(first)} and "
            f"{len(second)}, and a verdict needs at least {MIN_LAUNCHES} a side. Interleave runs, or launch more often."
        )
    return None


def _resample(first: np.ndarray, second: np.ndarray, unit: Unit, seed: int) -> _Bootstrap:
    """Bootstrap the logarithm of the ratio; what it draws makes a swap of the sides the very inverse."""
    generator = np.random.default_rng(seed)
    size = min(len(first), len(second))
    if unit == "runs":
        pairs = np.log(first / second)
        block_length = _block_length(pairs)
        indices = _block_indices(generator, size, block_length)
        log_ratios = _pseudo_median(pairs[indices if size <= _MANY_PAIRS else indices[:_FEW_RESAMPLES]])
        bounds = _signed_rank_interval(pairs)
        # Of independent pairs, blocks show only this part of the median's variance: Var* = Var (1 - length / n).
        widening = math.sqrt(size / (size - block_length))
        tail = _expanded_tail(size, widening)
    else:
        block_length, widening, tail = None, math.sqrt(size / (size - 1)), (1 - _LEVEL) / 2
        draws = generator.random((2, _RESAMPLES // 2, max(len(first), len(second))))
        log_ratios = np.concatenate(
            [np.log(ratio_of_medians(_drawn(first, one), _drawn(second, other))) for one, other in (draws, draws[::-1])]
        )
        bounds = math.inf, -math.inf
    ratio = _ratio_of(first, second, unit)
    assert ratio is not None, "samples of zero are an obstacle"
    deviations = np.abs(log_ratios - math.log(ratio))
    resampled = np.quantile(log_ratios, [tail, 1 - tail])
    low, high = np.exp([min(resampled[0], bounds[0]), max(resampled[1], bounds[1])])
    return _Bootstrap(
        interval=Interval(low=float(low), high=float(high)),
        noise_floor=float(np.expm1(np.quantile(deviations, 1 - 2 * tail))),
        detectable=detectable_difference(widening * float(log_ratios.std()), size),
        block_length=block_length,
    )


def _ratio_of(first: np.ndarray, second: np.ndarray, unit: Unit) -> float | None:
    """The sides' ratio; None where times are zero."""
    if unit == "runs" and min(first.min(), second.min()) > 0:
        return float(typical_ratio(first, second))
    medians = float(np.median(first)), float(np.median(second))
    return medians[0] / medians[1] if min(medians) > 0 else None


def _pseudo_median(values: np.ndarray) -> np.ndarray:
    """Median of the means of all pairs of values, each with itself too, along the last axis."""
    rows = values.reshape(-1, values.shape[-1])
    left, right = np.triu_indices(rows.shape[1])
    chunk = max(1, _CHUNK // len(left))
    parts = [
        np.median((rows[at : at + chunk, left] + rows[at : at + chunk, right]) / 2, axis=-1)
        for at in range(0, len(rows), chunk)
    ]
    result: np.ndarray = np.concatenate(parts).reshape(values.shape[:-1])
    return result


def _signed_rank_interval(values: np.ndarray) -> tuple[float, float]:
    """Values of the middle that the two-sided signed-rank test does not reject at 5 %."""
    left, right = np.triu_indices(len(values))
    means = np.sort((values[left] + values[right]) / 2)
    # How many subsets of the ranks 1 to n have which sum: each is as likely as any other.
    counts = np.ones(1)
    for rank in range(1, len(values) + 1):
        longer = np.zeros(len(counts) + rank)
        longer[: len(counts)] += counts / 2
        longer[rank:] += counts / 2
        counts = longer
    num_rejected = int(np.searchsorted(np.cumsum(counts), (1 - _LEVEL) / 2, side="right"))
    index = max(num_rejected - 1, 0)
    return float(means[index]), float(means[-1 - index])


def _drawn(values: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """As many values as there are, picked by draws [resamples, n or more] between 0 and 1."""
    result: np.ndarray = values[(draws[:, : len(values)] * len(values)).astype(int)]
    return result


def _block_length(log_ratios: np.ndarray) -> int:
    """Pairs in a block: the mean's optimum for a first-order autoregression, between n^(1/3) and n / 4.

    The lower bound serves noise of longer memory than lag 1 shows; the upper one leaves at least four blocks.

    Source:
        Politis and White (2004), "Automatic Block-Length Selection for the Dependent Bootstrap", with the correction of
        Patton, Politis and White (2009): (2 G^2 / D)^(1/3) n^(1/3), D = 4/3 g(0)^2 for circular blocks. For lag-1
        autocorrelation r, G / g(0) is 2 r / (1 - r^2), which gives (6 r^2 / (1 - r^2)^2)^(1/3) n^(1/3).
    """
    n = len(log_ratios)
    r = lag1_autocorrelation(log_ratios)
    best = (6 * r**2 / (1 - r**2) ** 2 * n) ** (1 / 3) if abs(r) < 1 else math.inf
    shortest = max(1, round(n ** (1 / 3)))
    return int(min(max(math.ceil(min(best, n)), shortest), max(shortest, n // 4)))


def lag1_autocorrelation(values: np.ndarray) -> float:
    """Of a series about its mean; 0 for a constant one."""
    centred = values - values.mean()
    total = float(centred @ centred)
    return float(centred[1:] @ centred[:-1]) / total if total > 0 else 0.0


def _block_indices(generator: np.random.Generator, n: int, block_length: int) -> np.ndarray:
    """Indices [resamples, n] of whole blocks that begin anywhere and go on from the end to the start."""
    starts = generator.integers(0, n, (_RESAMPLES, -(-n // block_length)))
    blocks = (starts[:, :, None] + np.arange(block_length)) % n
    result: np.ndarray = blocks.reshape(_RESAMPLES, -1)[:, :n]
    return result


def _expanded_tail(n: int, widening: float) -> float:
    """The percentile that gives a small sample's interval the width of Student's instead of the normal's."""
    from scipy.special import ndtr, stdtrit

    return float(ndtr(-widening * stdtrit(n - 1, (1 + _LEVEL) / 2)))


def detectable_difference(standard_error: float, n: int) -> float:
    """Relative difference that such a standard error of the log ratio lets one find, by Student's quantiles."""
    from scipy.special import stdtrit

    factor = stdtrit(n - 1, (1 + _LEVEL) / 2) + stdtrit(n - 1, _POWER)
    return float(np.expm1(factor * standard_error))


def judge_interval(speedup: float, interval: Interval, min_effect: float, floor: float | None) -> tuple[Verdict, str]:
    """The verdict that a speedup and its interval give, and why."""
    change = f"{max(speedup, 1 / speedup) - 1:.1%} {'faster' if speedup > 1 else 'slower'}"
    told = f"The speedup is {speedup:.3f} (95 % interval {interval.low:.3f} to {interval.high:.3f})"
    if interval.low <= 1 <= interval.high:
        return "no_difference", f"{told}, which holds 1."
    if floor is not None and max(speedup, 1 / speedup) - 1 <= floor:
        return "undecided", f"{told}, but {change} is within the A/A noise floor of {floor:.1%}."
    if interval.low > 1 + min_effect:
        return "faster", f"{told}: {change}."
    if interval.high < 1 / (1 + min_effect):
        return "slower", f"{told}: {change}."
    if interval.low >= 1 / (1 + min_effect) and interval.high <= 1 + min_effect:
        return "no_difference", f"{told}: {change}, less than the {min_effect:.1%} asked for."
    return "undecided", f"{told}: {change}, and the interval reaches to both sides of the {min_effect:.1%} asked for."
