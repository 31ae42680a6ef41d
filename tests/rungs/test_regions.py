"""Rung 2 in this process; that it runs in a session of its own is the ladder's test."""

import gzip
import json

import pytest
import torch
from torch import nn

from perfladder.errors import RungError, WorkloadError
from perfladder.rungs.regions import RegionsRequest, RegionsResult, compress_large, measure
from perfladder.target import LoadedTarget
from perfladder.workload import Workload


class Pipe:
    def __init__(self):
        self.net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.fails = False

    def __call__(self, steps=2):
        if self.fails:
            raise ValueError("broken")
        x = torch.randn(1, 4)
        for _ in range(steps):
            x = self.net(x) + 1
        return x


@pytest.fixture
def pipe():
    return Pipe()


@pytest.fixture
def loaded(pipe):
    workload = Workload(name="small", target="nowhere:build", inputs={"steps": 3}, device="cpu")
    return LoadedTarget.of(pipe, workload)


def request(tmp_path, **options):
    return RegionsRequest(trace_path=str(tmp_path / "regions.trace.json"), **{"runs": 2, **options})


def test_regions_and_residual_are_the_whole(loaded, tmp_path):
    result = measure(loaded, request(tmp_path, unprofiled_ms=1.0))
    assert result.num_runs == 2
    assert [(r.region_id, r.calls_per_run) for r in result.regions] == [("untuned_module:net", 3)]
    assert result.regions[0].module_type == "torch.nn.modules.container.Sequential"
    for run in result.runs:
        covered = sum(row.cpu_time_fraction for row in run.regions)
        assert covered + run.residual.cpu_time_fraction == pytest.approx(1, abs=1e-3)
    assert result.residual.host.python_us > 0
    assert result.device_busy_ms is None
    assert result.profiled_ratio == pytest.approx(result.profiled_ms / 1.0)
    assert [node.region_id for node in result.region_tree] == ["untuned_module:net"]
    assert len(result.region_tree[0].children) == 2
    assert set(result.key_averages) == {"cpu_time_total", "device_time_total"}
    assert result.timeline.devices == ()
    assert result.num_events > 0
    assert result.warnings == []


def test_the_trace_is_an_artifact_that_can_be_read_again(loaded, tmp_path):
    result = measure(loaded, request(tmp_path))
    assert result.artifacts == {"trace": "regions.trace.json"}
    assert json.loads((tmp_path / "regions.trace.json").read_text())["traceEvents"]
    assert RegionsResult.model_validate_json(result.model_dump_json()) == result


def test_the_ratio_is_unknown_without_unprofiled_runs(loaded, tmp_path):
    assert measure(loaded, request(tmp_path)).profiled_ratio is None


def test_a_failing_workload_fails_by_name_and_leaves_nothing(loaded, pipe, tmp_path):
    pipe.fails = True
    with pytest.raises(WorkloadError, match="broken"):
        measure(loaded, request(tmp_path))
    assert not pipe.net._forward_hooks
    pipe.fails = False
    assert measure(loaded, request(tmp_path)).num_runs == 2


def test_another_profiler_fails_by_name(loaded, tmp_path):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(1) + 1
        with pytest.raises(RungError, match="another torch profiler"):
            measure(loaded, request(tmp_path))


def test_a_large_trace_is_compressed(tmp_path):
    path = tmp_path / "regions.trace.json"
    path.write_bytes(b"x" * 1000)
    assert compress_large(path, above_bytes=1000) == path
    path.write_bytes(b"x" * 1001)
    compressed = compress_large(path, above_bytes=1000)
    assert compressed.name == "regions.trace.json.gz"
    assert [p.name for p in tmp_path.iterdir()] == ["regions.trace.json.gz"]
    assert gzip.decompress(compressed.read_bytes()) == b"x" * 1001


def test_shares_of_all_regions_and_the_residual_add_up_over_unequal_runs(loaded, pipe, tmp_path):
    counts = iter([1, 9, 2, 30, 3])
    pipe.__class__ = type("Uneven", (Pipe,), {"__call__": lambda self, steps: Pipe.__call__(self, next(counts))})
    result = measure(loaded, request(tmp_path, runs=3))
    assert sum(r.cpu_share for r in result.regions) + result.residual.cpu_share == pytest.approx(1, abs=2e-3)


def test_stages_that_are_no_modules_are_regions_of_what_no_module_in_them_covers(wrap, tmp_path):
    class Scheduler:
        def step(self, x):
            for _ in range(3):
                x = x + 1
            return x

    class Pipe:
        def __init__(self):
            self.unet, self.scheduler = torch.nn.Linear(4, 4), Scheduler()

        def encode(self, x):
            return self.unet(x) * 2

        def __call__(self):
            return self.scheduler.step(self.encode(torch.ones(2, 4)))

    request = RegionsRequest(trace_path=str(tmp_path / "t.json"), runs=1, stages=["scheduler.step", "encode", "unet"])
    result = measure(wrap(Pipe()), request)
    calls = {region.name: region.calls_per_run for region in result.regions}
    assert calls == {"unet": 1, "scheduler.step": 1, "encode": 1}
    whole = sum(region.cpu_share for region in result.regions) + result.residual.cpu_share
    assert whole == pytest.approx(1)
