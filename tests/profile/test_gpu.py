"""On a CUDA device: device times, peak memory, waits, and streams."""

import pytest
import torch
from torch import nn

import perfladder as pl
from perfladder.trace.model import Trace

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x):
        return self.second(self.first(x).relu())

    def decode(self, x):
        return torch.cat([self(x), self(x)])


class Pipe:
    def __init__(self, size=2048):
        self.net = Net(size).cuda()
        self.vae = Net(size).cuda()

    def __call__(self, x):
        for _ in range(3):
            x = self.net(x.cuda())
            if x.sum().item() > 1e30:
                break
            x = x.cpu() * 1.0
        return self.vae.decode(x.cuda()).cpu()


@pytest.fixture
def result(tmp_path):
    return pl.profile(Pipe(), torch.randn(4096, 2048), measured_runs=4, trace_file=tmp_path / "trace.json")


def test_device_fractions_and_residual_are_one(result):
    assert [region["id"] for region in result.data["regions"]] == ["untuned_module:net", "untuned_module:vae.decode"]
    assert {w["code"] for w in result.data["warnings"]} <= {"PROFILED_BEFORE"}
    for run in result.data["runs"]:
        for domain in ("cpu", "device"):
            covered = sum(row[f"{domain}_time_fraction"] for row in run["regions"])
            assert covered + run["residual"][f"{domain}_time_fraction"] == pytest.approx(1, abs=1e-3)
        rows = {row["region_id"]: row for row in run["regions"]}
        assert all(row["device_span_us"] >= row["device_time_us"] * 0.99 for row in rows.values())
        sites = {site["outer_operator"] for site in run["residual"]["host"]["synchronizations"]}
        assert "aten::item" in sites
        assert run["residual"]["host"]["copy_d2h_us"] > 0
        idle = run["device"]
        parts = idle["waiting_for_launch_us"] + idle["in_synchronization_us"] + idle["other_us"]
        assert parts == pytest.approx(idle["idle_us"], rel=1e-6)


def test_device_time_agrees_with_the_kernels_of_the_trace(result):
    trace = Trace.read(result.trace_file)
    work = trace.device_join.event
    runs_us = sum(run["timing"]["device_time_us"] for run in result.data["runs"])
    # One of five equal runs is the warm-up in the window.
    assert runs_us == pytest.approx(trace.duration_ns[work].sum() / 1e3 * 4 / 5, rel=0.2)
    assert runs_us < trace.duration_ns[work].sum() / 1e3


def test_peak_memory_is_that_of_the_allocator(result):
    regions = {region["name"]: region for region in result.data["regions"]}
    activation = 4096 * 2048 * 4
    assert regions["net"]["peak_memory_increase_bytes"] == pytest.approx(2 * activation, rel=0.6)
    # Two results at once and their concatenation.
    assert regions["vae.decode"]["peak_memory_increase_bytes"] >= 4 * activation
    weights = 4 * 2048 * 2048 * 4
    assert regions["net"]["peak_memory_bytes"] > weights


def test_views_of_the_device_and_activities(result):
    profiler = result.data["profiler"]
    assert profiler["activities"] == ["CPU", "CUDA"]
    assert profiler["key_averages"]["device_time_total"]
    assert {row["device_type"] for row in profiler["key_averages"]["device_time_total"]} == {"CPU", "CUDA"}


def test_a_model_on_the_host_is_told():
    holder = type("Holder", (), {})()
    holder.net = nn.Linear(8, 8)
    result = pl.profile(holder, torch.randn(1, 8), inference_function=lambda x: holder.net(x), measured_runs=2)
    assert "NO_DEVICE_EVENTS" in {w["code"] for w in result.data["warnings"]}
    assert result.data["runs"][0]["timing"]["device_time_us"] is None
