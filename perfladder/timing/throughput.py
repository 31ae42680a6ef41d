"""Throughput of every scenario, and the value of a sweep beyond which more is not worth it; pure functions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from pydantic import Field, JsonValue

from perfladder.models import Model
from perfladder.stats import Interval, Samples, Summary, bootstrap_interval
from perfladder.sweep import Sweep


class Throughput(Model):
    """One scenario: how long a call takes, and how many items that is a second."""

    scenario: str
    items_per_call: int
    latency_ms: Summary
    items_per_s: float = Field(description="Median over the runs.")
    items_per_s_interval: Interval


class Saturation(Model):
    """Where a sweep's throughput stops growing: nothing after `value` gives `min_gain` more than it does."""

    input: str
    values: list[JsonValue]
    scenarios: list[str] = Field(description="Scenario of each value, in the same order.")
    min_gain: float
    value: JsonValue = Field(default=None, description="The saturation point; None if it was not reached.")
    scenario: str | None = None
    gain_beyond: float | None = Field(
        default=None, description="Relative: the best later value over this one; without a point, the last step's."
    )
    gain_beyond_interval: Interval | None = None
    reason: str


def throughput_of(scenario: str, wall_ms: Samples, items_per_call: int) -> Throughput:
    """Throughput of one scenario, from the wall times of its calls."""
    items_per_s = items_per_call * 1000 / np.asarray(wall_ms.values)
    return Throughput(
        scenario=scenario,
        items_per_call=items_per_call,
        latency_ms=wall_ms.summary,
        items_per_s=float(np.median(items_per_s)),
        items_per_s_interval=bootstrap_interval(_median, items_per_s.tolist()),
    )


def saturation_of(sweep: Sweep, wall_ms: Mapping[str, Samples], items: Mapping[str, int]) -> Saturation:
    """Find the first value whose throughput no later value of the sweep exceeds by `min_gain`.

    Args:
        sweep: What was swept.
        wall_ms: Wall times of each scenario of the sweep, by its name.
        items: Items in a call of each scenario.
    """
    names = sweep.scenario_names
    rates = [items[name] * 1000 / np.asarray(wall_ms[name].values) for name in names]
    medians = [float(np.median(rate)) for rate in rates]
    base = {"input": sweep.input, "values": sweep.values, "scenarios": names, "min_gain": sweep.min_gain}
    for place in range(len(names) - 1):
        best = max(range(place + 1, len(names)), key=lambda later: medians[later])
        gain = medians[best] / medians[place] - 1
        if gain < sweep.min_gain:
            interval = _gain_interval(rates[best], rates[place])
            sure = "" if interval.high < sweep.min_gain else "; the samples leave room for more"
            reason = f"{names[best]!r} gives {gain:+.1%} throughput, below {sweep.min_gain:.0%}{sure}"
            return Saturation(
                **base,
                value=sweep.values[place],
                scenario=names[place],
                gain_beyond=gain,
                gain_beyond_interval=interval,
                reason=reason,
            )
    gain = medians[-1] / medians[-2] - 1
    reason = f"throughput still grew by {gain:.1%} from {names[-2]!r} to {names[-1]!r}: the sweep ends too early"
    return Saturation(
        **base, gain_beyond=gain, gain_beyond_interval=_gain_interval(rates[-1], rates[-2]), reason=reason
    )


def _gain_interval(later: np.ndarray, earlier: np.ndarray) -> Interval:
    return bootstrap_interval(lambda a, b: _median(a) / _median(b) - 1, later.tolist(), earlier.tolist())


def _median(values: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.median(values, axis=-1)
    return result
