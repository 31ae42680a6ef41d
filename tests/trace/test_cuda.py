"""Small real CUDA traces against torch's own rows of the same windows, and against plain loops over the JSON."""

from __future__ import annotations

import gzip
import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perfladder.trace.attribution import attribute
from perfladder.trace.kernels import list_kernels, summarize_kernels
from perfladder.trace.model import Category, Trace
from perfladder.trace.operators import operator_table
from perfladder.trace.regions import RegionReport, report_regions
from perfladder.trace.residual import Part
from perfladder.trace.timeline import report_timeline

DATA = Path(__file__).parents[1] / "data" / "cuda"
SCENES = ["eager", "graph", "compiled", "annotated", "streams", "backward", "threads"]
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
NET = "untuned_module:net"
US = pytest.approx


@cache
def read(scene: str) -> Trace:
    return Trace.read(DATA / f"{scene}.json.gz")


@cache
def report(scene: str) -> RegionReport:
    return report_regions(read(scene))


@cache
def plain(scene: str) -> list[dict[str, Any]]:
    """The spans as the JSON has them."""
    with gzip.open(DATA / f"{scene}.json.gz") as file:
        return [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]


@cache
def torch_says(scene: str) -> dict[str, Any]:
    return json.loads((DATA / f"{scene}.torch.json").read_text())


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


def is_inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and end(inner) <= end(outer) + 5e-4


def launches(scene: str) -> dict[int, dict[str, Any]]:
    calls = [event for event in plain(scene) if event["cat"] in ("cuda_runtime", "cuda_driver")]
    return {event["args"]["correlation"]: event for event in calls if event["args"].get("correlation")}


def work_inside(scene: str, span: dict[str, Any]) -> float:
    """Device time whose launch lies in a span, by a plain loop."""
    launch = launches(scene)
    return sum(
        event["dur"]
        for event in plain(scene)
        if event["cat"] in WORK and is_inside(launch[event["args"]["correlation"]], span)
    )


def spans_named(scene: str, name: str) -> list[dict[str, Any]]:
    return sorted((event for event in plain(scene) if event["name"] == name), key=lambda event: event["ts"])


def union_us(events: list[dict[str, Any]]) -> float:
    covered, reach = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        covered += max(end(event) - max(event["ts"], reach), 0.0)
        reach = max(reach, end(event))
    return covered


@pytest.mark.parametrize("scene", SCENES)
def test_rows_agree_with_torch(scene: str) -> None:
    """Counts and host times to rounding, device times too, but for what torch counts twice or not at all.

    torch gives an overhead row, and so all that is around it, the device time of the launch beside it once more. And it
    leaves out kernels that are launched straight from a `record_function` scope, without an operator between.
    """
    ours = {(row.key, row.device_type, row.is_annotation): row for row in operator_table(read(scene))}
    theirs = {(row["key"], row["device_type"], row["is_annotation"]): row for row in torch_says(scene)["rows"]}
    assert set(ours) == set(theirs)
    overheads = {event["name"] for event in plain(scene) if event["cat"] == "overhead"}
    twice = [row["self_device_time_total"] for row in theirs.values() if row["key"] in overheads]
    sums = [sum(part) for count in range(len(twice) + 1) for part in itertools.combinations(twice, count)]
    for key, row in theirs.items():
        assert ours[key].count == row["count"], key
        assert ours[key].cpu_time_total_us == US(row["cpu_time_total"], abs=5e-3), key
        if (scene, row["key"]) != ("threads", "aten::mm"):
            assert ours[key].self_cpu_time_total_us == US(row["self_cpu_time_total"], abs=5e-3), key
        if row["key"] not in overheads:
            left_out = ours[key].self_device_time_total_us if key[1:] == ("CPU", True) else 0.0
            own = row["self_device_time_total"] + left_out
            assert ours[key].self_device_time_total_us == US(own, abs=5e-3), key
            too_much = row["device_time_total"] + left_out - ours[key].device_time_total_us
            assert min(abs(too_much - expected) for expected in sums) < 5e-3, key


