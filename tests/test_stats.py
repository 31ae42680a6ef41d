import numpy as np
import pytest
from scipy import stats as scipy_stats

from perfladder.stats import Samples, bootstrap_interval, ratio_of_medians, summarize


def test_summary_agrees_with_scipy():
    values = np.random.default_rng(0).lognormal(size=101).tolist()
    summary = summarize(values)
    assert summary.n == 101
    assert summary.mean == pytest.approx(np.mean(values))
    assert summary.std == pytest.approx(scipy_stats.tstd(values))
    for percent in (50, 90, 95, 99):
        expected = scipy_stats.scoreatpercentile(values, percent)
        assert getattr(summary, f"p{percent}") == pytest.approx(expected)
    assert (summary.min, summary.max) == (min(values), max(values))


def test_one_sample_has_no_spread():
    summary = summarize([3.0])
    assert (summary.mean, summary.p99, summary.std) == (3.0, 3.0, 0.0)


def test_samples_keep_their_launches_apart():
    samples = Samples(launches=[[1.0, 2.0], [3.0]])
    assert samples.values == [1.0, 2.0, 3.0]
    assert samples.summary.n == 3
    assert Samples.model_validate_json(samples.model_dump_json()) == samples


def test_interval_is_the_same_each_time_for_one_seed():
    values = np.random.default_rng(1).normal(size=30).tolist()
    first = bootstrap_interval(lambda v: v.mean(axis=-1), values)
    assert first == bootstrap_interval(lambda v: v.mean(axis=-1), values)
    assert first != bootstrap_interval(lambda v: v.mean(axis=-1), values, seed=1)


def test_interval_holds_the_true_mean_about_as_often_as_it_says():
    generator = np.random.default_rng(2)
    hits = 0
    for index in range(200):
        interval = bootstrap_interval(lambda v: v.mean(axis=-1), generator.normal(10, 2, 40).tolist(), seed=index)
        hits += interval.low <= 10 <= interval.high
    assert 180 <= hits <= 199


def test_interval_agrees_with_scipy():
    values = np.random.default_rng(3).lognormal(size=50)
    interval = bootstrap_interval(lambda v: np.median(v, axis=-1), values.tolist())
    other = scipy_stats.bootstrap((values,), np.median, method="percentile", n_resamples=4000, random_state=0)
    assert interval.low == pytest.approx(other.confidence_interval.low, rel=0.05)
    assert interval.high == pytest.approx(other.confidence_interval.high, rel=0.05)


def test_ratio_of_medians_of_the_same_samples_holds_one():
    values = np.random.default_rng(4).lognormal(size=40).tolist()
    interval = bootstrap_interval(ratio_of_medians, values, values)
    assert interval.low < 1 < interval.high


def test_paired_sets_are_resampled_together():
    wall = np.random.default_rng(5).lognormal(size=40)
    share = bootstrap_interval(
        lambda part, whole: part.sum(axis=-1) / whole.sum(axis=-1), (wall / 4).tolist(), wall.tolist(), paired=True
    )
    assert share.low == pytest.approx(0.25)
    assert share.high == pytest.approx(0.25)
