import pytest

from perfladder.trace.attribution import attribute
from perfladder.trace.kernels import list_kernels, summarize_kernels
from perfladder.trace.model import Trace
from perfladder.trace.operators import operator_table
from perfladder.trace.regions import build_region_tree, report_regions
from perfladder.trace.residual import NO_OPERATOR
from perfladder.trace.timeline import report_timeline
from perfladder.trace.warnings import WarningCode

UNTUNED = "untuned_module"


def codes(report) -> set[WarningCode]:
    return {warning.code for warning in report.warnings}


def rows(run) -> dict[str, object]:
    return {row.region_id: row for row in run.regions}


def check_sums(run) -> None:
    cpu = sum(row.cpu_time_fraction for row in run.regions) + run.residual.cpu_time_fraction
    assert cpu == pytest.approx(1, abs=1e-9)
    assert run.residual.host.total_us == pytest.approx(run.residual.cpu_time_us, abs=1e-6)
    assert run.host.total_us == pytest.approx(run.cpu_time_us, abs=1e-6)
    if run.device_time_us is not None:
        device = sum(row.device_time_fraction for row in run.regions) + run.residual.device_time_fraction
        assert device == pytest.approx(1, abs=1e-9)
        idle = run.device
        assert idle.busy_us + idle.idle_us == pytest.approx(idle.window_us)
        parts = idle.waiting_for_launch_us + idle.in_synchronization_us + idle.other_us
        assert parts == pytest.approx(idle.idle_us)


def test_host_only_run_splits_into_regions_and_residual(scene) -> None:
    scene.run(0, 0, 100)
    scene.label(UNTUNED, "unet", 10, 30).op("aten::conv2d", 12, 14).op("aten::convolution", 14, 10)
    scene.label(UNTUNED, "unet", 50, 20).op("aten::add", 80, 6)
    report = report_regions(scene.trace())
    (run,) = report.runs
    check_sums(run)
    (unet,) = run.regions
    assert (unet.region_id, unet.calls, unet.cpu_time_us, unet.device_time_us) == ("untuned_module:unet", 2, 50, None)
    assert unet.cpu_time_fraction == 0.5
    assert (run.run_index, run.wall_time_us, run.device_time_us, run.device) == (0, 100, None, None)
    assert run.residual.cpu_time_us == 50
    assert run.residual.host.operator_compute_us == 6
    assert run.residual.host.python_us == 44
    assert run.host.operator_dispatch_us == 4  # conv2d around convolution: too short to do work of its own
    assert run.host.operator_compute_us == 16
    assert (run.host.num_operators, run.residual.host.num_operators) == (2, 1)  # conv2d and add
    assert codes(report) == set()


def test_nested_regions_are_flat_once_and_a_tree(scene) -> None:
    """R04: totals of nested scopes exceed the wall; the flat set does not overlap, the tree has self times."""
    scene.run(0, 0, 100).label(UNTUNED, "a", 10, 60).label(UNTUNED, "a.b", 20, 30).label(UNTUNED, "a.b.c", 25, 5)
    scene.label(UNTUNED, "a.b", 55, 10).label(UNTUNED, "a.b", 80, 10)
    report = report_regions(scene.trace())
    check_sums(report.runs[0])
    flat = rows(report.runs[0])
    assert {key: (row.calls, row.cpu_time_us, row.self_cpu_time_us) for key, row in flat.items()} == {
        "untuned_module:a": (1, 60, 20),
        "untuned_module:a.b": (1, 10, 10),
    }
    a, direct = report.region_tree
    assert (a.region_id, a.calls, a.cpu_time_us, a.self_cpu_time_us) == ("untuned_module:a", 1, 60, 20)
    assert (direct.region_id, direct.cpu_time_us) == ("untuned_module:a.b", 10)
    (b,) = a.children
    assert (b.calls, b.cpu_time_us, b.self_cpu_time_us) == (2, 40, 35)
    assert b.children[0].cpu_time_us == 5


def test_region_that_holds_a_managed_one_is_entered(scene) -> None:
    scene.run(0, 0, 100).label(UNTUNED, "pipe", 0, 80).label("aot_module", "unet", 10, 30).label(UNTUNED, "vae", 50, 20)
    run = report_regions(scene.trace()).runs[0]
    check_sums(run)
    assert {key: row.cpu_time_us for key, row in rows(run).items()} == {"aot_module:unet": 30, "untuned_module:vae": 20}
    assert run.residual.cpu_time_us == 50


