"""Kernels of graph replays, paired with the same work without graphs."""

from pathlib import Path

import pytest

from perfladder.trace.graphs import attribute_replays
from perfladder.trace.kernels import list_kernels
from perfladder.trace.model import Trace

DATA = Path(__file__).parents[1] / "data" / "cuda"


def recorded(name):
    return list_kernels(Trace.read(DATA / f"{name}.json.gz"), only_runs=True)


def plain_scene(scene, names):
    scene.run(0, 0, 1000)
    for index, name in enumerate(names):
        begin = index * 100
        scene.label("untuned_module", f"m.{name}", begin, 90).label("function", f"f_{name}", begin + 1, 80)
        scene.op(f"aten::{name}", begin + 2, 70).call("cudaLaunchKernel", begin + 5, 5, index + 1)
        scene.kernel(name, begin + 20, 10, index + 1)
    return list_kernels(scene.trace())


def graph_scene(scene, names):
    scene.run(0, 0, 1000).label("untuned_module", "m", 0, 900).call("cudaGraphLaunch", 1, 5, 7)
    for index, name in enumerate(names):
        scene.kernel(name, 20 + 10 * index, 5, 7)
    scene.op("aten::sum", 500, 50).call("cudaLaunchKernel", 505, 5, 8).kernel("sum", 520, 5, 8)
    return list_kernels(scene.trace())


def test_same_sequence_is_attributed_wholly(scene, make_scene):
    plain = plain_scene(make_scene(), ["a", "b", "a"])
    [replay] = attribute_replays(graph_scene(scene, ["a", "b", "a"]), plain)
    assert (replay.region, replay.run, replay.confidence) == ("untuned_module:m", 0, 1)
    assert [(k.kernel, k.region, k.function, k.operator, k.duration_us) for k in replay.kernels] == [
        (name, f"untuned_module:m.{name}", f"f_{name}", f"aten::{name}", 5) for name in ("a", "b", "a")
    ]


def test_kernel_that_is_not_there_lowers_the_confidence(scene, make_scene):
    plain = plain_scene(make_scene(), ["a", "b", "d"])
    [replay] = attribute_replays(graph_scene(scene, ["a", "b", "c", "d"]), plain)
    assert replay.confidence == 0.75
    assert [kernel.region for kernel in replay.kernels] == [
        "untuned_module:m.a",
        "untuned_module:m.b",
        None,
        "untuned_module:m.d",
    ]


def test_without_replays_or_without_a_plain_run_nothing_is_claimed(scene, make_scene):
    plain = plain_scene(make_scene(), ["a"])
    assert attribute_replays(plain, plain) == []
    nothing = list_kernels(make_scene("nothing").op("aten::add", 0, 1).kernel("z", 1, 1).trace(), only_runs=True)
    [replay] = attribute_replays(graph_scene(scene, ["a"]), nothing)
    assert (replay.confidence, replay.kernels[0].region) == (0, None)


def test_recorded_graph_has_the_regions_of_the_recorded_eager_run():
    """The same network, once replayed as a graph and once eager; see the note beside the traces."""
    replays = attribute_replays(recorded("graph"), recorded("eager"))
    assert [(replay.region, replay.run) for replay in replays] == [("untuned_module:net", run) for run in range(3)]
    for replay in replays:
        assert len(replay.kernels) == 12
        assert replay.confidence == 1
        regions = [(kernel.region or "").removeprefix("untuned_module:net.") for kernel in replay.kernels]
        assert list(dict.fromkeys(regions)) == ["conv", "attention", "out"]
        by_operator = {kernel.operator: kernel for kernel in replay.kernels}
        assert by_operator["aten::silu"].outer_operator == "aten::silu"
        assert "fmha" in by_operator["aten::_efficient_attention_forward"].kernel


def test_compiled_trace_is_no_pattern_for_the_graph():
    assert all(replay.confidence < 1 for replay in attribute_replays(recorded("graph"), recorded("compiled")))


@pytest.mark.parametrize("name", ["eager", "compiled"])
def test_recorded_traces_without_a_graph_have_no_replay(name):
    assert attribute_replays(recorded(name), recorded("eager")) == []
