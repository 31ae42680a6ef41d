import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from perfladder.errors import InputError
from perfladder.steady import Bimodality, Drift, WarmupEnd, find_bimodality, find_drift, warmup_end


def autoregressive(generator, shape, autocorrelation, cv):
    """Times about 10 ms whose logarithms are stationary first-order autoregressions along the last axis."""
    noise = generator.normal(size=shape)
    for index in range(1, noise.shape[-1]):
        fresh = math.sqrt(1 - autocorrelation**2) * noise[..., index]
        noise[..., index] = autocorrelation * noise[..., index - 1] + fresh
    return 10 * np.exp(cv * noise)


def series(num_series, n, autocorrelation=0.74, cv=0.04, seed=0):
    return autoregressive(np.random.default_rng(seed), (num_series, n), autocorrelation, cv)


def share(flags):
    return np.mean(list(flags))


def test_slow_first_call_is_warmup_and_nothing_else():
    end = warmup_end([100.0, 10.0, 10.1, 9.9, 10.0, 10.2, 10.0, 9.9, 10.1, 10.0], limit=5)
    assert (end.index, end.is_steady, end.tolerance) == (1, True, pytest.approx(0.05, abs=0.02))
    assert "From sample 1 on" in end.reason


def test_warmup_in_two_steps_ends_after_the_second():
    samples = [50.0, 10.0, 10.0, 20.0, 20.0, *[10.0] * 15]
    assert warmup_end(samples, limit=8).index == 5


def test_late_outlier_is_no_warmup():
    assert warmup_end([10.0] * 6 + [30.0] + [10.0] * 13, limit=5).index == 0


def test_warmup_beyond_the_limit_is_not_steady():
    end = warmup_end([30.0] * 8 + [10.0] * 12, limit=4)
    assert (end.index, end.is_steady) == (4, False)
    assert "do not stay" in end.reason


def test_series_that_never_settles_is_not_steady():
    assert not warmup_end([2.0**-index for index in range(20)], limit=9).is_steady


def test_few_samples_are_not_called_steady():
    end = warmup_end([10.0] * 9, limit=3)
    assert (end.index, end.is_steady, end.tolerance) == (3, False, None)
    assert warmup_end([], limit=3).index == 0


