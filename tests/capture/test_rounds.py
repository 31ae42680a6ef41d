"""Replays timed in turn, and what their rounds say; samples are scripted."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from perfladder.capturing.rounds import Timed, find_speed_change, judge_ratio, judge_rounds, time_rounds
from perfladder.capturing.yardstick import Yardstick
from perfladder.stats import Interval, interval_of_ratio

STEADY = [10.0, 10.1, 9.9, 10.05, 9.95]


def judge(warm_ms, pipeline_ms=(10.0, 10.1, 9.9, 10.0, 10.05), evicted_ms=None):
    return judge_rounds(Timed([list(warm_ms)], None if evicted_ms is None else [list(evicted_ms)]), [list(pipeline_ms)])


def spread(level_ms, count=20, noise=0.01, seed=0):
    return (level_ms * (1 + noise * np.random.default_rng(seed).standard_normal(count))).tolist()


def test_calls_are_timed_in_turn_warm_and_evicted_alike():
    order = []

    def time_once(call, evictor):
        order.append((call, evictor))
        return float(len(order))

    timed = time_rounds(["a", "b"], 2, time_once, "evictor")
    turn, evicted = [("a", None), ("b", None)], [("a", "evictor"), ("b", "evictor")]
    assert order == [*turn * 3, *turn, *evicted, ("b", None), *turn, *evicted]
    assert timed.warm == [[7.0, 12.0], [8.0, 13.0]]
    assert timed.evicted == [[9.0, 14.0], [10.0, 15.0]]
    assert (timed.warm_rounds, timed.evicted_rounds) == ([15.0, 25.0], [19.0, 29.0])


def test_without_an_evictor_there_are_warm_rounds_only():
    clock = itertools.count()
    timed = time_rounds(["a"], 3, lambda call, evictor: float(next(clock)))
    assert (timed.warm, timed.evicted, timed.evicted_rounds) == ([[3.0, 4.0, 5.0]], None, None)


def test_machine_that_slows_down_for_a_while_slows_all_calls_alike():
    """Each call sees the same share of the slow time, which in a row would have been the first call's alone."""
    slow = iter([1.0] * 6 + [1.5] * 4 + [1.0] * 100)
    timed = time_rounds(["a", "b"], 10, lambda call, evictor: 10.0 * next(slow))
    assert [np.mean(samples) for samples in timed.warm] == [11.0, 11.0]


def test_same_speed_is_faithful_and_another_one_is_not():
    same, slower = judge(spread(10.0)), judge(spread(12.0))
    assert (same.is_faithful, same.speed_change, same.caches) == (True, None, "warm")
    assert slower.is_faithful is False
    assert slower.ratio == pytest.approx(1.2, rel=0.02)
    assert slower.interval.low > 1.05


def test_interval_on_both_sides_is_undecided():
    verdict = judge(spread(10.7, noise=0.02), pipeline_ms=[9.0, 10.0, 11.5, 10.2, 9.9])
    assert (verdict.is_faithful, verdict.speed_change) == (None, None)


def test_nearer_side_counts():
    verdict = judge(spread(7.0), evicted_ms=spread(10.1, seed=1))
    assert (verdict.caches, verdict.is_faithful) == ("evicted", True)
    assert verdict.warm_ratio == pytest.approx(0.7, rel=0.02)
    assert verdict.evicted_ratio == pytest.approx(verdict.ratio)


def test_a_time_between_warm_and_emptied_caches_decides_nothing():
    verdict = judge(spread(8.0), evicted_ms=spread(11.5, seed=1))
    assert (verdict.caches, verdict.is_faithful, verdict.speed_change) == ("evicted", None, None)
    assert judge(spread(8.0), evicted_ms=spread(9.0, seed=1)).is_faithful is False


@pytest.mark.parametrize(
    "levels",
    [[28.0] * 8 + [44.0] * 12, [44.0] * 6 + [28.0] * 8 + [44.0] * 6, [28.0] * 15 + [44.0] * 5],
    ids=["once", "there and back", "late"],
)
def test_two_levels_that_last_leave_the_time_undecided(levels):
    rounds = [level * noise for level, noise in zip(levels, spread(1.0), strict=True)]
    verdict = judge(rounds, pipeline_ms=[28.0, 28.1, 27.9, 28.2, 28.0])
    assert verdict.is_faithful is None
    assert verdict.speed_change.startswith("The machine's own speed changed during the replay")
    assert "apart" in verdict.speed_change


def test_change_in_the_evicted_rounds_counts_too():
    verdict = judge(spread(10.0), evicted_ms=[12.0] * 10 + [18.0] * 10)
    assert (verdict.caches, verdict.is_faithful) == ("warm", None)


def test_slow_half_is_a_change_without_two_clear_levels():
    rounds = [value * (1 + 0.012 * index) for index, value in enumerate(spread(10.0))]
    assert "first and its second half" in find_speed_change(rounds)


@pytest.mark.parametrize(
    "rounds",
    [
        spread(10.0, noise=0.03),
        [10.0, 14.0] * 10,
        [*spread(10.0, count=18), 25.0, 30.0],
        [10.0] * 20,
        [10.0, 20.0],
        [0.0] * 20,
    ],
    ids=["noise", "levels that alternate", "two outliers", "equal", "too few", "no time"],
)
def test_what_is_no_change_of_speed(rounds):
    assert find_speed_change(rounds) is None


