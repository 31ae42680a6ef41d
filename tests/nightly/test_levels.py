"""The verdict on series of levels: small versions of what tests/benchmarks/bench_nightly.py measures."""

import math

import numpy as np
import pytest
from night_series import NOISES, gaussian, judge_series, judge_step

from perfladder.nightly.changes import find_changes
from perfladder.nightly.levels import DOUBTFUL, QUIET, SLOWER, Past, judge_levels
from perfladder.nightly.model import Rules
from perfladder.nightly.score import level_of, robust_scale

RULES = Rules()


def past_of(levels, states=None, parts=None):
    levels = np.asarray(levels, float)
    zeros = np.zeros(len(levels), np.int64)
    return Past(levels, zeros if states is None else np.asarray(states), zeros if parts is None else np.asarray(parts))


def quiet(count=40, seed=0):
    return gaussian(np.random.default_rng(seed), count).levels


def test_scale_is_that_of_gaussian_values_and_a_wild_one_hardly_changes_it():
    values = np.random.default_rng(0).standard_normal(400)
    assert robust_scale(values) == pytest.approx(1, rel=0.1)
    assert robust_scale(np.append(values, [1e6] * 4)) == pytest.approx(robust_scale(values), rel=0.05)
    assert (robust_scale(values[:1]), robust_scale(np.zeros(9))) == (0.0, 0.0)


def test_noise_within_the_nights_is_the_least_that_nights_are_said_to_differ_by():
    assert level_of(np.zeros(20), np.zeros(20), 0.03).scale == 0.03


def test_nights_that_resemble_their_neighbours_count_for_less():
    series = NOISES["autocorrelated, wholly shared"](np.random.default_rng(3), 60).levels
    shuffled = np.random.default_rng(0).permutation(series)
    alike, mixed = (level_of(levels, levels - np.median(levels), 0.0) for levels in (series, shuffled))
    assert alike.correlation > mixed.correlation
    assert alike.error(3) > mixed.error(3)
    assert alike.freedom < mixed.freedom


def test_a_large_step_is_suspected_at_once_and_a_second_measurement_decides():
    past = past_of(quiet())
    assert judge_levels(past, 0.1, RULES).kind == "suspected"
    assert judge_levels(past, 0.1, RULES, second=0.1).kind == "regression"
    back = judge_levels(past, 0.1, RULES, second=0.0)
    assert (back.kind, back.window) == ("undecided", 1)
    assert judge_levels(past, 0.1, RULES, second=0.04).kind == "undecided", "less than half of it came back"


def test_more_nights_can_be_asked_for_before_an_alarm():
    rules = Rules(nights_to_confirm=2)
    assert judge_levels(past_of(quiet()), 0.1, rules, second=0.1).kind == "suspected"
    past = past_of([*quiet(), 0.1], [QUIET] * 40 + [DOUBTFUL])
    found = judge_levels(past, 0.1, rules, second=0.1)
    assert (found.kind, found.window) == ("regression", 2)


def test_one_wild_night_does_not_make_the_next_ones_suspicious():
    past = past_of([*quiet(), 0.3], [QUIET] * 40 + [DOUBTFUL])
    assert judge_levels(past, 0.005, RULES).kind == "ok"


def test_a_night_no_wilder_than_earlier_ones_is_not_suspected_alone():
    levels = quiet()
    levels[10] = 0.08
    assert judge_levels(past_of(levels), 0.1, RULES).kind == "ok"
    assert judge_levels(past_of(levels), 0.13, RULES).kind == "suspected"


def test_a_change_below_the_least_effect_is_none_however_quiet_the_nights():
    past = past_of(quiet() / 100)
    assert judge_levels(past, 0.009, RULES).kind == "ok"
    assert judge_levels(past, 0.011, RULES).kind == "suspected"


def test_a_regression_lasts_until_a_night_is_nearer_to_the_baseline():
    past = past_of([*quiet(), 0.1, 0.1], [QUIET] * 40 + [SLOWER] * 2)
    again = judge_levels(past, 0.09, RULES)
    assert (again.kind, again.is_new, again.window) == ("regression", False, 3)
    assert judge_levels(past, 0.0, RULES).kind == "ok"


def test_nights_of_a_regression_that_is_over_make_no_new_one():
    past = past_of([*quiet(), 0.1, 0.1, 0.0], [QUIET] * 40 + [SLOWER] * 2 + [QUIET])
    found = judge_levels(past, 0.012, RULES)
    assert found.kind == "ok"
    assert not {40, 41} & set(found.good)


def test_several_faster_nights_are_an_improvement_and_one_is_not():
    levels = quiet()
    assert judge_levels(past_of(levels), -0.2, RULES).kind == "ok"
    found = judge_levels(past_of([*levels, *[-0.2] * 4]), -0.2, RULES)
    assert (found.kind, found.window) == ("improvement", 5)
    assert found.shift == pytest.approx(-0.2, abs=0.01)


def test_after_an_improvement_the_old_level_is_slower():
    past = past_of([*quiet(), *(quiet(5) - 0.2)], parts=[0] * 40 + [1] * 5)
    assert judge_levels(past, 0.0, RULES).kind == "suspected"
    assert judge_levels(past, -0.2, RULES).kind == "ok"


def test_too_few_nights_give_no_verdict():
    assert judge_levels(past_of([]), 0.0, RULES).kind == "no_baseline_yet"
    assert judge_levels(past_of(quiet(9)), 5.0, RULES).kind == "no_baseline_yet"
    assert judge_levels(past_of(quiet(10)), 5.0, RULES).kind == "suspected"


def test_a_fixed_baseline_sees_the_drift_that_a_moving_one_follows():
    drift = quiet(200) + 3e-4 * np.arange(200)
    tonight = float(drift[-1])
    assert judge_levels(past_of(drift[:-1]), tonight, RULES).kind == "ok"
    assert judge_levels(past_of(drift[:-1]), tonight, RULES, fixed=drift[:10]).kind == "suspected"


@pytest.mark.parametrize("noise", ["gaussian", "outlier nights"])
def test_quiet_nights_raise_few_alarms(noise):
    told = [judge_series(NOISES[noise](np.random.default_rng([seed, 1]), 400), RULES) for seed in range(8)]
    nights, alarms = sum(one.nights for one in told), sum(one.alarms for one in told)
    assert nights > 3000
    # One in 1000 is the goal; 8 of 3120 would be very unlikely at that rate.
    assert alarms < 8
    assert sum(one.suspected for one in told) < 0.03 * nights


def test_a_step_of_three_standard_deviations_is_reported_within_three_nights():
    found = [judge_step(gaussian, RULES, history=60, step=0.03, seed=[seed, 2]) for seed in range(60)]
    assert sum(night is not None for night in found) >= 48


def test_changes_of_a_whole_series_are_found_where_they_are_and_wild_nights_are_none():
    levels = quiet(200, seed=5)
    levels[[20, 70, 150]] += 0.2
    assert find_changes(levels) == []
    levels[60:] += 0.05
    levels[140:] -= 0.03
    first, second = find_changes(levels)
    assert abs(first - 60) <= 1
    assert abs(second - 140) <= 2
    assert find_changes(levels[:5]) == []
    assert find_changes(np.full(50, math.log(7.0))) == []
