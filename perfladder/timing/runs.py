"""Runs of a loaded target: bare, or with its stages observed, in turn."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from perfladder.instrument import Instrumentation, Site, instrument
from perfladder.stats import Interval, Samples, bootstrap_interval, compare_samples, typical_ratio
from perfladder.target import LoadedTarget
from perfladder.timing.memory import allocated_bytes, resident_bytes
from perfladder.timing.timer import Clock, RunTiming, StageTimer, timing_event
from perfladder.user_code import RunOutput

_PAIRS = 10
_MIN_PAIRS = 3
_PAIRS_BUDGET_MS = 20_000
"""Bare runs in turn with the observed ones, to see what observing costs: 10, or fewer where runs are long."""


@dataclass
class Runs:
    """Measured runs of one scenario, and the bare ones between them."""

    timings: list[RunTiming] = field(default_factory=list)
    pairs_ms: list[tuple[float, float]] = field(default_factory=list)
    output: RunOutput = field(default_factory=lambda: RunOutput(None))
    states: list[Instrumentation] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)
    allocated_bytes: list[int] = field(default_factory=list)

    @property
    def state(self) -> Instrumentation:
        """The observation of all runs in one."""
        lost = list(dict.fromkeys(path for state in self.states for path in state.lost))
        return replace(self.states[-1], lost=lost, num_cut_off=sum(state.num_cut_off for state in self.states))


def bare_run(
    loaded: LoadedTarget, scenario: str | None, clock: Clock, *, is_observed: bool = False
) -> tuple[RunTiming, RunOutput]:
    """One run with its wall time, device included; its spans are with whoever observes it."""
    loaded.prepare_run(scenario)
    origin = timing_event(loaded.device) if is_observed and loaded.device.type != "cpu" else None
    if origin is not None:
        # The device has nothing to do, so that it reaches this at once.
        origin.record()
    start = clock()
    output = loaded.run(scenario, clock=clock)
    loaded.synchronize()
    return RunTiming(start, clock(), [], output.item_end_ns, origin), output


def number_of_pairs(run_ms: float) -> int:
    """How many bare runs to take in turn with observed ones, for runs that take this long."""
    affordable = _PAIRS_BUDGET_MS / run_ms if run_ms > 0 else _PAIRS
    return int(min(_PAIRS, max(_MIN_PAIRS, affordable)))


def timed_runs(
    loaded: LoadedTarget, sites: list[Site], scenario: str | None, clock: Clock, count: int, num_pairs: int
) -> Runs:
    """Measured runs with the stages observed; the first ones in turn with bare ones, in the order AB BA AB .."""
    timer = StageTimer(clock, loaded.device)
    runs = Runs()

    def bare() -> float:
        timing, runs.output = bare_run(loaded, scenario, clock)
        return timing.wall_ms

    def observed() -> float:
        with instrument(sites, timer) as state:
            timing, runs.output = bare_run(loaded, scenario, clock, is_observed=True)
        timing.calls = timer.take()
        runs.timings.append(timing)
        runs.states.append(state)
        return timing.wall_ms

    for index in range(count):
        if index >= num_pairs:
            observed()
        elif index % 2:
            observed_ms = observed()
            runs.pairs_ms.append((observed_ms, bare()))
        else:
            bare_ms = bare()
            runs.pairs_ms.append((observed(), bare_ms))
        runs.resident_bytes.append(resident_bytes())
        allocated = allocated_bytes(loaded)
        if allocated is not None:
            runs.allocated_bytes.append(allocated)
    return runs


def overhead_of(pairs_ms: list[tuple[float, float]]) -> tuple[float | None, Interval | None]:
    """Observed over bare, from interleaved pairs; the interval is that of `compare_samples` from ten pairs on."""
    if not pairs_ms or min(min(pair) for pair in pairs_ms) <= 0:
        return None, None
    observed_ms, bare_ms = (list(side) for side in zip(*pairs_ms, strict=True))
    sides = (Samples(launches=[side]) for side in (observed_ms, bare_ms))
    comparison = compare_samples(*sides, interleaved=True)
    interval = comparison.interval or bootstrap_interval(typical_ratio, observed_ms, bare_ms, paired=True)
    return comparison.speedup, interval
