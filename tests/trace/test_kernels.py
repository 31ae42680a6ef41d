from pathlib import Path

import pytest

from perfladder.trace.kernels import list_kernels, summarize_kernels
from perfladder.trace.model import Category, Trace


def device_scene(scene):
    scene.run(0, 0, 300).label("untuned_module", "a", 5, 200).label("untuned_module", "a.attn", 10, 100)
    scene.label("function", "linear", 12, 50).op("aten::linear", 13, 45).op("aten::addmm", 15, 40)
    scene.call("cudaLaunchKernel", 20, 5, 1).kernel("gemm", 40, 30, 1)
    scene.op("aten::copy_", 120, 20).call("cudaMemcpyAsync", 125, 5, 2)
    scene.copy("Memcpy HtoD (Pageable -> Device)", 150, 8, 2, stream=8)
    scene.kernel("orphan", 400, 5, 99)
    return scene


def test_kernel_knows_where_it_came_from(scene) -> None:
    table = list_kernels(device_scene(scene).trace())
    gemm, copy, orphan = (table.row(index) for index in range(3))
    assert (gemm.kernel, gemm.category) == ("gemm", "kernel")
    assert (gemm.operator, gemm.outer_operator) == ("aten::addmm", "aten::linear")
    assert (gemm.function, gemm.region, gemm.run) == ("linear", "untuned_module:a.attn", 0)
    assert (gemm.device, gemm.stream, gemm.duration_us) == (0, 7, 30)
    assert gemm.launch_start_us == pytest.approx(20.001)
    assert gemm.launch_latency_us == 20
    assert (copy.category, copy.region, copy.operator, copy.stream) == (
        "gpu_memcpy",
        "untuned_module:a",
        "aten::copy_",
        8,
    )
    assert (orphan.operator, orphan.region, orphan.run, orphan.launch_latency_us) == (None, None, None, None)
    assert table.total_us == 43


def test_outermost_operator_stays_inside_the_region(scene) -> None:
    """A module called from inside an operator (a custom autograd function, say) begins a new chain."""
    scene.op("outside", 0, 100).label("untuned_module", "m", 10, 50).op("aten::linear", 12, 40).op(
        "aten::addmm", 14, 30
    )
    scene.call("cudaLaunchKernel", 20, 5, 1).kernel("gemm", 40, 30, 1)
    row = list_kernels(scene.trace()).row(0)
    assert (row.outer_operator, row.operator) == ("aten::linear", "aten::addmm")


def test_only_runs_leaves_the_rest_out(scene) -> None:
    table = list_kernels(device_scene(scene).trace(), only_runs=True)
    assert [table.row(index).kernel for index in range(table.num_kernels)] == [
        "gemm",
        "Memcpy HtoD (Pageable -> Device)",
    ]


def test_summary_adds_up_and_is_sorted(scene) -> None:
    scene.label("untuned_module", "m", 0, 100)
    for index, duration in enumerate((5, 20, 10)):
        scene.op("aten::mm", index * 30, 20).call("cudaLaunchKernel", index * 30 + 2, 2, index + 1)
        scene.kernel("gemm", index * 30 + 10, duration, index + 1)
    scene.op("aten::mm", 200, 20).call("cudaLaunchKernel", 202, 2, 9).kernel("gemm", 210, 65, 9)
    trace = scene.trace()
    first, second = summarize_kernels(list_kernels(trace))
    assert (first.region, first.count, first.total_us, first.share) == (None, 1, 65, 0.65)
    assert (second.region, second.count, second.total_us) == ("untuned_module:m", 3, 35)
    assert second.mean_us == pytest.approx(35 / 3)
    assert trace.duration_ns[second.example_event] == 20_000
    assert len(summarize_kernels(list_kernels(trace), limit=1)) == 1


def test_operators_stand_in_with_their_self_time_on_a_host_only_trace(scene) -> None:
    scene.run(0, 0, 200).label("untuned_module", "m", 10, 100)
    scene.op("aten::linear", 20, 50).op("aten::t", 22, 8).op("aten::addmm", 32, 30).op("aten::copy_", 33, 5)
    scene.op("aten::add", 130, 10)
    table = list_kernels(scene.trace())
    assert table.is_host
    rows = [table.row(index) for index in range(table.num_kernels)]
    assert {row.kernel: (row.region, row.outer_operator, row.duration_us) for row in rows} == {
        "aten::linear": ("untuned_module:m", "aten::linear", 12),
        "aten::t": ("untuned_module:m", "aten::linear", 8),
        "aten::addmm": ("untuned_module:m", "aten::linear", 25),
        "aten::copy_": ("untuned_module:m", "aten::linear", 5),
        "aten::add": (None, "aten::add", 10),
    }
    assert table.total_us == 60
    assert (rows[0].category, rows[0].device, rows[0].stream, rows[0].launch_start_us) == ("cpu_op", None, None, None)


def test_operator_that_calls_others_through_a_region_does_not_own_the_region(scene) -> None:
    scene.op("outer", 0, 100).label("untuned_module", "m", 10, 50).op("inner", 20, 10)
    table = list_kernels(scene.trace())
    rows = [table.row(index) for index in range(table.num_kernels)]
    assert {row.kernel: row.duration_us for row in rows} == {"outer": 50, "inner": 10}


def test_operators_add_up_on_a_real_trace() -> None:
    trace = Trace.read(Path(__file__).parents[1] / "data" / "cpu_small.json", with_arguments=True)
    table = list_kernels(trace)
    forest = trace.forest
    is_operator = trace.category[forest.event] == Category.CPU_OP
    is_operator &= [trace.labels[name] is None for name in forest.name_id]
    assert int(table.duration_ns.sum()) == int(forest.self_ns[is_operator].sum())
    summary = summarize_kernels(table)
    assert sum(row.share for row in summary) == pytest.approx(1)
    by_name = {row.kernel: row for row in summary}
    assert by_name["aten::_nnpack_available"].region == "untuned_module:block.conv"
    assert by_name["aten::_local_scalar_dense"].region is None
    assert by_name["aten::_local_scalar_dense"].outer_operator == "aten::item"
    assert trace.arguments(by_name["aten::_local_scalar_dense"].example_event)["Input Dims"] == [[]]


def test_no_kernels_give_an_empty_summary(scene) -> None:
    assert summarize_kernels(list_kernels(scene.add("user_annotation", "x", 0, 1).trace())) == []
