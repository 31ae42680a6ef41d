import collections

import pytest
import torch

from perfladder.trace.labels import encode_label
from perfladder.trace.model import Trace
from perfladder.trace.operators import key_averages, operator_table, top_operators

SEVEN = [
    "key",
    "device_type",
    "count",
    "self_cpu_time_total_us",
    "cpu_time_total_us",
    "self_device_time_total_us",
    "device_time_total_us",
]


def table(trace: Trace, **options):
    return {(row.key, row.device_type, row.is_annotation): row for row in operator_table(trace, **options)}


def test_redispatch_to_itself_counts_once(scene) -> None:
    scene.op("aten::add", 0, 10).op("aten::add", 1, 8).op("aten::add", 2, 6)
    scene.op("aten::mul", 20, 10).op("aten::mul", 21, 2).op("aten::empty", 24, 2)
    rows = table(scene.trace())
    add, mul = rows["aten::add", "CPU", False], rows["aten::mul", "CPU", False]
    assert (add.count, add.cpu_time_total_us, add.self_cpu_time_total_us) == (1, 10, 10)
    assert (mul.count, mul.cpu_time_total_us, mul.self_cpu_time_total_us) == (2, 12, 8)


def test_device_time_goes_to_the_launching_operators(scene) -> None:
    scene.op("aten::linear", 0, 50).op("aten::addmm", 5, 40).call("cudaLaunchKernel", 10, 5, 1)
    scene.call("cudaLaunchKernel", 47, 1, 2)
    scene.kernel("gemm", 100, 30, 1).kernel("bias", 130, 4, 2)
    rows = table(scene.trace())
    assert rows["aten::addmm", "CPU", False].self_device_time_total_us == 30
    assert rows["aten::linear", "CPU", False].self_device_time_total_us == 4
    assert rows["aten::linear", "CPU", False].device_time_total_us == 34
    assert rows["cudaLaunchKernel", "CPU", False].device_time_total_us == 0
    assert rows["cudaLaunchKernel", "CPU", False].self_cpu_time_total_us == 6
    gemm = rows["gemm", "CUDA", False]
    assert (gemm.count, gemm.self_device_time_total_us, gemm.cpu_time_total_us) == (1, 30, 0)


def test_scope_and_device_annotation_are_two_rows(scene) -> None:
    """R06: the label's host scope and its annotation on the device's timeline differ, and are never merged."""
    label = encode_label("untuned_module", "unet")
    scene.add("user_annotation", label, 0, 50).op("aten::mm", 5, 20).call("cudaLaunchKernel", 10, 5, 1)
    scene.kernel("gemm", 100, 30, 1).kernel(label, 100, 45, cat="gpu_user_annotation")
    scene.add("cuda_sync", "Stream Sync", 0, 500, pid=0, tid=7)
    rows = table(scene.trace())
    assert rows[label, "CPU", True].device_time_total_us == 30
    assert rows[label, "CPU", True].cpu_time_total_us == 50
    assert rows[label, "CUDA", True].device_time_total_us == 45
    assert ("Stream Sync", "CUDA", False) not in rows


def test_one_name_as_operator_and_annotation_stays_apart(scene) -> None:
    scene.op("work", 0, 10).add("user_annotation", "work", 20, 5)
    rows = table(scene.trace())
    assert rows["work", "CPU", False].cpu_time_total_us == 10
    assert rows["work", "CPU", True].cpu_time_total_us == 5


def test_profiler_steps_are_one_row(scene) -> None:
    scene.add("user_annotation", "ProfilerStep#1", 0, 10).add("user_annotation", "ProfilerStep#2", 10, 20)
    row = table(scene.trace())["ProfilerStep*", "CPU", True]
    assert (row.count, row.cpu_time_total_us) == (2, 30)


def test_views_have_the_seven_fields_and_are_bounded(scene) -> None:
    for index in range(30):
        scene.op(f"op{index}", index * 100, index + 1).call("cudaLaunchKernel", index * 100, 0.5, index + 1)
        scene.kernel(f"kernel{index}", index * 100 + 50, 30 - index, index + 1)
    views = key_averages(scene.trace())
    assert list(views) == ["cpu_time_total", "device_time_total"]
    assert [len(rows) for rows in views.values()] == [20, 20]
    assert list(views["cpu_time_total"][0].model_dump()) == SEVEN
    assert views["cpu_time_total"][0].key == "op29"
    assert views["device_time_total"][0].device_time_total_us == 30


def test_without_device_work_device_times_are_unknown(scene) -> None:
    views = key_averages(scene.op("aten::add", 0, 1).trace())
    assert list(views) == ["cpu_time_total"]
    assert views["cpu_time_total"][0].device_time_total_us is None


def test_only_runs_leaves_the_warm_up_out(scene) -> None:
    scene.op("aten::add", 0, 10).run(0, 20, 10).op("aten::add", 22, 5)
    scene.call("cudaLaunchKernel", 2, 1, 1).kernel("k", 3, 4, 1).call("cudaLaunchKernel", 23, 1, 2).kernel(
        "k", 24, 2, 2
    )
    rows = table(scene.trace(), only_runs=True)
    assert rows["aten::add", "CPU", False].count == 1
    assert rows["k", "CUDA", False].device_time_total_us == 2


def test_top_operators_by_device_leaves_out_rows_without(scene) -> None:
    scene.op("host only", 0, 100).op("aten::mm", 200, 5).call("cudaLaunchKernel", 201, 1, 1).kernel("k", 300, 3, 1)
    assert {row.key for row in top_operators(operator_table(scene.trace()), "device_time_total")} == {"aten::mm", "k"}


def _work(model: torch.nn.Module, x: torch.Tensor) -> None:
    with torch.profiler.record_function("aten::add"):
        y = model(x)
    z = torch.nn.functional.interpolate(y, scale_factor=2)
    z = torch.nn.functional.interpolate(z, scale_factor=2, mode="nearest")
    z.add_(1).to(torch.float64).sum().item()
    (z.mean() * z.std()).backward() if z.requires_grad else None


@pytest.mark.parametrize("with_grad", [False, True])
def test_table_agrees_with_torch_to_rounding(tmp_path, with_grad) -> None:
    """The only place where torch's own aggregation is called."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.GroupNorm(2, 4), torch.nn.SiLU()] * 3
    model, x = torch.nn.Sequential(*layers), torch.randn(2, 4, 8, 8)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.set_grad_enabled(with_grad), torch.profiler.profile(activities=activities) as profiler:
        for _ in range(5):
            _work(model, x)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    ours = table(Trace.read(path))
    theirs = collections.Counter()
    for row in profiler.key_averages():
        key = (row.key, "CPU", row.is_user_annotation)
        theirs[key] += 1
        assert ours[key].count == row.count, key
        assert ours[key].cpu_time_total_us == pytest.approx(row.cpu_time_total, abs=1e-3), key
        assert ours[key].self_cpu_time_total_us == pytest.approx(row.self_cpu_time_total, abs=1e-3), key
    assert set(theirs) == set(ours)
    assert max(theirs.values()) == 1


def test_self_times_add_up_to_the_top_spans(scene) -> None:
    scene.op("a", 0, 100).op("a", 5, 90).op("b", 10, 20).op("a", 40, 20).op("c", 200, 7)
    assert sum(row.self_cpu_time_total_us for row in operator_table(scene.trace())) == 107