def test_region_kinds_can_be_chosen(scene) -> None:
    scene.run(0, 0, 100).label("stage", "s", 0, 80).label(UNTUNED, "vae", 50, 20)
    trace = scene.trace()
    run = report_regions(trace, attribute(trace, region_kinds={UNTUNED})).runs[0]
    assert set(rows(run)) == {"untuned_module:vae"}


def test_several_runs_and_a_warm_up(scene) -> None:
    scene.label(UNTUNED, "m", 1, 5)
    scene.run(0, 10, 10).label(UNTUNED, "m", 12, 4).run(1, 30, 20).label(UNTUNED, "m", 32, 10)
    report = report_regions(scene.trace())
    assert [(run.run_index, run.wall_time_us, run.regions[0].cpu_time_us) for run in report.runs] == [
        (0, 10, 4),
        (1, 20, 10),
    ]
    assert report.region_tree[0].calls == 2
    assert build_region_tree(scene.trace(), run=1)[0].cpu_time_us == 10
    assert codes(report) == {WarningCode.EVENTS_OUTSIDE_RUNS}


def cuda_scene(scene):
    """One run, one region; hand totals in the test below."""
    scene.run(0, 0, 200)
    scene.label(UNTUNED, "unet", 10, 40)
    scene.op("aten::mm", 12, 20).call("cudaLaunchKernel", 15, 6, 1)
    scene.op("aten::item", 60, 80).op("aten::_local_scalar_dense", 62, 76)
    scene.call("cudaMemcpyAsync", 64, 10, 2).call("cudaStreamSynchronize", 76, 60, 3)
    scene.op("aten::to", 150, 20).call("cudaMemcpyAsync", 152, 9, 4)
    scene.call("cudaMalloc", 180, 5)
    scene.kernel("gemm", 40, 50, 1)
    scene.copy("Memcpy DtoH (Device -> Pageable)", 100, 5, 2, args={"bytes": 4})
    scene.copy("Memcpy HtoD (Pageable -> Device)", 160, 10, 4, args={"bytes": 4000})
    scene.kernel("Stream Sync", 76, 60, 3, cat="cuda_sync")
    return scene


def test_residual_says_what_it_is_made_of(scene) -> None:
    report = report_regions(cuda_scene(scene).trace())
    (run,) = report.runs
    check_sums(run)
    host = run.residual.host
    assert run.residual.cpu_time_us == 160
    assert host.synchronization_us == 60
    assert host.copy_d2h_us == 10
    assert host.copy_h2d_us == 9
    assert host.runtime_other_us == 5
    assert host.kernel_launch_us == 0
    assert host.operator_dispatch_us == (80 - 76) + (76 - 70) + (20 - 9)
    assert host.operator_compute_us == 0
    assert host.python_us == 200 - 40 - 80 - 20 - 5
    assert run.host.kernel_launch_us == 6
    (site,) = host.synchronizations
    assert (site.operator, site.outer_operator, site.call) == (
        "aten::_local_scalar_dense",
        "aten::item",
        "cudaStreamSynchronize",
    )
    assert (site.region_id, site.count, site.total_us) == (None, 1, 60)


def test_device_time_by_region_and_idle_by_reason(scene) -> None:
    """T3: the synchronization row on the device's side is no work."""
    (run,) = report_regions(cuda_scene(scene).trace()).runs
    unet = run.regions[0]
    assert (unet.device_time_us, unet.device_span_us) == (50, 50)
    assert run.device_time_us == 65
    assert run.residual.device_time_us == 15
    idle = run.device
    assert (idle.window_us, idle.busy_us, idle.idle_us) == (200, 65, 135)
    # Gaps: 0-40, launched at 15; 90-100, launched at 64; 105-160, launched at 152; 170-200, nothing more.
    # The host waits from 76 to 136.
    assert idle.in_synchronization_us == 136 - 105
    assert idle.waiting_for_launch_us == 15 + (152 - 136) + 30
    assert idle.other_us == 25 + 10 + 8
    assert idle.edge_us == 40 + 30


