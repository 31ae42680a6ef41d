"""The verdict on a workload's night: from its history, tonight's measurement, and a second one where it is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from perfladder.comparing.differences import list_differences
from perfladder.comparing.model import Difference
from perfladder.nightly.history import History, fixed_levels, history_before
from perfladder.nightly.levels import Judged, judge_levels
from perfladder.nightly.model import CommitRange, Moved, Night, NightVerdict, Rules
from perfladder.nightly.moved import moved_parts
from perfladder.nightly.score import SUSPECT, student_limit
from perfladder.nightly.words import next_step, reason_of
from perfladder.stats import Interval

_CHANGED: Final = ("suspected", "regression", "improvement", "undecided")
_MAX_CAUSES: Final = 12


def judge_night(
    tonight: Night,
    nights: Sequence[Night],
    rules: Rules,
    *,
    second: Night | None = None,
    baseline: Sequence[Night] = (),
) -> NightVerdict:
    """Judge one night of a workload; nothing is measured, and the same nights always give the same verdict.

    Args:
        tonight: The first measurement of this night.
        nights: All that is known of the workload.
        rules: When nights count as different.
        second: The second measurement of this night, where it was taken.
        baseline: Nights that were named as the baseline, in place of the last good ones.

    Returns:
        `suspected` where a second measurement is needed; a regression is told only after one.

    Raises:
        InputError: A named baseline is of other work or another machine.
    """
    history = history_before(tonight, nights)
    fixed = fixed_levels(tonight, baseline)
    judged = judge_levels(
        history.past,
        math.log(tonight.value),
        rules,
        second=None if second is None else math.log(second.value),
        fixed=fixed,
    )
    disturbances = _disturbances(history, tonight, second, judged)
    if disturbances and judged.kind == "regression" and judged.is_new:
        judged = Judged("undecided", judged.level, judged.good, judged.window, judged.shift)
    if judged.level is None:
        return _without_baseline(tonight, second, history, rules)
    return _verdict(tonight, second, history, judged, list(baseline), disturbances, rules)


def _disturbances(history: History, tonight: Night, second: Night | None, judged: Judged) -> list[str]:
    """What disturbed the machine in the measurement that decides: the last one, for the first led to it."""
    if judged.window > 1 and second is None:
        return []
    return history.unusual(tonight if second is None else second)


def _without_baseline(tonight: Night, second: Night | None, history: History, rules: Rules) -> NightVerdict:
    count = sum(1 for night in history.nights if night.verdict not in _CHANGED)
    told = f"{count} of the {rules.min_nights} good nights that a verdict needs are there."
    if history.left_out:
        fields = ", ".join(difference.field for difference in history.left_out[:4])
        told += f" Nights before do not count, for these are not the same: {fields}."
    return NightVerdict(
        workload=tonight.workload,
        run_id=tonight.run_id,
        kind="no_baseline_yet",
        reason=told,
        metric=tonight.metric,
        unit=tonight.unit,
        value=tonight.value,
        second_value=None if second is None else second.value,
        num_baseline_nights=count,
        disturbances=history.unusual(tonight),
        split_because=history.left_out,
    )


def _verdict(
    tonight: Night,
    second: Night | None,
    history: History,
    judged: Judged,
    baseline: list[Night],
    disturbances: list[str],
    rules: Rules,
) -> NightVerdict:
    level = judged.level
    assert level is not None, "it is looked at before"
    before = baseline or [history.nights[place] for place in judged.good]
    changed = [*history.nights[len(history.nights) - judged.window + 1 :], tonight]
    is_changed = judged.kind in _CHANGED
    reach = student_limit(0.025, level.freedom) * level.error(judged.window)
    commits = _commits(history, judged, before, tonight) if is_changed else None
    verdict = NightVerdict(
        workload=tonight.workload,
        run_id=tonight.run_id,
        kind=judged.kind,
        reason="",
        is_new=judged.is_new,
        metric=tonight.metric,
        unit=tonight.unit,
        value=tonight.value,
        second_value=None if second is None else second.value,
        baseline=math.exp(level.level),
        num_baseline_nights=level.count,
        ratio=math.exp(judged.shift),
        interval=Interval(low=math.exp(judged.shift - reach), high=math.exp(judged.shift + reach)),
        noise=math.expm1(level.scale),
        detectable=math.expm1(student_limit(SUSPECT, level.freedom) * level.error(1)),
        window=judged.window,
        commits=commits,
        causes=_causes(before, changed)[:_MAX_CAUSES] if is_changed else [],
        moved=_moved(before, changed, history, second, rules) if is_changed else [],
        disturbances=disturbances,
        split_because=history.left_out,
    )
    return verdict.model_copy(update={"reason": reason_of(verdict), "next_step": next_step(verdict)})


def _commits(history: History, judged: Judged, before: list[Night], tonight: Night) -> CommitRange | None:
    """From the last night before the change to its first one."""
    place = len(history.nights) - judged.window + 1
    first = history.nights[place] if place < len(history.nights) else tonight
    # The baseline's own nights end before the window; a night between them was no part of the change.
    earlier = [night for night in history.nights[:place] if night.verdict != "regression"] or before
    last = earlier[-1]
    return CommitRange(
        last_good=last.commit,
        first_changed=first.commit,
        last_good_run=last.run_id,
        first_changed_run=first.run_id,
        first_changed_at=first.started_at,
        is_dirty=last.is_dirty or first.is_dirty,
    )


def _causes(before: list[Night], changed: list[Night]) -> list[Difference]:
    return list_differences(before[-1].software, changed[0].software)


def _moved(
    before: list[Night], changed: list[Night], history: History, second: Night | None, rules: Rules
) -> list[Moved]:
    seconds = [history.seconds[night.run_id] for night in changed if night.run_id in history.seconds]
    after = [*changed, *seconds, *([second] if second is not None else [])]
    return moved_parts(before, after, rules.min_effect)
