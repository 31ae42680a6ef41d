"""The verdict on a series of levels, one a night: which nights are the baseline, and whether the last ones left it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from perfladder.nightly.model import Rules, VerdictKind
from perfladder.nightly.score import MAX_WINDOW, Level, Score, faster_window, is_confirmed, level_of, slower_window

QUIET: Final = 0
DOUBTFUL: Final = 1
SLOWER: Final = 2
"""What the past nights were: good; suspected, but not for certain; or slower for certain."""

_MEMORY: Final = 120
_LEAST_AFTER_CHANGE: Final = 2
"""Nights that a new level needs, where the noise is known from before."""

LEAST_SCALE: Final = 5e-4
"""Nights are never taken for more alike than this, 0.05 %."""


@dataclass(frozen=True)
class Past:
    """The nights before tonight on this machine, the oldest first.

    Attributes:
        levels: Natural logarithms of the metric.
        states: `QUIET`, `DOUBTFUL` or `SLOWER` for each.
        parts: A number for each, which rises where a new level was accepted or found to be faster.
        least_scale: What launches of one night differ by, as far as it remains in their median.
    """

    levels: np.ndarray
    states: np.ndarray
    parts: np.ndarray
    least_scale: float = LEAST_SCALE


@dataclass(frozen=True)
class Judged:
    """The verdict in numbers.

    Attributes:
        kind: The verdict.
        level: The baseline; None where there is none yet.
        good: Places of the baseline's nights in the past.
        window: Nights that the verdict looks at together, tonight's the last.
        shift: How far they lie from the baseline.
        is_new: Whether the regression was not there before tonight.
    """

    kind: VerdictKind
    level: Level | None = None
    good: tuple[int, ...] = ()
    window: int = 1
    shift: float = 0.0
    is_new: bool = True


def judge_levels(
    past: Past, tonight: float, rules: Rules, *, second: float | None = None, fixed: np.ndarray | None = None
) -> Judged:
    """Judge tonight's level.

    Args:
        past: The nights before.
        tonight: Tonight's level.
        rules: When nights count as different.
        second: Tonight's level as measured again.
        fixed: Levels of nights that were named as the baseline, in place of the last good ones.

    Returns:
        `suspected` where a second measurement is needed, or was taken and more nights are; with one that does not
        agree, `undecided`.
    """
    count = len(past.levels)
    since = _slower_since(past)
    own = int(np.count_nonzero(past.parts == past.parts[-1])) if count else 0
    is_first = count == 0 or past.parts[-1] == past.parts[0]
    least = rules.min_nights if is_first else _LEAST_AFTER_CHANGE
    window = (
        min(MAX_WINDOW, max(1, own - least + 1), _nights_after_slower(past)) if since is None else count - since + 1
    )
    good = _good_nights(past, count - window + 1, own)
    residuals = _residuals(past, count - window + 1, rules)
    if len(residuals) < rules.min_nights or (fixed is None and len(good) < least):
        return Judged("no_baseline_yet")
    chosen = good[-rules.last_good :]
    level = level_of(past.levels[chosen] if fixed is None else fixed, residuals, past.least_scale)
    places = tuple(int(place) for place in chosen) if fixed is None else ()
    nights = np.append(past.levels[count - window + 1 :], tonight)
    if since is not None:
        return _judge_again(level, places, nights)
    return _judge_new(past, level, places, nights, rules, second, count - window + 1)


def _judge_new(
    past: Past, level: Level, good: tuple[int, ...], nights: np.ndarray, rules: Rules, second: float | None, before: int
) -> Judged:
    wildest = _wildest(past, before)
    score = slower_window(level, nights, wildest=wildest, least_window=rules.nights_to_confirm)
    if score is None and rules.nights_to_confirm > 1:
        score = slower_window(level, nights, wildest=wildest)
    if score is None or score.shift < rules.min_effect:
        faster = faster_window(level, nights)
        if faster is not None and -faster.shift >= rules.min_effect:
            return Judged("improvement", level, good, faster.window, faster.shift)
        return Judged("ok", level, good, 1, float(nights[-1]) - level.level)
    changed = _changed_nights(level, score, nights)
    shift = float(np.median(changed)) - level.level
    return Judged(_kind_of(level, score, len(changed), rules, second), level, good, len(changed), shift)


def _kind_of(level: Level, score: Score, num_changed: int, rules: Rules, second: float | None) -> VerdictKind:
    if second is None:
        return "suspected"
    if not is_confirmed(level, score, second):
        return "undecided"
    return "regression" if num_changed >= rules.nights_to_confirm else "suspected"


def _changed_nights(level: Level, score: Score, nights: np.ndarray) -> np.ndarray:
    """The nights of the window without those at its beginning that are nearer to the baseline."""
    window = nights[-score.window :]
    is_changed = window - level.level >= score.shift / 2
    return window[int(np.argmax(is_changed)) :]


def _judge_again(level: Level, good: tuple[int, ...], nights: np.ndarray) -> Judged:
    """After a regression: tonight belongs to the level that is nearer."""
    shift = float(np.median(nights[:-1])) - level.level
    own = float(nights[-1]) - level.level
    if own < shift / 2:
        return Judged("ok", level, good, 1, own)
    return Judged("regression", level, good, len(nights), float(np.median(nights)) - level.level, is_new=False)


def _slower_since(past: Past) -> int | None:
    """Where the regression that last night was part of begins; None if it was part of none."""
    count = len(past.levels)
    if not count or past.states[-1] != SLOWER:
        return None
    others = np.flatnonzero((past.states != SLOWER) | (past.parts != past.parts[-1]))
    return int(others[-1]) + 1 if len(others) else 0


def _nights_after_slower(past: Past) -> int:
    """How many nights may be looked at together: those of a regression that is over do not make a new one."""
    slower = np.flatnonzero(past.states == SLOWER)
    return len(past.levels) - int(slower[-1]) if len(slower) else MAX_WINDOW


def _good_nights(past: Past, before: int, own: int) -> np.ndarray:
    """Places of the good nights of the last part, before a place."""
    places = np.flatnonzero(past.states[:before] == QUIET)
    return places[places >= len(past.levels) - own]


def _residuals(past: Past, before: int, rules: Rules) -> np.ndarray:
    """How far good nights lie from the middle of the last ones of their own part."""
    places = np.flatnonzero(past.states[:before] == QUIET)[-rules.noise_nights :]
    levels, parts = past.levels[places], past.parts[places]
    if not len(places) or parts[0] == parts[-1]:
        return levels - np.median(levels[-rules.last_good :]) if len(places) else levels
    found = [levels[parts == part] - np.median(levels[parts == part]) for part in np.unique(parts)]
    return np.concatenate(found)


def _wildest(past: Past, before: int) -> float:
    """How far above their middle the nights lay that were not slower for certain; 0 where there are none."""
    remembered = slice(max(0, before - _MEMORY), before)
    is_told = (past.states[remembered] != SLOWER) & (past.parts[remembered] == past.parts[-1])
    levels = past.levels[remembered][is_told]
    return float(levels.max() - np.median(levels)) if len(levels) else 0.0
