"""Time a candidate against the plain module, in turns, at one batch size after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, pstdev
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from perfladder.errors import InputError
from perfladder.stats import MIN_PAIRS, Comparison, Samples, compare_samples, summarize
from perfladder.timing.timer import Clock, timing_event

if TYPE_CHECKING:
    import torch

    from perfladder.tuning.samples import Sample

_NS_PER_MS: Final = 1e6
_CLOCK_MS: Final = 1e-6
"""What the clock counts in: a call that takes none of it is taken for one that takes one."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@runtime_checkable
class MeasuringStop(Protocol):
    """When a batch size has been measured often enough."""

    @property
    def warmup_samples(self) -> int:
        """Pairs before the first measured one."""

    def is_enough(self, baseline_ms: Sequence[float], candidate_ms: Sequence[float]) -> bool:
        """Whether to stop, given the times of both sides so far."""


@dataclass(frozen=True)
class NumStepsMeasuringStopStrategy:
    """A fixed number of pairs.

    Args:
        num_steps: Measured pairs of runs, one of each side; a verdict needs at least 10.
        warmup_samples: Pairs before them.

    Raises:
        InputError: A number is below its least.
    """

    num_steps: int = 20
    warmup_samples: int = 5

    def __post_init__(self) -> None:
        _check_whole("num_steps", self.num_steps, MIN_PAIRS)
        _check_whole("warmup_samples", self.warmup_samples, 1)

    def is_enough(self, baseline_ms: Sequence[float], candidate_ms: Sequence[float]) -> bool:
        """Whether all steps were made."""
        return len(candidate_ms) >= self.num_steps


@dataclass(frozen=True)
class StableWindowMeasuringStopStrategy:
    """Until the last pairs vary little on both sides, or there are too many.

    Args:
        window_size: Pairs that are looked at.
        max_cv_ratio: Largest standard deviation over mean in the window.
        warmup_samples: Pairs before the first measured one.
        max_samples: Pairs at most; what was measured is then judged as it is.

    Raises:
        InputError: A number is out of its range.
    """

    window_size: int = 20
    max_cv_ratio: float = 0.10
    warmup_samples: int = 5
    max_samples: int = 100

    def __post_init__(self) -> None:
        _check_whole("window_size", self.window_size, MIN_PAIRS)
        _check_whole("warmup_samples", self.warmup_samples, 1)
        _check_whole("max_samples", self.max_samples, self.window_size)
        if not _is_number(self.max_cv_ratio) or not self.max_cv_ratio > 0:
            raise InputError(f"max_cv_ratio: expected a ratio above 0, got {self.max_cv_ratio!r}.")

    def is_enough(self, baseline_ms: Sequence[float], candidate_ms: Sequence[float]) -> bool:
        """Whether both windows are stable, or the most samples are there."""
        if len(candidate_ms) >= self.max_samples:
            return True
        sides = [side[-self.window_size :] for side in (baseline_ms, candidate_ms)]
        return len(candidate_ms) >= self.window_size and all(pstdev(s) <= self.max_cv_ratio * mean(s) for s in sides)


@runtime_checkable
class ProfilingStop(Protocol):
    """When larger batch sizes are not worth trying."""

    def is_enough(self, throughputs: Sequence[float]) -> bool:
        """Whether to stop, given the throughputs so far, in order of the batch sizes."""


@dataclass(frozen=True)
class ThroughputSaturatedProfilingStopStrategy:
    """When so many sizes in a row beyond the limit do not raise the throughput.

    Args:
        min_throughput_gain_ratio: Least gain over the best one so far, 0.05 for 5 %.
        throughput_backoff_limit: Sizes without it that are tolerated.

    Raises:
        InputError: A number is out of its range.
    """

    min_throughput_gain_ratio: float = 0.05
    throughput_backoff_limit: int = 2

    def __post_init__(self) -> None:
        _check_whole("throughput_backoff_limit", self.throughput_backoff_limit, 0)
        if not _is_number(self.min_throughput_gain_ratio) or not 0 <= self.min_throughput_gain_ratio < 1:
            raise InputError(
                "min_throughput_gain_ratio: expected a ratio from 0 to below 1, got "
                f"{self.min_throughput_gain_ratio!r}."
            )

    def is_enough(self, throughputs: Sequence[float]) -> bool:
        """Whether too many sizes in a row brought too little."""
        best, num_without = 0.0, 0
        for throughput in throughputs:
            is_gain = throughput * (1 - self.min_throughput_gain_ratio) >= best
            num_without = 0 if is_gain else num_without + 1
            best = max(best, throughput)
        return num_without > self.throughput_backoff_limit


@dataclass(frozen=True)
class AllSamplesProfilingStopStrategy:
    """Never: all batch sizes are measured."""

    def is_enough(self, throughputs: Sequence[float]) -> bool:
        """Always False."""
        return False


