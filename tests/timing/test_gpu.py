"""Rung 1 on a real accelerator."""

import pytest
import torch

from perfladder.marks import stage
from perfladder.rungs.stages import StagesRequest, measure

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def measured(wrap):
    def run(obj, **fields):
        return measure(wrap(obj, device="cuda", **{"measured_runs": 5, "warmup_runs": 2, **fields}), StagesRequest())

    return run


def by_name(result):
    return {found.name: found for found in result.default.stages}


def test_stages_on_two_streams_overlap_and_are_not_added_up(measured):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    small = torch.ones(64, device="cuda")

    def work():
        # Kernels that leave most of the device free, and take long enough to run beside each other.
        for name, stream in (("left", first), ("right", second)):
            with torch.cuda.stream(stream), stage(name):
                torch.cuda._sleep(20_000_000)
                small.add_(1)

    result = measured(work)
    found = by_name(result)
    assert set(found) == {"left", "right"}
    assert found["left"].device_self_ms is not None
    assert result.default.overlap_ms is not None
    shorter = min(found[name].device_self_ms.summary.p50 for name in found)
    assert result.default.overlap_ms.summary.p50 > 0.5 * shorter
    assert result.default.wall_ms.summary.p50 < 1.6 * shorter


def test_peaks_of_nested_stages_are_those_of_the_allocator(measured):
    def work():
        with stage("outer"):
            kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
            with stage("inner"):
                torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
            del kept

    result = measured(work, metric="peak_memory")
    inner, outer = (by_name(result)[name].memory for name in ("inner", "outer"))
    assert inner is not None
    assert outer is not None
    assert inner.increase_bytes == 256 * MIB
    assert outer.increase_bytes == 320 * MIB
    assert outer.self_peak_bytes - inner.peak_bytes == -256 * MIB
    assert inner.reserved_bytes >= inner.peak_bytes
    assert (result.dominating, result.dominating_by) == ("inner", "self_peak_bytes")
    assert result.device_memory_growth is not None
    assert not result.device_memory_growth.is_growing


def test_snapshot_after_the_runs_has_the_devices_state(measured):
    result = measured(lambda: torch.ones(4, device="cuda").sum().item())
    assert result.snapshot_after is not None
    assert result.snapshot_after.devices
    assert result.snapshot_after.devices[0].sm_clock_mhz