def test_synchronization_outside_operators_and_inside_regions_is_named(scene) -> None:
    scene.run(0, 0, 100).label(UNTUNED, "m", 10, 50).call("hipDeviceSynchronize", 20, 30, 5)
    scene.call("cudaLaunchKernel", 2, 1, 1).kernel("k", 5, 10, 1)
    run = report_regions(scene.trace()).runs[0]
    (site,) = run.host.synchronizations
    assert (site.operator, site.region_id, site.total_us) == (NO_OPERATOR, "untuned_module:m", 30)
    assert run.residual.host.synchronizations == ()


def test_garbage_collection_is_a_part_of_its_own(scene) -> None:
    scene.run(0, 0, 100).label("garbage_collection", "2", 10, 30).op("aten::del", 15, 5)
    run = report_regions(scene.trace()).runs[0]
    check_sums(run)
    assert run.residual.host.garbage_collection_us == 30
    assert run.residual.host.python_us == 70
    assert run.regions == ()


def test_graph_launch_owns_all_its_kernels(scene) -> None:
    """T1: one correlation id, one launch, fifty kernels."""
    scene.run(0, 0, 1000).label(UNTUNED, "graph", 10, 20).call("cudaGraphLaunch", 12, 8, 77)
    for index in range(50):
        scene.kernel(f"k{index % 5}", 100 + index * 10, 4, 77)
    run = report_regions(scene.trace()).runs[0]
    check_sums(run)
    assert run.regions[0].device_time_us == 200
    assert run.regions[0].device_span_us == 494
    assert run.host.kernel_launch_us == 8


def test_correlation_ids_join_within_one_process(make_scene) -> None:
    """T1, T4: two ranks in one file use the same ids; the device rows carry the device in place of the process."""
    scene = make_scene()
    for rank, pid in enumerate((100, 200)):
        scene.pid = pid
        scene.run(rank, 0, 100).label(UNTUNED, f"m{rank}", 10, 50).call("cudaLaunchKernel", 12, 5, 1)
        scene.call("cudaLaunchKernel", 20, 5, 1000 + rank)  # an id that only this process has
        scene.kernel("k", 30 + rank, 10 * (rank + 1), 1, device=rank)
        scene.kernel("k", 60 + rank, 1, 1000 + rank, device=rank)
    trace = scene.trace()
    report = report_regions(trace)
    assert trace.distributed is None
    assert WarningCode.SEVERAL_PROCESSES in {warning.code for warning in trace.warnings}
    found = [rows(run)[f"untuned_module:m{run.run_index}"].device_time_us for run in report.runs]
    assert found == [11, 21]


def test_kernels_of_an_unclear_process_stay_unlinked(make_scene) -> None:
    scene = make_scene()
    for pid in (100, 200):
        scene.pid = pid
        scene.op("aten::mm", 10, 50).call("cudaLaunchKernel", 12, 5, 1)
    scene.kernel("k", 30, 10, 1)
    trace = scene.trace()
    assert trace.device_join.host.tolist() == [-1]
    assert trace.device_join.num_ambiguous == 1
    assert WarningCode.AMBIGUOUS_CORRELATION in codes(report_regions(trace))


def test_reused_correlation_id_joins_the_latest_launch_before(scene) -> None:
    scene.run(0, 0, 200).label(UNTUNED, "a", 0, 20).call("cudaLaunchKernel", 5, 2, 9)
    scene.label(UNTUNED, "b", 100, 20).call("cudaLaunchKernel", 105, 2, 9)
    scene.kernel("k", 50, 3, 9).kernel("k", 150, 4, 9)
    report = report_regions(scene.trace())
    found = {key: row.device_time_us for key, row in rows(report.runs[0]).items()}
    assert found == {"untuned_module:a": 3, "untuned_module:b": 4}
    assert WarningCode.DUPLICATED_CORRELATION in codes(report)


def test_kernel_without_launch_is_counted_and_unlinked(scene) -> None:
    """T2: cut at the start of the window; the work is real."""
    scene.run(0, 0, 100).label(UNTUNED, "m", 10, 20).call("cudaLaunchKernel", 12, 5, 1).kernel("k", 30, 10, 1)
    scene.kernel("orphan", 50, 20, 999).kernel("early", -30, 5, 998)
    report = report_regions(scene.trace())
    (run,) = report.runs
    check_sums(run)
    assert run.device_time_us == 30
    assert run.residual.device_time_us == 20
    assert run.residual.unlinked_device_time_us == 20
    assert run.device.busy_us == 30
    assert report.unattributed_device_time_us == 5
    assert report.unattributed_device_time_fraction == pytest.approx(5 / 35)
    assert {WarningCode.UNLINKED_DEVICE_EVENTS, WarningCode.UNATTRIBUTED_DEVICE_TIME} <= codes(report)


