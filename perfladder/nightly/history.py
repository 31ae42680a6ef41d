"""The nights that tonight is compared with: of the same work and machine, second measurements folded in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import numpy as np

from perfladder.comparing.differences import list_differences
from perfladder.comparing.model import Difference
from perfladder.errors import InputError
from perfladder.nightly.levels import DOUBTFUL, LEAST_SCALE, QUIET, SLOWER, Past
from perfladder.nightly.model import Night
from perfladder.nightly.score import robust_scale

_STATES: Final = {"suspected": DOUBTFUL, "undecided": DOUBTFUL, "regression": SLOWER}
_MEDIAN_ERROR: Final = 1.2533
"""Standard error of a median over that of a mean, for Gaussian values: the square root of pi / 2."""


@dataclass(frozen=True)
class History:
    """The comparable nights before tonight, the oldest first.

    Attributes:
        nights: First measurements of nights whose machine was in its usual state.
        seconds: Second measurements, by the run id that they repeat.
        past: The same nights as numbers.
        left_out: Why the last night of another machine or other work does not count; empty where all count.
        usual: Warnings on the machine's state that most nights carry.
    """

    nights: Sequence[Night]
    seconds: dict[str, Night]
    past: Past
    left_out: list[Difference]
    usual: frozenset[str]

    def level(self, night: Night) -> float:
        """Logarithm of a night's level, the mean of both measurements where there are two."""
        return level_of_night(night, self.seconds.get(night.run_id))

    def unusual(self, night: Night) -> list[str]:
        """Warnings on the machine's state that a night carries and most others do not."""
        return [code for code in night.disturbances if code not in self.usual]


def history_before(tonight: Night, nights: Sequence[Night]) -> History:
    """Choose and fold the nights that tonight can be compared with.

    Args:
        tonight: The first measurement of this night.
        nights: All that is known of the workload, in order of time; what is not before tonight is left out.
    """
    before = [night for night in nights if night.started_at < tonight.started_at and night.run_id != tonight.run_id]
    firsts = [night for night in before if night.second_of is None]
    comparable = [night for night in firsts if not differences_of(night, tonight)]
    usual = _usual(comparable)
    kept = [night for night in comparable if set(night.disturbances) <= usual or night.is_accepted]
    seconds = {night.second_of: night for night in before if night.second_of is not None}
    levels = np.array([level_of_night(night, seconds.get(night.run_id)) for night in kept])
    states, parts = _states_and_parts(kept)
    is_split = bool(firsts) and (not comparable or firsts[-1] is not comparable[-1])
    return History(
        nights=kept,
        seconds=seconds,
        past=Past(levels, states, parts, least_scale=_launch_noise([*kept, tonight])),
        left_out=differences_of(firsts[-1], tonight) if is_split else [],
        usual=usual,
    )


def fixed_levels(tonight: Night, baseline: Sequence[Night]) -> np.ndarray | None:
    """Levels of the nights that were named as the baseline; None where none was.

    Raises:
        InputError: One is of other work or another machine.
    """
    for night in baseline:
        if found := differences_of(night, tonight):
            named = "; ".join(f"{d.field} is {d.baseline!r} there and {d.candidate!r} tonight" for d in found[:4])
            raise InputError(
                f"--baseline: run {night.run_id} of {night.workload} cannot be compared with tonight's: {named}. Name "
                "a run of the same work on the same hardware."
            )
    return np.array([math.log(night.value) for night in baseline]) if baseline else None


def level_of_night(night: Night, second: Night | None) -> float:
    """Logarithm of the level, the mean of both measurements where there are two."""
    return fmean(math.log(one.value) for one in (night, second) if one is not None)


def differences_of(night: Night, tonight: Night) -> list[Difference]:
    """Why two nights have no common level: other work, another metric, other hardware."""
    sides = [{"work": one.work, "metric": one.metric, "machine": one.machine} for one in (night, tonight)]
    return list_differences(sides[0], sides[1])


def _usual(nights: Sequence[Night]) -> frozenset[str]:
    counts: dict[str, int] = {}
    for night in nights:
        for code in night.disturbances:
            counts[code] = counts.get(code, 0) + 1
    return frozenset(code for code, count in counts.items() if 2 * count > len(nights))


def _states_and_parts(nights: Sequence[Night]) -> tuple[np.ndarray, np.ndarray]:
    """What each night was by the verdicts of that time, later ones over earlier ones."""
    count = len(nights)
    states, parts = np.full(count, QUIET, np.int8), np.zeros(count, np.int64)
    places = {night.run_id: place for place, night in enumerate(nights)}
    for place, night in enumerate(nights):
        first = min(place, places.get(night.changed_at or "", place))
        states[place] = _STATES.get(night.verdict or "ok", QUIET)
        if night.verdict == "regression":
            states[first:place] = SLOWER
        if night.is_accepted or night.verdict == "improvement":
            states[first : place + 1] = QUIET
            parts[first:] = parts[place] + 1
    return states, parts


def _launch_noise(nights: Sequence[Night]) -> float:
    """What launches of the same night and code tell of the least noise that a night's median can have."""
    found = [
        _MEDIAN_ERROR * robust_scale(np.log(night.launches)) / math.sqrt(len(night.launches))
        for night in nights[-60:]
        if len(night.launches) > 2
    ]
    return max(LEAST_SCALE, float(np.median(found)) if found else 0.0)
