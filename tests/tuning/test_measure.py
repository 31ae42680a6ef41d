"""Candidates are timed in turns with the plain module, as often as is asked for."""

import pytest
import torch

from perfladder.errors import InputError
from perfladder.tuning.measure import (
    AllSamplesProfilingStopStrategy,
    Meter,
    NumStepsMeasuringStopStrategy,
    ProfilingConfig,
    StableWindowMeasuringStopStrategy,
    ThroughputSaturatedProfilingStopStrategy,
    measure_pairs,
)
from perfladder.tuning.samples import Sample

CPU = torch.device("cpu")


@pytest.fixture
def measured(clock):
    """Time two functions that take scripted times; returns the timing and the order of calls."""

    def run(baseline_ms, candidate_ms, stop, changes_inputs=False, batch_size=1, min_effect=0.01):
        order, inputs = [], []

        def side(name, times):
            times = iter(times)

            def call(x):
                order.append(name)
                inputs.append(x)
                assert not torch.is_grad_enabled()
                clock.pass_ms(next(times))
                x += 1

            return call

        timing = measure_pairs(
            Meter(CPU, clock),
            side("a", baseline_ms),
            side("b", candidate_ms),
            Sample((torch.zeros(3),), {}, batch_size),
            batch_size=batch_size,
            stop=stop,
            min_effect=min_effect,
            changes_inputs=changes_inputs,
        )
        return timing, "".join(order), inputs

    return run


def always(ms):
    while True:
        yield ms


def test_sides_take_turns_in_changing_order(measured):
    timing, order, inputs = measured(always(4), always(2), NumStepsMeasuringStopStrategy(10, 2))
    assert order == "abab" + "abba" * 5
    assert (timing.baseline_ms, timing.candidate_ms) == ([4.0] * 10, [2.0] * 10)
    assert timing.comparison.verdict == "faster"
    assert timing.comparison.speedup == pytest.approx(2)
    assert len({x.data_ptr() for x in inputs}) == 1, "one copy of the arguments serves all runs"


def test_warmups_are_not_counted(measured):
    slow_start = [100.0] * 3 + [2.0] * 10
    timing, _, _ = measured([50.0] * 3 + [4.0] * 10, slow_start, NumStepsMeasuringStopStrategy(10, 3))
    assert (timing.baseline_p50_ms, timing.candidate_p50_ms) == (4, 2)


def test_a_module_that_writes_to_its_arguments_gets_new_ones(measured):
    _, _, inputs = measured(always(1), always(1), NumStepsMeasuringStopStrategy(10, 1), changes_inputs=True)
    assert all(torch.equal(x, torch.ones(3)) for x in inputs)


def test_throughputs_are_samples_a_second(measured):
    timing, _, _ = measured(always(8), always(4), NumStepsMeasuringStopStrategy(10, 1), batch_size=16)
    assert (timing.baseline_throughput, timing.throughput) == (2000, 4000)


def test_times_below_the_clocks_resolution_decide_nothing(measured):
    timing, _, _ = measured(always(1), always(0), NumStepsMeasuringStopStrategy(10, 1))
    assert timing.comparison.verdict == "undecided"
    assert "10 samples are zero" in timing.comparison.reason
    assert timing.throughput == 1e9


def test_a_drift_that_both_sides_share_does_not_hide_a_gain(measured):
    drift = [1 + 0.2 * index for index in range(40)]
    baseline = [10 * factor for factor in drift]
    candidate = [9 * factor for factor in drift]
    timing, _, _ = measured(baseline, candidate, NumStepsMeasuringStopStrategy(20, 1))
    assert timing.comparison.verdict == "faster"
    assert timing.comparison.speedup == pytest.approx(10 / 9)


