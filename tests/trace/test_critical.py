"""Which kernels the end of a run waits for, on constructed cases."""

import pytest

from perfladder.trace.attribution import attribute
from perfladder.trace.critical import find_critical, judge_boundness
from perfladder.trace.kernels import list_kernels
from perfladder.trace.residual import HostParts, split_window_idle


def analyse(scene, **options):
    trace = scene.trace()
    attribution = attribute(trace)
    table, parts = list_kernels(trace, attribution), HostParts(trace, attribution)
    critical = find_critical(table, parts)
    return critical.tolist(), judge_boundness(table, critical, split_window_idle(trace, parts), **options)


def test_kernels_that_the_host_lags_behind_are_not_waited_for(scene):
    """Each kernel is done long before the next launch; only what the final wait waits for counts."""
    scene.run(0, 0, 400)
    for index in range(3):
        scene.call("cudaLaunchKernel", 20 + 100 * index, 5, index + 1).kernel("gemm", 30 + 100 * index, 20, index + 1)
    scene.call("cudaDeviceSynchronize", 235, 100)
    critical, bound = analyse(scene)
    assert critical == [False, False, True]
    assert bound.verdict == "host"
    assert bound.critical_frac == pytest.approx(1 / 3)
    assert (bound.queued_frac, bound.mean_queue_depth, bound.median_launch_latency_us) == (0, 0, 10)
    assert bound.waiting_for_launch_frac == pytest.approx((20 + 70 + 70 + 65) / 400)
    assert bound.in_synchronization_frac == pytest.approx(85 / 400)


def test_queued_kernels_are_waited_for(scene):
    scene.run(0, 0, 400)
    for index in range(3):
        scene.call("cudaLaunchKernel", 2 + 6 * index, 5, index + 1).kernel("gemm", 10 + 125 * index, 125, index + 1)
    scene.call("cudaDeviceSynchronize", 25, 374)
    critical, bound = analyse(scene)
    assert critical == [True] * 3
    assert bound.verdict == "device"
    assert bound.critical_frac == 1
    assert (bound.mean_queue_depth, bound.queued_frac) == (1, pytest.approx(2 / 3))
    assert "It sets the pace" in bound.statement


def test_gap_of_launched_work_takes_what_the_next_stretch_is(scene):
    """A gap of latency or dependency: the next kernel had been launched when this one ended."""
    scene.run(0, 0, 400).call("cudaLaunchKernel", 5, 5, 1).kernel("a", 20, 30, 1)
    scene.call("cudaLaunchKernel", 12, 5, 2).kernel("b", 60, 30, 2)
    scene.call("cudaDeviceSynchronize", 80, 100)
    assert analyse(scene)[0] == [True, True]


def test_stretch_before_a_late_launch_is_not_waited_for_as_a_whole(scene):
    scene.run(0, 0, 400).call("cudaLaunchKernel", 5, 5, 1).kernel("a", 20, 30, 1)
    scene.call("cudaLaunchKernel", 12, 5, 2).kernel("b", 50, 30, 2)
    scene.call("cudaLaunchKernel", 150, 5, 3).kernel("c", 160, 30, 3)
    scene.call("cudaDeviceSynchronize", 170, 100)
    assert analyse(scene)[0] == [False, False, True]


def test_copy_to_the_host_waits_too(scene):
    scene.run(0, 0, 400).call("cudaLaunchKernel", 5, 5, 1).kernel("a", 20, 30, 1)
    scene.call("cudaMemcpyAsync", 15, 50, 2).copy("Memcpy DtoH (Device -> Pageable)", 50, 10, 2)
    scene.call("cudaLaunchKernel", 150, 5, 3).kernel("c", 160, 30, 3)
    assert analyse(scene)[0] == [True, True, True]


def test_devices_are_judged_apart(scene):
    scene.run(0, 0, 400).call("cudaLaunchKernel", 5, 5, 1).kernel("a", 20, 30, 1)
    scene.call("cudaLaunchKernel", 100, 5, 2).kernel("b", 110, 30, 2)
    scene.call("cudaLaunchKernel", 12, 5, 3).kernel("c", 20, 30, 3, device=1)
    scene.call("cudaDeviceSynchronize", 120, 200)
    assert analyse(scene)[0] == [False, True, True]


def test_plain_runs_decide_where_they_are_known(scene):
    scene.run(0, 0, 400).call("cudaLaunchKernel", 20, 5, 1).kernel("gemm", 30, 20, 1)
    assert analyse(scene)[1].verdict == "host"
    bound = analyse(scene, plain_busy_frac=0.7)[1]
    assert (bound.verdict, bound.plain_busy_frac) == ("mixed", 0.7)
    assert "70% of plain runs" in bound.statement


def test_without_a_device_the_operators_are_the_work(scene):
    critical, bound = analyse(scene.run(0, 0, 100).op("aten::mm", 10, 20))
    assert critical == [True]
    assert (bound.verdict, bound.critical_frac) == ("no_device", None)
