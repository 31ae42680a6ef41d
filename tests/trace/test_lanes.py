import pytest

from perfladder.trace.attribution import attribute
from perfladder.trace.lanes import lay_out_run


def stretches(lane) -> list[tuple[str | None, float, float]]:
    return [(span.region_id, round(span.start_us, 3), round(span.duration_us, 3)) for span in lane]


def test_calls_of_flat_regions_stand_where_they_were_and_nested_ones_are_part_of_them(scene) -> None:
    scene.run(0, 1000, 10_000)
    scene.label("untuned_module", "unet", 2000, 3000).label("untuned_module", "unet.mid", 2500, 1000)
    scene.label("untuned_module", "vae", 6000, 1000)
    scene.label("untuned_module", "unet", 8000, 2000)
    trace = scene.trace()
    lanes = lay_out_run(trace, attribute(trace), 0)
    assert lanes.wall_us == pytest.approx(10_000)
    assert stretches(lanes.host) == [
        ("untuned_module:unet", 1000, 3000),
        ("untuned_module:vae", 5000, 1000),
        ("untuned_module:unet", 7000, 2000),
    ]
    assert (lanes.other_threads, lanes.device) == ((), ())


def test_device_work_belongs_to_the_region_that_launched_it_and_may_outlast_its_call(scene) -> None:
    scene.run(0, 0, 10_000)
    scene.label("untuned_module", "unet", 1000, 500).call("cudaLaunchKernel", 1100, 10, 1)
    scene.call("cudaLaunchKernel", 3000, 10, 2)
    scene.kernel("gemm", 2000, 4000, 1)
    scene.kernel("add", 7000, 100, 2)
    trace = scene.trace()
    lanes = lay_out_run(trace, attribute(trace), 0)
    assert stretches(lanes.device) == [("untuned_module:unet", 2000, 4000), (None, 7000, 100)]


def test_calls_nearer_together_than_one_step_are_one_stretch(scene) -> None:
    scene.run(0, 0, 20_000)
    for start in (1000, 1105, 1210, 5000):
        scene.label("untuned_module", "step", start, 100)
    trace = scene.trace()
    lanes = lay_out_run(trace, attribute(trace), 0)
    assert lanes.resolution_us == 10
    assert stretches(lanes.host) == [("untuned_module:step", 1000, 310), ("untuned_module:step", 5000, 100)]


def test_each_run_has_its_own_lanes(scene) -> None:
    scene.run(0, 0, 5000).label("untuned_module", "unet", 1000, 100)
    scene.run(1, 6000, 5000).label("untuned_module", "unet", 8000, 200)
    trace = scene.trace()
    attribution = attribute(trace)
    assert stretches(lay_out_run(trace, attribution, 1).host) == [("untuned_module:unet", 2000, 200)]
    assert stretches(lay_out_run(trace, attribution, 0).host) == [("untuned_module:unet", 1000, 100)]


@pytest.mark.parametrize(
    ("vae_start", "gap"),
    [
        (6000, ("untuned_module:unet", "untuned_module:vae", 2000.0)),
        (4000, ("untuned_module:vae", None, 5000.0)),
    ],
)
def test_longest_stretch_of_the_host_outside_regions_has_its_neighbours(scene, vae_start, gap) -> None:
    scene.run(0, 1000, 9000)
    scene.label("untuned_module", "unet", 2000, 2000).label("untuned_module", "unet.mid", 2500, 1000)
    scene.label("untuned_module", "vae", vae_start, 1000)
    if vae_start == 6000:
        scene.label("untuned_module", "post", 8000, 1500)
    trace = scene.trace()
    found = lay_out_run(trace, attribute(trace), 0).longest_gap()
    assert (found.after, found.before, round(found.duration_us, 3)) == gap


def test_run_without_regions_has_no_such_stretch(scene) -> None:
    scene.run(0, 1000, 9000)
    trace = scene.trace()
    assert lay_out_run(trace, attribute(trace), 0).longest_gap() is None
