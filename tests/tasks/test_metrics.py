"""Numbers of results as metrics."""

import math

from perfladder.rungs.base import RungResult
from perfladder.rungs.harness import CallReplay, HarnessResult, Parity
from perfladder.rungs.stages import MetricValue, StagesResult
from perfladder.stats import Interval, Samples
from perfladder.tasks.metrics import metric_that_matters, metrics_of


class NewResult(RungResult):
    """A rung that metrics.py does not know."""

    rung: str = "new"
    bandwidth_gb_per_s: float | None = 3.0
    num_things: int = 2
    is_fast: bool = True
    absent_ms: float | None = None
    broken_ms: float = math.nan
    label: str = "x"


def test_stages_give_the_metric_that_matters_and_each_stage(stages_result: StagesResult) -> None:
    metrics = metrics_of(stages_result)
    assert metrics["latency_p50_ms"] == 10.0
    assert metrics["latency_p50_low_ms"] == 9.0
    assert metrics["stage/unet/self_ms_p50"] == 5.0
    assert metrics["stage/down(0)/share"] == 0.5
    assert metrics["outside_share"] == 0.1
    assert metrics["first_call_ms"] == 50.0
    assert metrics["peak_host_rss_bytes"] == 1024
    assert metrics["scenario/large/wall_ms_p50"] == 10.0


def test_a_unit_is_named_once() -> None:
    metric = MetricValue(name="throughput", value=3.0, unit="items/s")
    assert metric_that_matters(metric) == {"throughput_items_per_s": 3.0}


def test_harness_gives_the_largest_error() -> None:
    samples = Samples(launches=[[1.0]])
    calls = [
        CallReplay(
            index=index,
            parity=Parity(verdict="within_tolerance", max_abs_error=error),
            second_replay_differs=False,
            in_pipeline_ms=samples,
            replayed_ms=samples,
        )
        for index, error in enumerate((0.25, 0.5))
    ]
    result = HarnessResult(calls=calls, timing_ratio=1.0, timing_ratio_interval=Interval(low=0.9, high=1.1))
    assert metrics_of(result) == {
        "timing_ratio": 1.0,
        "timing_low_ratio": 0.9,
        "timing_high_ratio": 1.1,
        "max_abs_error": 0.5,
        "max_rel_error": 0.0,
    }


def test_an_unknown_result_gives_its_numbers_with_units_and_never_a_made_up_one() -> None:
    assert metrics_of(NewResult(duration_s=1.0)) == {"duration_s": 1.0, "bandwidth_gb_per_s": 3.0, "num_things": 2.0}


def test_a_failed_rung_gives_its_duration_only() -> None:
    assert metrics_of(NewResult(status="failed", duration_s=1.0)) == {"duration_s": 1.0}