@pytest.mark.parametrize("scene", SCENES)
def test_device_time_is_the_sum_of_the_work(scene: str) -> None:
    trace = read(scene)
    total_us = sum(event["dur"] for event in plain(scene) if event["cat"] in WORK)
    assert list_kernels(trace).total_us == US(total_us)
    assert sum(row.total_us for row in summarize_kernels(list_kernels(trace))) == US(total_us)
    assert trace.device_join.num_unlinked == 0
    assert trace.device_names == ("NVIDIA H200",)


@pytest.mark.parametrize("scene", [scene for scene in SCENES if scene != "annotated"])
def test_runs_agree_with_a_plain_loop_and_reconcile(scene: str) -> None:
    runs = report(scene).runs
    assert len(runs) == torch_says(scene)["facts"]["num_runs"]
    assert report(scene).unattributed_device_time_us == 0
    for run in runs:
        (span,) = spans_named(scene, f"perfladder.profiled_run:{run.run_index}")
        assert run.wall_time_us == US(span["dur"])
        if scene not in ("backward", "threads"):  # there work is launched by other threads
            assert run.device_time_us == US(work_inside(scene, span))
        assert sum(row.cpu_time_fraction for row in run.regions) + run.residual.cpu_time_fraction == US(1, abs=1e-3)
        fraction = sum(row.device_time_fraction for row in run.regions) + run.residual.device_time_fraction
        assert fraction == US(1, abs=1e-3)
        assert run.residual.host.total_us == US(run.residual.cpu_time_us, rel=1e-6)
        idle = run.device
        assert idle.waiting_for_launch_us + idle.in_synchronization_us + idle.other_us == US(idle.idle_us)


@pytest.mark.parametrize("scene", ["eager", "graph", "compiled"])
def test_region_agrees_with_a_plain_loop(scene: str) -> None:
    for run, span in zip(report(scene).runs, spans_named(scene, f"perfladder.{NET}"), strict=True):
        (row,) = run.regions
        assert (row.region_id, row.calls) == (NET, 1)
        assert row.cpu_time_us == US(span["dur"])
        assert row.device_time_us == US(work_inside(scene, span))


@pytest.mark.parametrize("scene", SCENES)
def test_self_times_of_a_thread_add_up_to_its_outermost_spans(scene: str) -> None:
    forest = read(scene).forest
    assert forest.num_overlaps == 0
    for thread in np.unique(forest.thread):
        mine = forest.thread == thread
        assert forest.self_ns[mine].sum() == forest.duration_ns[mine & (forest.parent < 0)].sum()


def test_parts_of_a_residual_by_a_plain_loop() -> None:
    """Each part on its own: runtime calls by their names, operators by what is left of them, Python by the gaps."""
    scene = "eager"
    for run in report(scene).runs:
        (span,) = spans_named(scene, f"perfladder.profiled_run:{run.run_index}")
        regions = [e for e in plain(scene) if e["name"].startswith("perfladder.untuned") and is_inside(e, span)]
        inside = [e for e in plain(scene) if e is not span and e["cat"] in (*HOST, "overhead") and is_inside(e, span)]
        outside = [e for e in inside if not any(is_inside(e, region) for region in regions)]
        calls = [e for e in outside if e["cat"] == "cuda_runtime"]
        overheads = [e for e in outside if e["cat"] == "overhead"]
        operators = [e for e in outside if e["cat"] == "cpu_op"]
        waits_us = sum(e["dur"] for e in calls if "Synchronize" in e["name"])
        launches_us = sum(e["dur"] for e in calls if "Launch" in e["name"] or "Memset" in e["name"])
        copies_us = sum(e["dur"] for e in calls if "Memcpy" in e["name"])
        host = run.residual.host
        assert host.synchronization_us == US(waits_us)
        assert host.kernel_launch_us == US(launches_us)
        assert host.copy_h2d_us + host.copy_d2h_us == US(copies_us)
        assert host.copy_h2d_us > 0
        assert host.copy_d2h_us > 0
        assert host.profiler_us == US(union_us(overheads))
        assert host.operator_dispatch_us == US(union_us(operators) - union_us(calls) - union_us(overheads), abs=0.01)
        assert host.python_us == US(span["dur"] - union_us([*outside, *regions]), abs=0.01)
        assert host.operator_compute_us == 0
        parts_us = sum(getattr(host, f"{part.name.lower()}_us") for part in Part)
        assert parts_us >= 0.95 * run.residual.cpu_time_us