def test_a_stable_window_ends_the_pairs():
    stop = StableWindowMeasuringStopStrategy(window_size=10, max_cv_ratio=0.1, max_samples=30)
    steady, wild = [1.0] * 10, [1.0, 3.0] * 5
    assert not stop.is_enough(steady[:9], steady[:9])
    assert stop.is_enough(steady, steady)
    assert not stop.is_enough(steady, wild)
    assert not stop.is_enough(wild, steady)
    assert stop.is_enough(wild + steady, wild + steady), "only the last ones count"
    assert stop.is_enough(wild * 3, wild * 3), "there are enough, however they vary"


def test_noise_up_to_the_limit_is_judged_as_it_is(measured):
    stop = StableWindowMeasuringStopStrategy(window_size=10, max_cv_ratio=0.01, warmup_samples=1, max_samples=12)
    timing, _, _ = measured([1.0, 3.0] * 10, [3.0, 1.0] * 10, stop)
    assert len(timing.candidate_ms) == 12
    assert timing.comparison.verdict in ("no_difference", "undecided")


@pytest.mark.parametrize(
    ("throughputs", "limit", "is_enough"),
    [
        ([], 2, False),
        ([100, 200, 400], 0, False),
        ([100, 104], 0, True),
        ([100, 106], 0, False),
        ([100, 104, 104], 2, False),
        ([100, 104, 104, 104], 2, True),
        ([100, 90, 80, 120, 110], 2, False),
        ([100, 100, 100, 100], 2, True),
    ],
)
def test_saturation_counts_sizes_in_a_row(throughputs, limit, is_enough):
    stop = ThroughputSaturatedProfilingStopStrategy(throughput_backoff_limit=limit)
    assert stop.is_enough(throughputs) == is_enough


def test_all_sizes_can_be_asked_for():
    assert not AllSamplesProfilingStopStrategy().is_enough([1.0] * 100)


def test_batch_sizes_of_a_generator_become_a_tuple():
    assert ProfilingConfig(batch_sizes=(1 << power for power in range(3))).batch_sizes == (1, 2, 4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: NumStepsMeasuringStopStrategy(9), "num_steps: expected a whole number from 10 up, got 9"),
        (lambda: NumStepsMeasuringStopStrategy(20, 0), "warmup_samples: .* from 1 up, got 0"),
        (lambda: NumStepsMeasuringStopStrategy(True), "num_steps: .* got True"),
        (lambda: StableWindowMeasuringStopStrategy(5), "window_size: .* from 10 up, got 5"),
        (lambda: StableWindowMeasuringStopStrategy(max_samples=10), "max_samples: .* from 20 up, got 10"),
        (lambda: StableWindowMeasuringStopStrategy(max_cv_ratio=0), "max_cv_ratio: expected a ratio above 0, got 0"),
        (lambda: StableWindowMeasuringStopStrategy(max_cv_ratio="x"), "max_cv_ratio: .* got 'x'"),
        (
            lambda: ThroughputSaturatedProfilingStopStrategy(min_throughput_gain_ratio=1),
            "min_throughput_gain_ratio: expected a ratio from 0 to below 1, got 1",
        ),
        (
            lambda: ThroughputSaturatedProfilingStopStrategy(min_throughput_gain_ratio=None),
            "min_throughput_gain_ratio: .* got None",
        ),
        (
            lambda: ThroughputSaturatedProfilingStopStrategy(throughput_backoff_limit=-1),
            "throughput_backoff_limit: .* from 0 up, got -1",
        ),
        (lambda: ProfilingConfig(batch_sizes=[]), "batch_sizes: give at least one, or None"),
        (lambda: ProfilingConfig(batch_sizes=[1, 0]), "batch_sizes: .* from 1 up, got 0"),
        (lambda: ProfilingConfig(measurement_stop_strategy=3), "measurement_stop_strategy: expected an instance"),
        (lambda: ProfilingConfig(profiling_stop_strategy=int), "profiling_stop_strategy: .* a strategy, got int"),
        (lambda: ProfilingConfig(batch_sizes=4), "batch_sizes: expected whole numbers, got 4"),
    ],
)
def test_wrong_values_are_named(make, says):
    with pytest.raises(InputError, match=says):
        make()