def check_strategy(name: str, value: object, kind: type) -> None:
    """Refuse what is no strategy, before anything is measured by it.

    Raises:
        InputError: It is none.
    """
    if isinstance(value, type) or not isinstance(value, kind):
        what = value.__name__ if isinstance(value, type) else repr(value)
        raise InputError(f"{name}: expected an instance of a strategy, got {what}.")


@dataclass(frozen=True)
class ProfilingConfig:
    """How candidates are timed.

    Args:
        batch_sizes: Which; None: those of the recording, and the graph's largest.
        measurement_stop_strategy: How often each.
        profiling_stop_strategy: When to go on to no larger one.

    Raises:
        InputError: A batch size is no whole number from 1 up, or there is none; or a strategy is none.
    """

    batch_sizes: Sequence[int] | None = None
    measurement_stop_strategy: MeasuringStop = field(default_factory=NumStepsMeasuringStopStrategy)
    profiling_stop_strategy: ProfilingStop = field(default_factory=ThroughputSaturatedProfilingStopStrategy)

    def __post_init__(self) -> None:
        check_strategy("measurement_stop_strategy", self.measurement_stop_strategy, MeasuringStop)
        check_strategy("profiling_stop_strategy", self.profiling_stop_strategy, ProfilingStop)
        if self.batch_sizes is None:
            return
        if not isinstance(self.batch_sizes, Iterable):
            raise InputError(f"batch_sizes: expected whole numbers, got {self.batch_sizes!r}.")
        object.__setattr__(self, "batch_sizes", tuple(self.batch_sizes))
        if not self.batch_sizes:
            raise InputError("batch_sizes: give at least one, or None for those of the recording.")
        for size in self.batch_sizes:
            _check_whole("batch_sizes", size, 1)


@dataclass(frozen=True)
class Timing:
    """One batch size.

    Attributes:
        batch_size: Samples in a call.
        baseline_ms: The plain module's times, in order.
        candidate_ms: The candidate's, each taken next to the plain module's of the same place.
        comparison: Whether the candidate is faster.
    """

    batch_size: int
    baseline_ms: list[float]
    candidate_ms: list[float]
    comparison: Comparison

    @property
    def baseline_p50_ms(self) -> float:
        """Median of the plain module's times."""
        return summarize(self.baseline_ms).p50

    @property
    def candidate_p50_ms(self) -> float:
        """Median of the candidate's times."""
        return summarize(self.candidate_ms).p50

    @property
    def throughput(self) -> float:
        """The candidate's, in samples a second."""
        return self.batch_size / max(self.candidate_p50_ms, _CLOCK_MS) * 1000

    @property
    def baseline_throughput(self) -> float:
        """The plain module's, in samples a second."""
        return self.batch_size / max(self.baseline_p50_ms, _CLOCK_MS) * 1000


@dataclass(frozen=True)
class Meter:
    """Times one call: on the device by its events, on a CPU by a clock."""

    device: torch.device
    clock: Clock = time.perf_counter_ns

    def time_ms(self, call: Callable[..., Any], arguments: Arguments) -> float:
        """Run once, alone on the device."""
        import torch

        args, kwargs = arguments
        if self.device.type == "cpu":
            start = self.clock()
            call(*args, **kwargs)
            return (self.clock() - start) / _NS_PER_MS
        torch.accelerator.synchronize(self.device)
        begin, end = timing_event(self.device), timing_event(self.device)
        begin.record()
        call(*args, **kwargs)
        end.record()
        torch.accelerator.synchronize(self.device)
        return float(begin.elapsed_time(end))


def measure_pairs(
    meter: Meter,
    baseline: Callable[..., Any],
    candidate: Callable[..., Any],
    sample: Sample,
    *,
    batch_size: int,
    stop: MeasuringStop,
    min_effect: float,
    changes_inputs: bool,
) -> Timing:
    """Time both sides in turns (AB BA AB ..) on the same arguments.

    Args:
        meter: Times one call.
        baseline: The plain module's forward.
        candidate: What may be faster.
        sample: The arguments.
        batch_size: How many samples they hold.
        stop: When it is enough.
        min_effect: Relative change below which the candidate does not count as faster.
        changes_inputs: The module writes to its arguments, so that each run gets new ones, made outside its time.
    """
    import torch

    times: tuple[list[float], list[float]] = ([], [])
    calls = (baseline, candidate)
    shared = sample.fresh()

    def run(side: int) -> float:
        return meter.time_ms(calls[side], sample.fresh() if changes_inputs else shared)

    with torch.no_grad():
        for _ in range(stop.warmup_samples):
            for side in (0, 1):
                run(side)
        while not stop.is_enough(*times):
            for side in (0, 1) if len(times[0]) % 2 == 0 else (1, 0):
                times[side].append(run(side))
    sides = [Samples(launches=[side]) for side in times]
    return Timing(batch_size, *times, compare_samples(*sides, interleaved=True, min_effect=min_effect))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name}: expected a whole number from {least} up, got {value!r}.")