def test_call_sites_that_force_a_wait_are_named() -> None:
    for run in report("eager").runs:
        sites = {(site.outer_operator, site.operator): site for site in run.residual.host.synchronizations}
        item = sites["aten::item", "aten::_local_scalar_dense"]
        assert (item.call, item.count, item.region_id) == ("cudaStreamSynchronize", 1, None)
        assert ("aten::to", "aten::copy_") in sites


def test_copies_say_their_bytes() -> None:
    copies = {row.kind: row for row in report_timeline(read("eager")).copies}
    facts = torch_says("eager")["facts"]
    assert copies["HtoD"].num_bytes == 3 * facts["host_to_device_bytes"]
    assert copies["DtoH"].num_bytes == 3 * (facts["device_to_host_bytes"] + 4)  # and one float for `.item()`


def test_the_profilers_own_buffers_are_a_part_of_their_own() -> None:
    """The first call of a window asks for a buffer, which takes milliseconds; a plain run does not pay that."""
    first, *others = report("eager").runs
    (overhead,) = (event for event in plain("eager") if event["cat"] == "overhead")
    assert first.host.profiler_us == US(overhead["dur"])
    assert [run.host.profiler_us for run in others] == [0, 0]
    assert [warning.code for warning in report("eager").warnings] == ["FIRST_RUN_SLOW"]
    runs = report("graph").runs
    assert runs[0].host.runtime_other_us > 31.035  # "Lazy Function Loading" is the runtime's


def test_one_graph_launch_owns_all_its_kernels() -> None:
    trace = read("graph")
    join = trace.device_join
    names = np.array(trace.names)[trace.forest.name_id[join.launch]]
    owned = np.unique(join.launch[names == "cudaGraphLaunch"], return_counts=True)[1]
    by_loop = [
        sum(
            event["cat"] in WORK and event["args"]["correlation"] == launch["args"]["correlation"]
            for event in plain("graph")
        )
        for launch in spans_named("graph", "cudaGraphLaunch")
    ]
    assert owned.tolist() == by_loop
    assert len(set(by_loop)) == 1
    assert by_loop[0] > 5
    assert {row.region for row in summarize_kernels(list_kernels(trace)) if row.operator is None} == {NET}


def test_graph_kernels_take_about_as_long_as_the_replay_by_events() -> None:
    """R40: the sum of one replay's kernels against CUDA events around an unprofiled replay."""
    for run in report("graph").runs:
        assert 0.5 < run.regions[0].device_time_us / torch_says("graph")["facts"]["replay_us_by_events"] < 1.05


@pytest.mark.parametrize(
    ("version", "is_told"), [(130001, True), (26, True), (None, True), (130101, False), (130200, False)]
)
def test_graph_times_are_untrusted_below_the_fixed_version(version: int | None, is_told: bool, tmp_path: Path) -> None:
    """R40."""
    text = gzip.decompress((DATA / "graph.json.gz").read_bytes()).decode()
    line = '"cupti_version": 130001,'
    assert line in text
    path = tmp_path / "trace.json"
    path.write_text(text.replace(line, "" if version is None else f'"cupti_version": {version},'))
    codes = [warning.code for warning in Trace.read(path).warnings]
    assert codes == (["UNTRUSTED_GRAPH_TIMES"] if is_told else [])
    assert not read("eager").warnings


