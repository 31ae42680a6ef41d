"""What waits cost, on scenes whose plain duration can be worked out by hand."""

import pytest

from perfladder.trace.attribution import attribute
from perfladder.trace.residual import NO_OPERATOR, HostParts
from perfladder.trace.waits import model_waits


def model(scene, plain_us):
    trace = scene.trace()
    attribution = attribute(trace)
    return model_waits(trace, attribution, HostParts(trace, attribution), 0, plain_us)


def waiting_scene(scene):
    """The host launches at 10, waits from 30 to 60, launches at 100, and waits from 120 for the end."""
    scene.run(0, 0, 130).label("untuned_module", "loop", 1, 70).op("aten::item", 28, 34)
    scene.call("cudaLaunchKernel", 10, 2, 1).kernel("gemm", 10, 50, 1)
    scene.call("cudaStreamSynchronize", 30, 30, 2)
    scene.call("cudaLaunchKernel", 100, 2, 3).kernel("gemm", 100, 30, 3)
    scene.call("cudaDeviceSynchronize", 120, 10, 4)
    return scene


def test_a_wait_costs_what_the_device_could_have_been_ahead(scene) -> None:
    # Without it: launches at 10 and 70 on the host's clock, so the device works from 10 to 60 and from 70 to 100.
    found = model(waiting_scene(scene), 130)
    assert found.host_scale == pytest.approx(1, abs=1e-3)
    assert found.without_waits_us == pytest.approx(100, abs=0.01)
    assert found.win_us == pytest.approx(30, abs=0.01)
    (site,) = found.sites  # the last wait is for the result
    assert (site.outer_operator, site.call, site.region_id) == (
        "aten::item",
        "cudaStreamSynchronize",
        "untuned_module:loop",
    )
    assert (site.count, site.wait_us) == (1, pytest.approx(30, abs=0.01))


def test_a_host_that_profiling_slows_is_scaled_to_the_plain_duration(scene) -> None:
    # At 0.4 of the host's time: 10 * 0.4 + 50 = 54, then 40 * 0.4 + 30 = 46; without the wait 10 * 0.4 + 80.
    found = model(waiting_scene(scene), 100)
    assert found.host_scale == pytest.approx(0.4, abs=1e-3)
    assert found.without_waits_us == pytest.approx(84, abs=0.01)
    assert found.sites[0].wait_us == pytest.approx(54 - 30 * 0.4, abs=0.05)


def test_a_wait_in_which_the_device_has_nothing_to_do_wins_nothing(scene) -> None:
    scene.run(0, 0, 200)
    scene.call("cudaLaunchKernel", 10, 2, 1).kernel("k", 15, 2, 1).call("cudaStreamSynchronize", 100, 1, 2)
    scene.call("cudaLaunchKernel", 150, 2, 3).kernel("k", 155, 2, 3).call("cudaStreamSynchronize", 190, 1, 4)
    found = model(scene, 198)
    assert found.win_us == pytest.approx(0, abs=0.1)
    assert found.sites[0].outer_operator == NO_OPERATOR


def test_a_copy_to_the_host_in_which_it_waits_is_no_work_of_the_host(scene) -> None:
    scene.run(0, 0, 130).op("aten::item", 28, 34)
    scene.call("cudaLaunchKernel", 10, 2, 1).kernel("gemm", 10, 49, 1)
    scene.call("cudaMemcpyAsync", 30, 29, 5).copy("Memcpy DtoH (Device -> Pageable)", 59, 1, 5)
    scene.call("cudaStreamSynchronize", 59, 1, 2)
    scene.call("cudaLaunchKernel", 100, 2, 3).kernel("gemm", 100, 30, 3)
    scene.call("cudaDeviceSynchronize", 120, 10, 4)
    found = model(scene, 130)
    assert found.win_us == pytest.approx(30, abs=0.01)


def test_overlapping_work_and_runs_without_inner_waits_are_not_modelled(make_scene) -> None:
    plain = make_scene("plain").run(0, 0, 100).call("cudaLaunchKernel", 10, 2, 1).kernel("k", 15, 20, 1)
    assert model(plain.call("cudaDeviceSynchronize", 30, 5, 2), 100) is None
    overlapping = waiting_scene(make_scene("two"))
    overlapping.call("cudaLaunchKernel", 13, 2, 9).kernel("gemm", 15, 40, 9, stream=8)
    assert model(overlapping, 130) is None
