"""Time replayed calls in turn, as the pipeline makes them, and judge how long they take against the pipeline's own.

Where each call is timed many times in a row, and the machine's speed changes for seconds at a time, one call looks slow
as a whole. In rounds all of them see the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
from pydantic import Field

from perfladder.models import Model
from perfladder.stats import Interval, interval_of_ratio
from perfladder.steady import find_bimodality

if TYPE_CHECKING:
    from perfladder.capturing.evict import Evictor
    from perfladder.capturing.store import CapturedCall
    from perfladder.capturing.yardstick import Yardstick

TIMING_TOLERANCE: Final = 0.05
"""A replay is faithful in time if its ratio to the pipeline is within 1 +- this, and its interval within twice that; it
is not if its interval is outside of 1 +- this."""
_LEAST_CALL_MS: Final = 0.1
"""A shorter call hangs on what was done just before it: restoring inputs in a replay, its own code in a pipeline."""
_WARMUP_ROUNDS: Final = 3
_MIN_ROUNDS: Final = 8
_SWITCHES_OF_LASTING_LEVELS: Final = 0.25
"""Of all rounds. Levels that come and go at random change in half of the rounds, where both are as frequent."""

Caches = Literal["warm", "evicted"]
TimeOnce = Callable[["CapturedCall", "Evictor | None"], float]


@dataclass
class Timed:
    """Milliseconds of each call, round by round: one list for each call, in the order of the calls."""

    warm: list[list[float]]
    evicted: list[list[float]] | None = None
    yardstick: list[float] = field(default_factory=list)
    warm_rounds: list[float] = field(init=False)
    evicted_rounds: list[float] | None = field(init=False)

    def __post_init__(self) -> None:
        self.warm_rounds = _totals(self.warm)
        self.evicted_rounds = None if self.evicted is None else _totals(self.evicted)


def time_rounds(
    calls: Sequence[CapturedCall],
    repeats: int,
    time_once: TimeOnce,
    evictor: Evictor | None = None,
    yardstick: Yardstick | None = None,
) -> Timed:
    """Time all calls in turn, as often as asked, after some rounds that do not count.

    Args:
        calls: In the order in which the pipeline makes them.
        repeats: How many rounds.
        time_once: Restores a call and times it, in ms; empties the caches before it if it is given something to do so.
        evictor: Times each round once more with the caches emptied before each call; rounds of both kinds alternate.
        yardstick: Timed before each round.
    """
    lengths: list[float] = []
    warm: list[list[float]] = [[] for _ in calls]
    evicted: list[list[float]] = [[] for _ in calls]
    for _ in range(_WARMUP_ROUNDS):
        for call in calls:
            time_once(call, None)
    for index in range(repeats):
        if yardstick is not None:
            lengths.append(yardstick.time_ms())
        if evictor is not None and index:
            time_once(calls[-1], None)  # the first call of a warm round follows another call, not emptied caches
        for samples, call in zip(warm, calls, strict=True):
            samples.append(time_once(call, None))
        if evictor is not None:
            for samples, call in zip(evicted, calls, strict=True):
                samples.append(time_once(call, evictor))
    return Timed(warm, evicted if evictor is not None else None, lengths)


class CachesVerdict(Model):
    """How long replays take against the pipeline's calls, with warm caches and with empty ones."""

    caches: Caches = Field(description="Which of the two comes nearer to the pipeline; the ratio is of that one.")
    ratio: float
    interval: Interval
    warm_ratio: float
    evicted_ratio: float | None
    is_faithful: bool | None


class TimingVerdict(CachesVerdict):
    """The same of replays that were timed alone, and what else may be why."""

    reference_spread: float
    host_ratio: float | None = Field(description="The host's own work in the replay over that in the pipeline.")
    speed_change: str | None = Field(description="How the machine's own speed changed meanwhile; None if it did not.")
    too_short: str | None = Field(description="That the calls are too short for a verdict; None if they are not.")


def judge_rounds(
    timed: Timed, in_pipeline: Sequence[Sequence[float]], yardstick: Sequence[float] = ()
) -> TimingVerdict:
    """Compare the rounds with the pipeline's runs; of warm and empty caches those count that come nearer.

    Args:
        timed: The replays.
        in_pipeline: Milliseconds of each call in the pipeline, run by run.
        yardstick: Milliseconds of a fixed piece of host work beside those runs.
    """
    reference = _totals(in_pipeline)
    sides: dict[Caches, list[float]] = {"warm": timed.warm_rounds}
    if timed.evicted_rounds is not None:
        sides["evicted"] = timed.evicted_rounds
    ratios = {
        name: (float(np.median(side) / np.median(reference)), interval_of_ratio(side, reference))
        for name, side in sides.items()
    }
    verdict = judge_caches(ratios)
    host_ratio = float(np.median(timed.yardstick) / np.median(yardstick)) if timed.yardstick and yardstick else None
    change = next(filter(None, map(find_speed_change, sides.values())), None)
    if change is None and host_ratio is not None and not verdict.is_faithful:
        change = explain_by_host(verdict.interval, host_ratio)
    too_short = explain_by_length(float(np.median(reference)) / len(in_pipeline))
    return TimingVerdict(
        **dict(verdict) | ({"is_faithful": None} if change or too_short else {}),
        too_short=too_short,
        host_ratio=host_ratio,
        reference_spread=(max(reference) - min(reference)) / float(np.median(reference)),
        speed_change=change,
    )