def test_compiled_module_shows_its_fused_kernels_in_its_region() -> None:
    rows = summarize_kernels(list_kernels(read("compiled")))
    fused = [row for row in rows if row.kernel.startswith("triton_")]
    assert fused
    assert {row.region for row in rows} == {NET}
    assert {row.count for row in fused} == {3}


def test_two_streams_are_busy_by_union() -> None:
    timeline = report_timeline(read("streams"))
    work = [event for event in plain("streams") if event["cat"] in WORK]
    by_stream = {row.stream: row for row in timeline.streams}
    assert len(by_stream) == 2
    for stream, row in by_stream.items():
        mine = [event for event in work if event["args"]["stream"] == stream]
        assert (row.num_events, row.busy_us) == (len(mine), US(union_us(mine), abs=0.01))
    (device,) = timeline.devices
    assert device.busy_us == US(union_us(work), abs=0.01)
    assert device.busy_us < 0.9 * sum(row.busy_us for row in timeline.streams)
    first, *others = report("streams").runs
    assert first.device.busy_us == US(first.device_time_us)  # its first launch took longer than the other's kernels
    for run in others:
        assert run.device.busy_us < 0.9 * run.device_time_us


def test_backward_outside_every_region_belongs_to_its_forward_region() -> None:
    """T6, R16: kernels of the backward pass come from another thread, which carries no region."""
    trace = read("backward")
    table = list_kernels(trace, attribute(trace))
    rows = [table.row(index) for index in range(table.num_kernels)]
    backward = [row for row in rows if (row.outer_operator or "").startswith("autograd::engine")]
    lost = [row for row in backward if row.region is None]
    assert len(backward) > 20
    # A gradient that is only accumulated has no forward operator.
    assert {row.outer_operator for row in lost} == {
        "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    }
    convolution = [row for row in backward if "ConvolutionBackward" in row.outer_operator]
    assert {row.region for row in convolution} == {f"{NET}.conv"}
    for run in report("backward").runs:
        assert 0 < run.residual.device_time_fraction < 0.05


def test_another_threads_kernels_belong_to_its_region() -> None:
    """R30. The second thread's runtime calls carry the number of the first, ended one: the operator links them."""
    for run in report("threads").runs:
        main, worker = run.regions
        assert (main.region_id, worker.region_id) == ("untuned_module:main", "untuned_module:worker")
        assert worker.cpu_time_us == 0
        assert worker.other_threads_cpu_time_us > 0
        kernels = [row for row in list_rows("threads") if row.run == run.run_index and row.operator == "aten::mm"]
        assert len(kernels) == 3
        assert worker.device_time_us == US(sum(row.duration_us for row in kernels))


def list_rows(scene: str) -> list[Any]:
    table = list_kernels(read(scene))
    return [table.row(index) for index in range(table.num_kernels)]


def test_annotation_is_a_scope_on_the_host_and_a_span_on_the_device() -> None:
    """R06: one name, two rows, never merged; the device row holds the gaps between the kernels too."""
    trace = read("annotated")
    rows = {(row.key, row.device_type): row for row in operator_table(trace) if row.is_annotation}
    on_device = [event for event in plain("annotated") if event["cat"] == "gpu_user_annotation"]
    for name, calls in torch_says("annotated")["facts"]["calls"].items():
        host, device = rows[name, "CPU"], rows[name, "CUDA"]
        spans = [event for event in spans_named("annotated", name) if event["cat"] == "user_annotation"]
        assert (host.count, device.count, len(spans)) == (calls, calls, calls)
        assert host.device_time_total_us == US(sum(work_inside("annotated", span) for span in spans))
        assert device.device_time_total_us == US(sum(event["dur"] for event in on_device if event["name"] == name))
        assert device.device_time_total_us > host.device_time_total_us
    work_us = sum(event["dur"] for event in plain("annotated") if event["cat"] in WORK)
    assert report_timeline(trace).devices[0].busy_us == US(work_us)
    tree = {node.region_id: node for node in report("annotated").region_tree}
    assert tree["annotation:encode"].calls == 2
    assert trace.events_of(Category.GPU_ANNOTATION).size == 3