def test_external_id_links_where_the_launch_is_missing(scene) -> None:
    scene.run(0, 0, 100).label(UNTUNED, "m", 10, 20).op("aten::mm", 12, 10, args={"External id": 5})
    scene.kernel("k", 40, 10, 3, args={"External id": 5})
    run = report_regions(scene.trace()).runs[0]
    assert run.regions[0].device_time_us == 10


def test_work_of_other_threads_is_attributed_by_its_launch(scene) -> None:
    """R16: a worker thread has no region; a region on a worker thread is in no host fraction."""
    scene.run(0, 0, 100).label(UNTUNED, "main", 10, 20)
    scene.label(UNTUNED, "worker", 15, 40, tid=2).call("cudaLaunchKernel", 20, 5, 1, tid=2).kernel("k", 30, 10, 1)
    scene.op("aten::mm", 60, 10, tid=3).call("cudaLaunchKernel", 62, 5, 2, tid=3).kernel("k", 70, 7, 2)
    report = report_regions(scene.trace())
    (run,) = report.runs
    check_sums(run)
    worker = rows(run)["untuned_module:worker"]
    assert (worker.calls, worker.cpu_time_us, worker.other_threads_cpu_time_us) == (1, 0, 40)
    assert worker.device_time_us == 10
    assert run.residual.device_time_us == 7
    assert run.other_threads_cpu_time_us == 50
    assert WarningCode.OTHER_THREADS in codes(report)


def test_backward_work_belongs_to_its_forward_region(scene) -> None:
    """T6: the backward thread carries no annotations; the sequence number links it."""
    scene.run(0, 0, 200).label(UNTUNED, "m", 10, 20).op("aten::mm", 12, 10, args={"Sequence number": 4})
    scene.op("autograd::engine::evaluate_function: MmBackward0", 50, 30, tid=2)
    scene.op("MmBackward0", 52, 20, tid=2, args={"Sequence number": 4, "Fwd thread id": 1})
    scene.op("aten::mm", 55, 10, tid=2).call("cudaLaunchKernel", 57, 2, 1, tid=2).kernel("k", 60, 9, 1)
    scene.op("OddBackward0", 90, 5, tid=2, args={"Sequence number": 5, "Fwd thread id": 1})
    scene.call("cudaLaunchKernel", 91, 1, 2, tid=2).kernel("k", 95, 3, 2)
    run = report_regions(scene.trace()).runs[0]
    assert run.regions[0].device_time_us == 9
    assert run.residual.device_time_us == 3


def test_backward_of_an_unclear_forward_stays_unattributed(scene) -> None:
    scene.run(0, 0, 200)
    for tid in (1, 2):
        scene.label(UNTUNED, f"m{tid}", 10, 20, tid=tid).op("aten::mm", 12, 10, tid=tid, args={"Sequence number": 4})
    scene.op("MmBackward0", 52, 20, tid=3, args={"Sequence number": 4, "Fwd thread id": 1})
    scene.call("cudaLaunchKernel", 57, 2, 1, tid=3).kernel("k", 60, 9, 1)
    report = report_regions(scene.trace())
    assert report.runs[0].residual.device_time_us == 9
    assert WarningCode.AMBIGUOUS_SEQUENCE_NUMBERS in codes(report)


def test_runtime_calls_without_device_work_are_named(scene) -> None:
    """R01, R02: no device rows at all is said; the times are unknown, not 0."""
    scene.run(0, 0, 100).op("aten::mm", 10, 10).call("cudaLaunchKernel", 12, 2, 1)
    report = report_regions(scene.trace())
    assert report.runs[0].device_time_us is None
    assert WarningCode.NO_DEVICE_EVENTS in codes(report)


def test_trace_without_runs_says_so_and_still_has_a_tree(scene) -> None:
    report = report_regions(scene.label(UNTUNED, "m", 0, 10).trace())
    assert report.runs == ()
    assert report.region_tree[0].cpu_time_us == 10
    assert codes(report) == {WarningCode.NO_RUNS}


