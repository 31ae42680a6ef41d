import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfladder.trace.intervals import overlap_ns, unite
from perfladder.trace.runtime_calls import CallKind, classify_call, classify_copy, is_communication
from perfladder.trace.timeline import report_timeline
from perfladder.trace.warnings import WarningCode

INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12)


def points(intervals) -> set[int]:
    return {point for low, length in intervals for point in range(low, low + length)}


def union_of(intervals):
    return unite(np.array([i[0] for i in intervals], np.int64), np.array([sum(i) for i in intervals], np.int64))


@given(INTERVALS, INTERVALS)
def test_unions_agree_with_sets_of_points(first, second) -> None:
    a, b = union_of(first), union_of(second)
    assert a.total_ns == len(points(first))
    assert overlap_ns(a, b) == len(points(first) & points(second))
    assert (a.start_ns[1:] > a.end_ns[:-1]).all()


def test_streams_and_devices_are_busy_by_union(scene) -> None:
    scene.kernel("a", 0, 10, 1).kernel("b", 5, 10, 2, stream=8).kernel("c", 40, 10, 3)
    scene.kernel("d", 0, 7, 4, device=1)
    scene.kernel("Stream Sync", 0, 500, 5, cat="cuda_sync").kernel("label", 0, 300, cat="gpu_user_annotation")
    timeline = report_timeline(scene.op("x", 0, 1).trace())
    assert [(row.device, row.stream, row.busy_us, row.num_events) for row in timeline.streams] == [
        (0, 7, 20, 2),
        (0, 8, 10, 1),
        (1, 7, 7, 1),
    ]
    first, second = timeline.devices
    assert (first.window_us, first.busy_us, first.idle_us, first.busy_frac) == (50, 25, 25, 0.5)
    assert (second.window_us, second.busy_frac) == (7, 1)
    assert timeline.overlap is None
    assert timeline.warnings == ()


def test_copies_say_bytes_and_bandwidth(scene) -> None:
    scene.copy("Memcpy HtoD (Pageable -> Device)", 0, 10, 1, args={"bytes": 100_000})
    scene.copy("Memcpy HtoD (Pinned -> Device)", 20, 10, 2, args={"bytes": 300_000})
    scene.copy("Memcpy DtoH (Device -> Pageable)", 40, 5, 3)
    scene.copy("CopyDeviceToDevice", 60, 1, 4, args={"bytes": 8})
    copies = {row.kind: row for row in report_timeline(scene.trace()).copies}
    assert (copies["HtoD"].count, copies["HtoD"].num_bytes, copies["HtoD"].total_us) == (2, 400_000, 20)
    assert copies["HtoD"].bandwidth_gb_per_s == 20
    assert (copies["DtoH"].num_bytes, copies["DtoH"].bandwidth_gb_per_s) == (None, None)
    assert copies["DtoD"].count == 1


def test_communication_overlaps_compute(scene) -> None:
    scene.kernel("ncclDevKernel_AllReduce_Sum_f32", 0, 100, 1, stream=20)
    scene.kernel("gemm", 50, 100, 2).kernel("gemm", 60, 10, 3, stream=9)
    timeline = report_timeline(scene.op("gloo:all_reduce", 0, 5).trace())
    overlap = timeline.overlap
    assert overlap is not None
    assert (overlap.communication_us, overlap.compute_us, overlap.overlap_us) == (100, 100, 50)
    assert (overlap.exposed_communication_us, overlap.overlap_frac) == (50, 0.5)
    assert [(row.name, row.device_type, row.total_us) for row in timeline.communication] == [
        ("ncclDevKernel_AllReduce_Sum_f32", "CUDA", 100),
        ("gloo:all_reduce", "CPU", 5),
    ]


def test_overlap_on_one_stream_is_named(scene) -> None:
    scene.kernel("a", 0, 100, 1).kernel("b", 50, 100, 2)
    timeline = report_timeline(scene.trace())
    assert [warning.code for warning in timeline.warnings] == [WarningCode.DEVICE_EVENTS_OVERLAP]
    assert timeline.streams[0].sum_us - timeline.streams[0].busy_us == pytest.approx(50)


def test_host_only_trace_has_no_devices(scene) -> None:
    timeline = report_timeline(scene.op("x", 0, 1).trace())
    assert (timeline.devices, timeline.streams, timeline.copies, timeline.overlap) == ((), (), (), None)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cudaLaunchKernel", CallKind.LAUNCH),
        ("cudaLaunchKernelExC", CallKind.LAUNCH),
        ("cuLaunchKernelEx", CallKind.LAUNCH),
        ("cudaGraphLaunch", CallKind.LAUNCH),
        ("hipExtModuleLaunchKernel", CallKind.LAUNCH),
        ("cudaMemsetAsync", CallKind.LAUNCH),
        ("cudaStreamSynchronize", CallKind.SYNCHRONIZE),
        ("hipEventSynchronize", CallKind.SYNCHRONIZE),
        ("cuCtxSynchronize", CallKind.SYNCHRONIZE),
        ("zeCommandQueueSynchronize", CallKind.SYNCHRONIZE),
        ("cudaMemcpyAsync", CallKind.COPY),
        ("hipMemcpyWithStream", CallKind.COPY),
        ("cudaMalloc", CallKind.OTHER),
        ("cudaEventRecord", CallKind.OTHER),
    ],
)
def test_runtime_calls_are_told_apart(name, kind) -> None:
    assert classify_call(name) == kind


def test_names_of_copies_and_collectives() -> None:
    assert classify_copy("Memcpy PtoP (Device -> Device)") == "PtoP"
    assert classify_copy("strange") == "unknown"
    assert is_communication("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)")
    assert is_communication("void rcclGenericKernel<1, false>")
    assert not is_communication("gemm")
