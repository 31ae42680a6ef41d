"""Percentiles, intervals and the set of samples that every timing keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from pydantic import Field

from perfladder.models import Model

_RESAMPLES = 2000


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
    statistic: Callable[..., np.ndarray], *samples: Sequence[float], paired: bool = False, seed: int = 0
) -> Interval:
    """Percentile bootstrap (95 %) of a statistic of one or more sample sets.

    Args:
        statistic: Takes one array [resamples, n] for each sample set and reduces the last axis.
        samples: The sample sets.
        paired: Resample the sets with the same indices: they belong to the same runs.
        seed: Makes the interval reproducible.

    Source:
        Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13.
    """
    generator = np.random.default_rng(seed)
    arrays = [np.asarray(sample, dtype=np.float64) for sample in samples]
    shared = generator.integers(0, len(arrays[0]), (_RESAMPLES, len(arrays[0]))) if paired else None
    resampled = [
        array[shared if shared is not None else generator.integers(0, len(array), (_RESAMPLES, len(array)))]
        for array in arrays
    ]
    low, high = np.percentile(statistic(*resampled), [2.5, 97.5])
    return Interval(low=float(low), high=float(high))


def ratio_of_medians(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Ratio of medians along the last axis, for `bootstrap_interval`."""
    result: np.ndarray = np.median(numerator, axis=-1) / np.median(denominator, axis=-1)
    return result
