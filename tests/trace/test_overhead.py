"""Where CUPTI's overhead rows go: the file gives them a process and thread that no operator has."""

import numpy as np

from perfladder.trace.model import Category
from perfladder.trace.operators import operator_table
from perfladder.trace.regions import report_regions


def overhead(scene, name, start, duration):
    return scene.add("overhead", name, start, duration, pid=-1, tid=0)


def self_times(trace):
    return {row.key: row.self_cpu_time_total_us for row in operator_table(trace)}


def test_overhead_is_taken_out_of_the_operator_around_it(scene) -> None:
    scene.run(0, 0, 1000).op("aten::mm", 100, 500).call("cudaLaunchKernel", 400, 100, 1).kernel("k", 700, 50, 1)
    overhead(scene, "Activity Buffer Request", 150, 200)
    overhead(scene, "Lazy Function Loading", 410, 30)
    trace = scene.trace()
    times = self_times(trace)
    assert (times["aten::mm"], times["cudaLaunchKernel"], times["Activity Buffer Request"]) == (200, 70, 200)
    host = report_regions(trace).runs[0].host
    assert (host.profiler_us, host.runtime_other_us, host.operator_dispatch_us) == (200, 30, 200)
    assert (host.kernel_launch_us, host.python_us, host.total_us) == (70, 500, 1000)


def test_thread_with_an_operator_around_it_is_the_one(scene) -> None:
    scene.run(0, 0, 1000).op("aten::mm", 100, 500, tid=2)
    overhead(scene, "Activity Buffer Request", 150, 200)
    assert self_times(scene.trace())["aten::mm"] == 300


def test_what_is_unclear_or_cuts_spans_counts_nowhere(scene) -> None:
    scene.op("a", 0, 100).op("b", 0, 100, tid=2)
    overhead(scene, "in two threads", 10, 20)
    scene.op("c", 200, 100).op("d", 220, 10)
    overhead(scene, "cuts the end of c", 290, 50)
    overhead(scene, "cuts the end of d", 225, 30)
    overhead(scene, "between operators", 150, 10)
    trace = scene.trace()
    assert self_times(trace) == {"a": 100, "b": 100, "c": 90, "d": 10}
    assert len(trace.events_of(Category.OVERHEAD)) == 4
    assert trace.forest.num_overlaps == 0


def test_trace_without_host_spans_keeps_its_overheads(scene) -> None:
    overhead(scene, "Activity Buffer Request", 0, 10)
    trace = scene.kernel("k", 5, 1).trace()
    assert trace.forest.num_spans == 0
    assert np.isin(Category.OVERHEAD, trace.category)