@pytest.mark.parametrize(("n", "most"), [(10, 0.12), (20, 0.12), (50, 0.05), (200, 0.05)])
def test_steady_autocorrelated_noise_seldom_has_a_warmup(n, most):
    ends = [warmup_end(samples, limit=n // 2) for samples in series(300, n)]
    assert share(end.index > 0 for end in ends) <= most
    assert share(not end.is_steady for end in ends) <= 0.03


@pytest.mark.parametrize("n", [20, 50, 200])
def test_decaying_warmup_is_cut_where_it_sinks_into_the_noise(n):
    """Excess of 100, 37, 14, 5, 2 % over the level, noise of 4 %."""
    decay = 1 + np.exp(-np.arange(n, dtype=float))
    ends = [warmup_end(samples * decay, limit=10).index for samples in series(300, n)]
    assert share(index >= 2 for index in ends) >= 0.95
    assert np.median(ends) <= 3


@pytest.mark.parametrize("autocorrelation", [0.0, 0.74, 0.9])
@pytest.mark.parametrize("n", [10, 20, 50, 200])
def test_steady_noise_is_seldom_called_a_drift(n, autocorrelation):
    assert share(find_drift(samples).is_drifting for samples in series(200, n, autocorrelation)) <= 0.05


@pytest.mark.parametrize(("n", "autocorrelation", "rise"), [(50, 0.0, 0.1), (200, 0.0, 0.05), (200, 0.74, 0.2)])
def test_drift_that_stands_out_is_found_with_its_size(n, autocorrelation, rise):
    line = np.linspace(1, 1 + rise, n)
    found = [find_drift(samples * line) for samples in series(200, n, autocorrelation)]
    assert share(drift.is_drifting for drift in found) >= 0.9
    assert np.median([drift.change for drift in found]) == pytest.approx(rise, rel=0.15)


def test_drift_has_the_slope_and_rank_correlation_of_scipy():
    samples = autoregressive(np.random.default_rng(3), 40, 0.0, 0.02) * np.exp(0.002 * np.arange(40))
    drift = find_drift(samples)
    slope = scipy_stats.theilslopes(np.log(samples), np.arange(40)).slope
    assert drift.change == pytest.approx(math.expm1(39 * slope))
    assert scipy_stats.kendalltau(np.arange(40), samples).pvalue <= drift.p_value < 0.01
    assert drift.is_drifting
    assert find_drift(samples[::-1]).change == pytest.approx(1 / (1 + drift.change) - 1)
    assert "falls" in find_drift(samples[::-1]).reason


def test_smooth_rise_is_a_drift_though_the_line_does_not_fit_it():
    warming = 10 * (1 + 0.1 * (1 - np.exp(-np.arange(50) / 15)))
    assert find_drift(warming).is_drifting
    assert find_drift(np.linspace(10.0, 20.0, 20)).is_drifting


def test_drift_that_is_small_does_not_count_however_clear():
    samples = np.linspace(10.0, 10.1, 50)
    assert find_drift(samples, min_change=0.005).is_drifting
    assert not find_drift(samples).is_drifting


@pytest.mark.parametrize("autocorrelation", [0.0, 0.74, 0.9])
@pytest.mark.parametrize("n", [10, 20, 50, 200])
def test_one_level_of_noise_is_seldom_called_bimodal(n, autocorrelation):
    assert share(find_bimodality(samples).is_bimodal for samples in series(300, n, autocorrelation)) <= 0.02


@pytest.mark.parametrize(("n", "most"), [(10, 0.05), (20, 0.05), (50, 0.02), (200, 0.01)])
def test_a_long_tail_or_a_flat_distribution_is_seldom_called_bimodal(n, most):
    generator = np.random.default_rng(1)
    tailed = 10 + generator.exponential(1.0, (300, n))
    flat = 10 + 2 * generator.random((300, n))
    assert share(find_bimodality(samples).is_bimodal for samples in tailed) <= most
    assert share(find_bimodality(samples).is_bimodal for samples in flat) <= most


@pytest.mark.parametrize("n", [20, 50, 200])
def test_two_levels_far_apart_are_found(n):
    """A third of the runs takes 40 % longer, noise of 4 %: at random, or in one stretch."""
    generator = np.random.default_rng(2)
    for is_slow in (generator.random((200, n)) < 1 / 3, np.tile(np.arange(n) < n // 3, (200, 1))):
        found = [find_bimodality(s * (1 + 0.4 * slow)) for s, slow in zip(series(200, n), is_slow, strict=True)]
        assert share(modes.is_bimodal for modes in found) >= 0.95
        assert np.median([modes.high / modes.low for modes in found]) == pytest.approx(1.4, rel=0.03)


def test_modes_are_described():
    modes = find_bimodality([10.0, 14.0, 10.0, 10.0, 14.0, 14.0, 10.0, 10.0, 10.0, 10.0])
    assert modes.is_bimodal
    assert (modes.low, modes.high, modes.upper_frac, modes.num_switches) == (10.0, 14.0, 0.3, 4)
    assert modes.separation is None
    assert "3 of 10 samples lie near 14" in modes.reason


def test_outliers_are_no_mode():
    assert not find_bimodality([*[10.0, 10.1, 9.9, 10.05] * 10, 50.0, 51.0]).is_bimodal


def test_levels_closer_than_asked_for_do_not_count():
    samples = [10.0, 10.2] * 10
    assert not find_bimodality(samples).is_bimodal
    assert find_bimodality(samples, min_separation=0.01).is_bimodal


def test_constant_series_is_steady():
    assert warmup_end([3.0] * 20, limit=5).index == 0
    assert find_drift([3.0] * 20) == Drift(
        is_drifting=False, change=0.0, p_value=1.0, autocorrelation=0.0, reason="All samples are equal."
    )
    assert not find_bimodality([3.0] * 20).is_bimodal


def test_too_few_samples_say_so():
    assert "too few" in find_drift([1.0, 2.0]).reason
    assert "too few" in find_bimodality([1.0, 2.0]).reason
    assert find_drift([]).change is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_samples_that_are_no_times_are_an_error(bad):
    for check in (find_drift, find_bimodality, lambda samples: warmup_end(samples, limit=3)):
        with pytest.raises(InputError, match="1 of 11 samples are not times above 0"):
            check([*[1.0] * 10, bad])


def test_negative_limit_is_an_error():
    with pytest.raises(InputError, match="limit is -1"):
        warmup_end([1.0] * 10, limit=-1)


@settings(max_examples=60, deadline=None)
@given(samples=st.lists(st.floats(0.5, 50.0), min_size=10, max_size=40), exponent=st.integers(-20, 20))
def test_the_unit_of_time_does_not_matter(samples, exponent):
    scaled = [value * 2.0**exponent for value in samples]
    plain_end, scaled_end = warmup_end(samples, limit=5), warmup_end(scaled, limit=5)
    assert (scaled_end.index, scaled_end.is_steady) == (plain_end.index, plain_end.is_steady)
    assert find_drift(scaled).change == pytest.approx(find_drift(samples).change, abs=1e-6)
    plain, other = find_bimodality(samples), find_bimodality(scaled)
    assert (other.upper_frac, other.num_switches) == (plain.upper_frac, plain.num_switches)


@settings(max_examples=60, deadline=None)
@given(samples=st.lists(st.floats(0.5, 50.0), max_size=40))
def test_any_series_gets_finite_numbers_that_survive_json(samples):
    for result in (warmup_end(samples, limit=5), find_drift(samples), find_bimodality(samples)):
        assert isinstance(result, (WarmupEnd, Drift, Bimodality))
        numbers = [value for value in result.model_dump().values() if isinstance(value, float)]
        assert all(math.isfinite(number) for number in numbers)
        assert type(result).model_validate_json(result.model_dump_json()) == result
