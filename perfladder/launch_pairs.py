"""Comparison of two sides in several pairs of processes, each of which took turns run by run.

A process may be faster than another of the same code for as long as it lives: by where its memory lies, say. Pairs of
runs of one pair of processes cannot show that, however many they are.
"""

from __future__ import annotations

import math

import numpy as np

from perfladder.errors import InputError
from perfladder.stats import (
    Comparison,
    Interval,
    Samples,
    compare_samples,
    detectable_difference,
    judge_interval,
    told_of_samples,
    typical_ratio,
)

MIN_LAUNCH_PAIRS = 3
"""Pairs of processes for a verdict. Student's factor is 4.3 with 3 of them, 2.6 with 6, which are advised."""

_LEVEL = 0.95


def compare_launch_pairs(
    baseline: Samples, candidate: Samples, *, min_effect: float = 0.0, aa_noise_floor: float | None = None
) -> Comparison:
    """Compare sides that took turns, each launch of one with the launch of the other that ran beside it.

    A pair of launches counts as one sample: the typical ratio of its pairs of runs. The interval is Student's, of the
    mean of their logarithms.

    Args:
        baseline: Times above 0, in any unit; as many launches as the candidate has, and as many runs in each.
        candidate: Times in the same unit.
        min_effect: As in `compare_samples`.
        aa_noise_floor: Likewise.

    Returns:
        `undecided` with fewer than 3 pairs of launches: of these, only their own runs are known.

    Raises:
        InputError: As in `compare_samples`.

    Source:
        Launches as the unit: Kalibera and Jones (2013), "Rigorous Benchmarking in Reasonable Time".
    """
    within = compare_samples(baseline, candidate, interleaved=True, min_effect=min_effect)
    count = len(baseline.launches)
    if within.interval is None or count < MIN_LAUNCH_PAIRS:
        reason = within.reason if within.interval is None else _too_few(within, count)
        return Comparison(
            verdict="undecided",
            reason=reason,
            unit="launch_pairs",
            num_baseline=count,
            num_candidate=count,
            speedup=within.speedup,
            min_effect=min_effect,
        )
    logs = np.array(
        [
            math.log(float(typical_ratio(np.asarray(one), np.asarray(other))))
            for one, other in zip(baseline.launches, candidate.launches, strict=True)
        ]
    )
    from scipy.special import stdtrit

    error = float(logs.std(ddof=1)) / math.sqrt(count)
    reach = float(stdtrit(count - 1, (1 + _LEVEL) / 2)) * error
    speedup = math.exp(float(logs.mean()))
    interval = Interval(low=speedup * math.exp(-reach), high=speedup * math.exp(reach))
    verdict, why = judge_interval(speedup, interval, min_effect, aa_noise_floor)
    detectable = detectable_difference(error, count)
    return Comparison(
        verdict=verdict,
        reason=f"{why} {told_of_samples('launch_pairs', count, count, verdict, detectable)}",
        unit="launch_pairs",
        num_baseline=count,
        num_candidate=count,
        speedup=speedup,
        interval=interval,
        min_effect=min_effect,
        minimum_detectable_difference=detectable,
        noise_floor=math.expm1(reach),
    )


def launch_noise_floor(samples: Samples, repeat: Samples) -> float:
    """Relative difference that two sides of the same code stay below, by sides of one code that took turns.

    Raises:
        InputError: There are too few launches or runs to tell.
    """
    found = compare_launch_pairs(samples, repeat)
    if found.noise_floor is None or found.speedup is None:
        raise InputError(f"The noise cannot be told: {found.reason}")
    return max(found.noise_floor, math.expm1(abs(math.log(found.speedup))))


def _too_few(within: Comparison, count: int) -> str:
    assert within.interval is not None, "it is looked at before"
    processes = "one process" if count == 1 else f"{count} processes"
    return (
        f"The speedup is {within.speedup:.3f} ({within.interval.low:.3f} to {within.interval.high:.3f}) for "
        f"{processes} of each side; others of the same code may be faster or slower. A verdict needs at least "
        f"{MIN_LAUNCH_PAIRS}, better 6."
    )
