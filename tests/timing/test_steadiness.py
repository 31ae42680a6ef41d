import numpy as np
import pytest

from perfladder.timing.steadiness import settle, steadiness_of, steadiness_warnings
from perfladder.timing.timer import RunTiming


def runs(*walls_ms):
    return [RunTiming(0, int(ms * 1e6), []) for ms in walls_ms]


def walls(timings):
    return [timing.wall_ms for timing in timings]


def source(*walls_ms):
    left = runs(*walls_ms)
    asked = []

    def more(count):
        asked.append(count)
        taken = left[:count]
        del left[:count]
        return taken

    return more, asked


STEADY = [10.0, 10.1, 9.9, 10.0, 10.2, 10.0, 9.9, 10.1, 10.0, 10.0]


def test_steady_runs_are_kept():
    more, asked = source()
    warmup, kept, end = settle([30.0, 12.0], runs(*STEADY), limit=20, measure_more=more)
    assert (warmup, walls(kept), asked) == ([30.0, 12.0], STEADY, [])
    assert end is not None
    assert (end.index, end.is_steady) == (2, True)


def test_slow_first_runs_join_the_warmup_and_as_many_are_measured_anew():
    more, asked = source(10.0, 10.1, 9.9)
    warmup, kept, end = settle([40.0], runs(30.0, 20.0, 15.0, *STEADY[:7]), limit=20, measure_more=more)
    assert asked == [3]
    assert warmup == [40.0, 30.0, 20.0, 15.0]
    assert walls(kept) == [*STEADY[:7], 10.0, 10.1, 9.9]
    assert end is not None
    assert (end.index, end.is_steady) == (4, True)


def test_runs_that_never_settle_end_at_the_limit():
    more, asked = source()
    _, kept, end = settle([], runs(*[20.0] * 8, *[10.0] * 12), limit=5, measure_more=more)
    assert (len(kept), asked) == (20, [])
    assert end is not None
    assert not end.is_steady


def test_too_few_runs_cannot_tell():
    more, _ = source()
    assert settle([], runs(30, 20, 10), limit=20, measure_more=more)[2] is None


def test_ranks_agree_on_the_number_of_runs():
    more, asked = source(10.0, 10.0)
    answers = iter([2.0, 0.0])
    settle([], runs(*STEADY), limit=20, measure_more=more, agreed=lambda value: next(answers))
    assert asked == [2], "another rank had two early runs"


def test_clock_that_stands_still_is_no_series():
    assert steadiness_of([0.0] * 10, None) is None
    assert steadiness_warnings("default", None) == []


@pytest.mark.parametrize(
    ("series", "code"),
    [
        (np.linspace(10, 13, 20), "SAMPLES_DRIFT"),
        ([10.0, 10.1, 15.0, 15.1] * 5, "SAMPLES_BIMODAL"),
    ],
)
def test_flag_is_a_warning(series, code):
    steadiness = steadiness_of(list(series), None)
    (warning,) = steadiness_warnings("long", steadiness)
    assert warning.code == code
    assert warning.message.startswith("Scenario long: ")
    assert steadiness_warnings("default", steadiness_of(STEADY, None)) == []
