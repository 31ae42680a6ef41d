import pytest

from perfladder.stats import Interval, Samples, summarize
from perfladder.timing.dominance import dominating_stage
from perfladder.timing.results import ScenarioTiming, StageMemory, StageTiming

ONE = Samples(launches=[[1.0]])
ALL = Interval(low=0, high=1)


def stage(name, share, *, chunk_ms=None, self_peak=None, increase=0):
    memory = None
    if self_peak is not None:
        memory = StageMemory(peak_bytes=999, increase_bytes=increase, self_peak_bytes=self_peak)
    return StageTiming(
        name=name,
        owner_type="t",
        calls_per_run=1,
        total_ms=ONE,
        self_ms=ONE,
        call_ms=summarize([1.0]),
        share=share,
        share_interval=ALL,
        chunk_self_ms=Samples(launches=[[chunk_ms]]) if chunk_ms is not None else None,
        memory=memory,
    )


def scenario(*stages):
    return ScenarioTiming(
        name="default", wall_ms=ONE, outside_ms=ONE, outside_share=0, outside_share_interval=ALL, stages=list(stages)
    )


STAGES = scenario(
    stage("encoder", 0.6, chunk_ms=0.0, self_peak=10),
    stage("denoiser", 0.3, chunk_ms=7.0, self_peak=20, increase=5),
    stage("decoder", 0.1, chunk_ms=2.0, self_peak=20, increase=15),
)


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("latency_p50", ("encoder", "share")),
        ("throughput", ("encoder", "share")),
        ("cadence_p95", ("denoiser", "chunk_self_ms")),
        ("peak_memory", ("decoder", "self_peak_bytes")),
    ],
)
def test_the_metric_decides_which_stage_dominates(metric, expected):
    assert dominating_stage(metric, STAGES) == expected


@pytest.mark.parametrize("metric", ["cadence_p95", "peak_memory"])
def test_without_its_measure_the_share_decides(metric):
    assert dominating_stage(metric, scenario(stage("a", 0.5))) == ("a", "share")
    assert dominating_stage(metric, scenario()) == (None, None)
