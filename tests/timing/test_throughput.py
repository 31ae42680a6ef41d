import pytest

from perfladder.stats import Samples
from perfladder.sweep import Sweep
from perfladder.timing.throughput import saturation_of, throughput_of


def wall(*values: float) -> Samples:
    return Samples(launches=[list(values)])


def saturation(walls_ms, *, values=(1, 2, 4, 8), min_gain=0.1):
    """Of a batch sweep, with two runs of the same time at each value."""
    sweep = Sweep(input="batch", values=list(values), items="value", min_gain=min_gain)
    names = sweep.scenario_names
    samples = {name: wall(ms, ms) for name, ms in zip(names, walls_ms, strict=True)}
    return saturation_of(sweep, samples, {name: sweep.items_of(i, 1) for i, name in enumerate(names)})


def test_throughput_is_items_over_the_time_of_a_call():
    found = throughput_of("default", wall(10, 20, 40), 4)
    assert found.items_per_s == pytest.approx(200)
    assert found.items_per_call == 4
    assert found.latency_ms.p50 == 20
    assert found.items_per_s_interval.low <= 200 <= found.items_per_s_interval.high


def test_saturation_is_where_nothing_later_gives_the_gain():
    # 100, 182, 190 and 188 items a second
    found = saturation([10, 11, 21, 42.5])
    assert (found.value, found.scenario) == (2, "batch 2")
    assert found.gain_beyond == pytest.approx(190.476 / 181.818 - 1, abs=1e-4)
    assert found.gain_beyond_interval is not None
    assert "'batch 4' gives +4.8% throughput, below 10%" in found.reason


def test_a_flat_step_before_more_growth_is_no_saturation():
    # 100, 100, 300 and 300
    assert saturation([10, 20, 13.333, 26.667]).value == 4


def test_throughput_that_falls_is_saturated_before():
    found = saturation([10, 30, 80, 200])
    assert found.value == 1
    assert found.gain_beyond is not None
    assert found.gain_beyond < 0


def test_growth_to_the_end_has_no_saturation_point_and_says_so():
    found = saturation([10, 11, 12, 13])
    assert (found.value, found.scenario) == (None, None)
    assert "ends too early" in found.reason
    assert found.gain_beyond == pytest.approx((8 / 13) / (4 / 12) - 1)


def test_the_wanted_gain_is_the_users():
    # 100, 150 and 200 a second
    assert saturation([10, 13.333, 20], values=(1, 2, 4), min_gain=0.1).value is None
    assert saturation([10, 13.333, 20], values=(1, 2, 4), min_gain=0.5).value == 2


def test_noise_that_leaves_room_for_more_is_told():
    sweep = Sweep(input="n", values=[1, 2], items="value")
    samples = {"n 1": wall(8, 10, 12, 9, 11), "n 2": wall(16, 20, 24, 18, 22)}
    assert "the samples leave room for more" in saturation_of(sweep, samples, {"n 1": 1, "n 2": 2}).reason