def test_recursion_counts_each_level_once_in_the_flat_set(scene) -> None:
    scene.run(0, 0, 100).label(UNTUNED, "m", 0, 50).label(UNTUNED, "m", 10, 30)
    report = report_regions(scene.trace())
    check_sums(report.runs[0])
    assert (report.runs[0].regions[0].calls, report.runs[0].regions[0].cpu_time_us) == (1, 50)
    assert report.region_tree[0].children[0].cpu_time_us == 30


def test_work_that_ends_after_the_run_belongs_to_its_window(scene) -> None:
    scene.run(0, 0, 50).label(UNTUNED, "m", 0, 40).call("cudaLaunchKernel", 10, 5, 1).kernel("k", 20, 100, 1)
    run = report_regions(scene.trace()).runs[0]
    check_sums(run)
    assert (run.device.window_us, run.device.busy_us) == (120, 100)


def test_annotations_of_the_fallback_class_are_regions_too(scene) -> None:
    """A span of ours is recognised by its name; the private class writes operators, the public one annotations."""
    scene.run(0, 0, 100)
    for event in [scene.label(UNTUNED, "m", 10, 20).events[-1], scene.events[0]]:
        event["cat"] = "user_annotation"
    run = report_regions(scene.trace()).runs[0]
    assert run.regions[0].cpu_time_us == 20


def test_real_trace_reconciles() -> None:
    from pathlib import Path

    trace = Trace.read(Path(__file__).parents[1] / "data" / "cpu_small.json")
    report = report_regions(trace)
    assert len(report.runs) == 2
    for run in report.runs:
        check_sums(run)
        assert [row.region_id for row in run.regions] == ["untuned_module:block"]
    assert [child.region_id for child in report.region_tree[0].children] == [
        "untuned_module:block.conv",
        "untuned_module:block.norm",
    ]
    assert codes(report) == set()


def test_annotations_of_anybody_are_regions_and_steps_are_runs(scene) -> None:
    """A trace without labels of ours, as any torch user records it."""
    for step, start in enumerate((0, 100)):
        scene.add("user_annotation", f"ProfilerStep#{step + 3}", start, 90)
        scene.add("user_annotation", "## forward ##", start + 10, 40).op("aten::mm", start + 12, 10)
        scene.call("cudaLaunchKernel", start + 13, 2, step + 1).kernel("gemm", start + 20, 8, step + 1)
    report = report_regions(scene.trace())
    assert [run.run_index for run in report.runs] == [3, 4]
    for run in report.runs:
        check_sums(run)
        (forward,) = run.regions
        assert (forward.region_id, forward.cpu_time_us, forward.device_time_us) == ("annotation:## forward ##", 40, 8)
    assert [(node.region_id, node.calls) for node in report.region_tree] == [("annotation:## forward ##", 2)]


def test_trace_of_kernels_alone_is_reported(scene) -> None:
    trace = scene.kernel("a", 0, 10, 1).kernel("b", 20, 10, 2).trace()
    report = report_regions(trace)
    assert (report.runs, report.region_tree) == ((), ())
    assert report.unattributed_device_time_us == 20
    assert {WarningCode.NO_RUNS, WarningCode.UNLINKED_DEVICE_EVENTS} <= codes(report)
    table = list_kernels(trace)
    assert [row.kernel for row in summarize_kernels(table)] == ["a", "b"]
    assert [row.key for row in operator_table(trace)] == ["a", "b"]
    assert report_timeline(trace).devices[0].busy_us == 20


def test_work_of_the_run_before_keeps_the_device_busy(scene) -> None:
    scene.run(0, 0, 50).call("cudaLaunchKernel", 10, 5, 1).kernel("late", 20, 60, 1)
    scene.run(1, 50, 50).call("cudaLaunchKernel", 60, 5, 2).kernel("own", 90, 5, 2)
    first, second = report_regions(scene.trace()).runs
    assert (second.device_time_us, second.device.busy_us, second.device.idle_us) == (5, 35, 15)
    assert second.device.other_us == 15 - 5  # 80-90 was launched at 60
    assert second.device.waiting_for_launch_us == 5
    assert first.device.window_us == 80


def test_threads_of_each_process_belong_to_its_own_run(make_scene) -> None:
    scene = make_scene()
    for index, pid in enumerate((100, 200)):
        scene.pid = pid
        scene.run(index, index * 10, 100).op("aten::mm", 30, 10 * (index + 1), tid=2)
    found = [run.other_threads_cpu_time_us for run in report_regions(scene.trace()).runs]
    assert found == [10, 20]
