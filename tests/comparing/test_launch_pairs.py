"""Sides that took turns in several pairs of processes: a pair of processes counts once, however many runs it made."""

import math
import random

import pytest
from scipy import stats

from perfladder.comparing.judge import Judge
from perfladder.errors import InputError
from perfladder.launch_pairs import compare_launch_pairs, launch_noise_floor
from perfladder.stats import Samples

RUNS = 10


def side(paces, seed, noise=0.01):
    """One launch for each pace, of runs of about 10 ms times it."""
    generator = random.Random(seed)
    return Samples(
        launches=[[10 * pace * (1 + noise * generator.uniform(-1, 1)) for _ in range(RUNS)] for pace in paces]
    )


def test_the_interval_is_students_over_the_pairs_of_launches():
    ratios = [1.06, 1.10, 1.08, 1.12]
    found = compare_launch_pairs(side(ratios, 0, noise=0), side([1.0] * 4, 1, noise=0))
    logs = [math.log(ratio) for ratio in ratios]
    expected = stats.t.interval(0.95, 3, loc=sum(logs) / 4, scale=stats.sem(logs))
    assert found.speedup == pytest.approx(math.exp(sum(logs) / 4))
    assert (found.interval.low, found.interval.high) == pytest.approx(tuple(map(math.exp, expected)))
    assert (found.unit, found.num_baseline, found.verdict) == ("launch_pairs", 4, "faster")


def test_processes_that_differ_are_not_taken_for_a_change_though_each_pair_is_certain():
    """Within each pair of processes the intervals exclude 1; from pair to pair they point both ways."""
    paces = [1.1, 0.9, 1.08, 0.93, 1.12, 0.95]
    found = compare_launch_pairs(side(paces, 0), side([1.0] * 6, 1))
    assert found.verdict == "no_difference"
    assert (
        Judge(interleaved=True, min_effect=0.0).change("x", side(paces, 0), side([1.0] * 6, 1)).verdict == "undecided"
    )


def test_a_change_larger_than_what_processes_differ_by_is_found():
    paces = [1.21, 1.19, 1.22, 1.18, 1.2, 1.2]
    found = compare_launch_pairs(side(paces, 0), side([1.0] * 6, 1), min_effect=0.02)
    assert (found.verdict, found.interval.low > 1.15) == ("faster", True)


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_pairs_of_processes_are_undecided_and_say_why(count):
    found = compare_launch_pairs(side([2.0] * count, 0), side([1.0] * count, 1))
    assert (found.verdict, found.interval) == ("undecided", None)
    assert found.speedup == pytest.approx(2, rel=0.02)
    assert "needs at least 3" in found.reason


def test_noise_of_the_same_code_is_how_far_it_is_from_itself_or_could_be():
    one, other = side([1.0, 1.02, 0.98, 1.01], 0), side([1.0] * 4, 1)
    floor = launch_noise_floor(one, other)
    found = compare_launch_pairs(one, other)
    assert floor == pytest.approx(found.interval.high / found.speedup - 1)
    apart = launch_noise_floor(side([1.1, 1.1, 1.1], 0), side([1.0] * 3, 1))
    assert apart == pytest.approx(0.1, rel=0.1), "one of them is favoured"
    with pytest.raises(InputError, match="noise cannot be told"):
        launch_noise_floor(side([1.0], 0), side([1.0], 1))


def test_a_change_within_the_noise_floor_is_undecided():
    paces = [1.05, 1.06, 1.05, 1.06, 1.05, 1.06]
    judge = Judge(interleaved=True, min_effect=0.0, aa_noise_floor=0.08)
    assert judge.change("x", side(paces, 0), side([1.0] * 6, 1)).verdict == "undecided"


def test_times_below_zero_or_without_a_partner_are_no_error():
    judge = Judge(interleaved=True, min_effect=0.0)
    odd = Samples(launches=[[1.0] * 9])
    found = judge.change("x", side([1.0], 0), odd)
    assert (found.verdict, "no pairs" in found.reason) == ("undecided", True)
    below = judge.change("x", Samples(launches=[[-1.0]]), Samples(launches=[[1.0]]))
    assert (below.verdict, below.speedup) == ("undecided", None)