def test_independent_noise_is_seldom_called_a_change():
    found = [find_speed_change(spread(10.0, noise=0.05, seed=seed)) for seed in range(200)]
    assert sum(change is not None for change in found) <= 10


def test_ratio_of_unlike_lengths_holds_one_as_often_as_it_says():
    """A/A, 20 against 5: at most twice the 5 % that an interval may miss."""
    missed = 0
    for seed in range(300):
        interval = interval_of_ratio(spread(10.0, seed=seed), spread(10.0, count=5, seed=1000 + seed))
        missed += not interval.low <= 1 <= interval.high
    assert missed <= 30


def test_neighbours_that_resemble_each_other_widen_the_interval():
    noise = spread(10.0, noise=0.05, seed=4)
    in_a_row = sorted(noise)
    apart, alike = interval_of_ratio(noise, STEADY), interval_of_ratio(in_a_row, STEADY)
    assert alike.high / alike.low > apart.high / apart.low


def test_single_sample_has_an_interval_of_its_own_width():
    interval = interval_of_ratio([11.0], [10.0])
    assert (interval.low, interval.high) == (pytest.approx(1.1), pytest.approx(1.1))


@pytest.mark.parametrize(
    ("ratio", "low", "high", "is_faithful"),
    [
        (1.04, 0.96, 1.08, True),
        (1.04, 0.89, 1.08, None),
        (1.0, 0.5, 2.0, None),
        (1.07, 0.96, 1.09, None),
        (1.3, 1.0, 2.0, None),
        (1.3, 1.06, 2.0, False),
        (0.7, 0.6, 0.94, False),
    ],
)
def test_a_ratio_near_one_is_faithful_if_its_interval_is_narrow_too(ratio, low, high, is_faithful):
    assert judge_ratio(ratio, Interval(low=low, high=high)) is is_faithful


# The host's own speed


def judge_beside(warm_ms, here_ms, there_ms=1.0):
    """A replay of calls of 10 ms, with a yardstick on both sides."""
    timed = Timed([list(warm_ms)], None, spread(here_ms, seed=2))
    return judge_rounds(timed, [[10.0, 10.1, 9.9, 10.0, 10.05]], spread(there_ms, count=5, seed=3))


@pytest.mark.parametrize(("replayed_ms", "here_ms"), [(7.0, 0.7), (7.0, 0.5), (14.0, 1.4), (14.0, 1.7)])
def test_a_host_that_is_not_as_fast_leaves_the_time_undecided(replayed_ms, here_ms):
    """All of the call, or a part of it, may follow the host's speed."""
    verdict = judge_beside(spread(replayed_ms), here_ms)
    assert verdict.is_faithful is None
    assert verdict.host_ratio == pytest.approx(here_ms, rel=0.02)
    assert f"takes {verdict.host_ratio:.2f} times as long" in verdict.speed_change


@pytest.mark.parametrize(
    ("replayed_ms", "here_ms"),
    [
        pytest.param(7.0, 1.0, id="as-fast"),
        pytest.param(7.0, 0.97, id="nearly-as-fast"),
        pytest.param(7.0, 0.9, id="faster-by-too-little"),
        pytest.param(7.0, 1.4, id="the-other-way"),
        pytest.param(14.0, 0.7, id="the-other-way-round"),
    ],
)
def test_what_the_hosts_speed_does_not_explain_is_not_faithful(replayed_ms, here_ms):
    verdict = judge_beside(spread(replayed_ms), here_ms)
    assert (verdict.is_faithful, verdict.speed_change) == (False, None)


def test_a_call_that_takes_as_long_needs_no_explanation():
    """The device sets its pace, so that the host's speed is nothing to it."""
    verdict = judge_beside(spread(10.0), 1.5)
    assert (verdict.is_faithful, verdict.speed_change) == (True, None)
    assert verdict.host_ratio == pytest.approx(1.5, rel=0.02)


def test_without_a_yardstick_on_both_sides_nothing_is_said_of_the_host():
    assert judge(spread(7.0)).host_ratio is None


def test_the_yardstick_is_timed_before_each_round():
    order = []

    class Scripted:
        def time_ms(self):
            order.append("yardstick")
            return 2.0

    timed = time_rounds(["a"], 2, lambda call, evictor: order.append(call) or 1.0, None, Scripted())
    assert order == ["a"] * 3 + ["yardstick", "a"] * 2
    assert timed.yardstick == [2.0, 2.0]


class Operators(TorchDispatchMode):
    """Counts what is dispatched, by operator and device."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func), args[0].device.type] += 1
        return func(*args, **(kwargs or {}))


def test_the_yardstick_is_the_same_work_of_the_host_each_time():
    with torch.device("meta"):  # a default of the user's
        yardstick = Yardstick()
    yardstick.time_ms()
    seen = []
    for _ in range(2):
        with Operators() as operators:
            assert yardstick.time_ms() > 0
        seen.append(operators.counts)
    assert seen[0] == seen[1]
    assert list(seen[0]) == [("aten.add_.Tensor", "cpu")]


@pytest.mark.parametrize(("call_ms", "is_faithful"), [(0.09, None), (0.11, True)])
def test_of_very_short_calls_nothing_is_said(call_ms, is_faithful):
    values = [call_ms] * 10
    verdict = judge_rounds(Timed([values, values]), [values, values])
    assert verdict.is_faithful is is_faithful
    assert (verdict.too_short or "").startswith("A call takes 90 us" if is_faithful is None else "")
    assert (verdict.too_short is None) is (is_faithful is True)