def judge_caches(ratios: Mapping[Caches, tuple[float, Interval]]) -> CachesVerdict:
    """Which caches come nearer to the pipeline, and whether a replay takes as long as its calls did.

    What a call finds in the caches there lies between both; so does its time, and if as long lies between both too,
    nothing is decided.

    Args:
        ratios: Of the replayed over the pipeline's time, with warm caches and, where there are any, with empty ones.
    """
    values = {name: ratio for name, (ratio, _) in ratios.items()}
    nearer = min(values, key=lambda name: abs(values[name] - 1))
    ratio, interval = ratios[nearer]
    is_faithful = judge_ratio(ratio, interval)
    if is_faithful is False and min(values.values()) < 1 < max(values.values()):
        is_faithful = None
    return CachesVerdict(
        caches=nearer,
        ratio=ratio,
        interval=interval,
        warm_ratio=values["warm"],
        evicted_ratio=values.get("evicted"),
        is_faithful=is_faithful,
    )


def judge_ratio(ratio: float, interval: Interval) -> bool | None:
    """Whether a replay takes as long as the pipeline's calls did; None if the samples cannot tell."""
    is_near = abs(ratio - 1) <= TIMING_TOLERANCE
    if is_near and max(1 - interval.low, interval.high - 1) <= 2 * TIMING_TOLERANCE:
        return True
    is_outside = interval.low > 1 + TIMING_TOLERANCE or interval.high < 1 - TIMING_TOLERANCE
    return False if is_outside else None


def find_speed_change(rounds_ms: Sequence[float]) -> str | None:
    """Tell of two levels that last, each for several rounds; None if there are none, or too few rounds to tell.

    All rounds do the same work, so a lasting change between them is the machine's. It shows as two clearly separate
    levels with few changes between them, or as halves of which one is slower than the other by more than the tolerance
    and by three quarters of its rounds.
    """
    values = np.asarray(rounds_ms, dtype=np.float64)
    if len(values) < _MIN_ROUNDS or not (values > 0).all():
        return None
    levels = find_bimodality(values.tolist(), min_separation=TIMING_TOLERANCE)
    if levels.is_bimodal and (levels.num_switches or 0) <= _SWITCHES_OF_LASTING_LEVELS * len(values):
        return _in_words(levels.low or 0.0, levels.high or 0.0, "its rounds lie on two levels that last")
    fast, slow = sorted(np.array_split(values, 2), key=np.median)
    low, high = float(np.median(fast)), float(np.median(slow))
    if high / low - 1 > TIMING_TOLERANCE and np.percentile(slow, 25) > np.percentile(fast, 75):
        return _in_words(low, high, "its first and its second half differ")
    return None


def explain_by_host(interval: Interval, host_ratio: float) -> str | None:
    """Tell that the host's own speed may be why a replay takes another time; None if that cannot explain it.

    How much of a call follows the host's speed is not known: nothing of it, all, or a part.

    Args:
        interval: Of the replayed over the pipeline's time.
        host_ratio: The same fixed piece of host work here over there.
    """
    if abs(host_ratio - 1) <= TIMING_TOLERANCE:
        return None
    low, high = min(interval.low, interval.low / host_ratio), max(interval.high, interval.high / host_ratio)
    if low > 1 + TIMING_TOLERANCE or high < 1 - TIMING_TOLERANCE:
        return None
    change = "faster" if host_ratio < 1 else "slower"
    return (
        f"The host itself is {change} than it was beside the pipeline's runs: a fixed piece of its work takes "
        f"{host_ratio:.2f} times as long."
    )


def explain_by_length(call_ms: float) -> str | None:
    """Tell that calls of this length are too short for a verdict; None if they are not."""
    if call_ms >= _LEAST_CALL_MS:
        return None
    return (
        f"A call takes {1000 * call_ms:.3g} us: below {1000 * _LEAST_CALL_MS:.0f} us what was done just before it "
        "decides how long it takes."
    )


def _in_words(low_ms: float, high_ms: float, how: str) -> str:
    return (
        f"The machine's own speed changed during the replay: {how} ({low_ms:.4g} and {high_ms:.4g} ms, "
        f"{high_ms / low_ms - 1:.0%} apart), though all rounds do the same work."
    )


def _totals(calls: Sequence[Sequence[float]]) -> list[float]:
    """Sum the calls of each round; rounds that not every call has are left out."""
    return [float(sum(parts)) for parts in zip(*calls, strict=False)]
