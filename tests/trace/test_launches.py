"""Launch calls, gaps, queues, copies and waits, by hand and on recorded windows."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from perfladder.trace.attribution import attribute
from perfladder.trace.copies import list_copies
from perfladder.trace.kernels import list_kernels
from perfladder.trace.launches import Launches, summarize_families
from perfladder.trace.model import Trace
from perfladder.trace.runtime_calls import classify_host_memory

CUDA = Path(__file__).parents[1] / "data" / "cuda"
SCENES = sorted(path.name.split(".")[0] for path in CUDA.glob("*.json.gz"))


def two_streams(scene):
    """Two products queued on stream 7, the second while the first runs, and one on stream 8; times in us."""
    scene.run(0, 0, 300).label("untuned_module", "a", 5, 200).op("aten::mm", 10, 100)
    scene.call("cudaLaunchKernel", 20, 5, 1).kernel("gemm", 40, 30, 1)
    scene.call("cudaLaunchKernel", 50, 6, 2).kernel("gemm", 75, 10, 2)
    scene.call("cudaLaunchKernel", 60, 7, 3).kernel("reduce_kernel", 80, 10, 3, stream=8)
    return scene


def test_gap_is_counted_on_the_stream_and_within_the_run(scene):
    two_streams(scene).run(1, 400, 100)
    scene.call("cudaLaunchKernel", 410, 5, 4).kernel("gemm", 420, 30, 4)
    launches = Launches(list_kernels(scene.trace()))
    assert launches.gap_ns.tolist() == [-1, 5_000, -1, -1]
    assert launches.call_ns.tolist() == [5_000, 6_000, 7_000, 5_000]


def test_queue_depth_is_what_was_launched_and_not_finished(scene):
    assert Launches(list_kernels(two_streams(scene).trace())).queue_depth.tolist() == [0, 1, 2]


def test_call_that_launches_many_is_shared_out(scene):
    scene.run(0, 0, 300).call("cudaGraphLaunch", 10, 9, 1)
    for index in range(3):
        scene.kernel("gemm", 30 + 20 * index, 10, 1)
    table = list_kernels(scene.trace())
    assert Launches(table).call_ns.tolist() == [3_000] * 3
    (row,) = summarize_families(table)
    assert (row.launch_call_us, row.mean_gap_us, row.mean_launch_latency_us) == (9, 10, pytest.approx(40))


def test_families_add_up_and_unknown_is_none(scene):
    two_streams(scene).kernel("orphan gemm", 500, 50, 99)
    gemm, reduction = summarize_families(list_kernels(scene.trace()))
    assert (gemm.family, gemm.count, gemm.total_us, gemm.share) == ("gemm", 3, 90, 0.9)
    assert (gemm.launch_call_us, gemm.mean_launch_latency_us) == (11, pytest.approx(22.5))
    assert (reduction.family, reduction.mean_gap_us) == ("reduction", None)
    host = summarize_families(list_kernels(Trace.read(CUDA.parent / "cpu_small.json")))
    assert {(row.launch_call_us, row.mean_gap_us, row.mean_launch_latency_us) for row in host} == {(None, None, None)}


def test_families_by_region(scene):
    two_streams(scene).label("untuned_module", "b", 220, 50).call("cudaLaunchKernel", 230, 5, 4)
    scene.kernel("gemm", 240, 7, 4)
    trace = scene.trace()
    attribution = attribute(trace)
    rows = summarize_families(list_kernels(trace, attribution), attribution.device_top)
    assert {(row.family, row.region_id): row.total_us for row in rows} == {
        ("gemm", "untuned_module:a"): 40,
        ("reduction", "untuned_module:a"): 10,
        ("gemm", "untuned_module:b"): 7,
    }


def test_copies_say_kind_memory_site_size_and_bandwidth(scene):
    scene.run(0, 0, 300).label("untuned_module", "a", 5, 200).op("aten::to", 10, 100).op("aten::copy_", 12, 90)
    for index in range(2):
        scene.call("cudaMemcpyAsync", 20 + 30 * index, 6, index + 1)
        scene.copy("Memcpy HtoD (Pageable -> Device)", 24 + 30 * index, 10, index + 1, args={"bytes": 200_000})
    scene.op("aten::clone", 250, 20).call("cudaMemcpyAsync", 255, 4, 9)
    scene.copy("Memcpy DtoD (Device -> Device)", 260, 5, 9)
    scene.kernel("Memset (Device)", 280, 1, 10, cat="gpu_memset")
    first, second = list_copies(list_kernels(scene.trace()))
    assert (first.kind, first.host_memory, first.count, first.num_bytes) == ("HtoD", "pageable", 2, 400_000)
    assert (first.operator, first.outer_operator, first.region_id) == ("aten::copy_", "aten::to", "untuned_module:a")
    assert (first.bandwidth_gb_per_s, first.host_us, first.total_us) == (20, 12, 20)
    assert (second.kind, second.host_memory, second.operator) == ("DtoD", None, "aten::clone")
    assert (second.num_bytes, second.bandwidth_gb_per_s, second.region_id) == (None, None, None)


def test_host_memory_of_a_copy():
    assert classify_host_memory("Memcpy DtoH (Device -> Pinned)") == "pinned"
    assert classify_host_memory("CopyDeviceToHost") is None


@pytest.mark.parametrize("scene", SCENES)
def test_recorded_launches_and_copies_by_a_plain_loop(scene):
    with gzip.open(CUDA / f"{scene}.json.gz") as file:
        events = [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]
    work = [e for e in events if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    calls = {e["args"]["correlation"]: e for e in events if e["cat"] in ("cuda_runtime", "cuda_driver")}
    table = list_kernels(Trace.read(CUDA / f"{scene}.json.gz"))
    rows = summarize_families(table)
    assert sum(row.count for row in rows) == len(work)
    assert sum(row.total_us for row in rows) == pytest.approx(sum(e["dur"] for e in work))
    launching = {e["args"]["correlation"] for e in work}
    assert sum(row.launch_call_us for row in rows) == pytest.approx(sum(calls[i]["dur"] for i in launching))
    latency = np.mean([e["ts"] - calls[e["args"]["correlation"]]["ts"] for e in work])
    mean = sum(row.mean_launch_latency_us * row.count for row in rows) / len(work)
    assert mean == pytest.approx(latency, abs=2e-3)
    copies = [e for e in work if e["cat"] == "gpu_memcpy"]
    sites = list_copies(table)
    for memory in ("Pageable", "Pinned"):
        took = sum(e["dur"] for e in copies if memory in e["name"])
        assert sum(site.total_us for site in sites if site.host_memory == memory.lower()) == pytest.approx(took)
    moved = sum(e["args"]["memory bandwidth (GB/s)"] * e["dur"] * 1e3 for e in copies)
    assert sum(site.bandwidth_gb_per_s * site.total_us * 1e3 for site in sites) == pytest.approx(moved, rel=1e-6)
