"""Counted work joined with kernels, held against peaks, and ranked: worked out by hand."""

import pytest

from perfladder.peaks import Peaks
from perfladder.trace.attribution import attribute
from perfladder.trace.critical import find_critical
from perfladder.trace.kernels import list_kernels, summarize_kernels
from perfladder.trace.ranking import rank_groups
from perfladder.trace.residual import HostParts
from perfladder.trace.roofline import build_roofline, describe
from perfladder.trace.work import OperatorCall, match_work

M = "untuned_module:m"
# 1 TFLOP/s and 100 GB/s: the ridge is at 10 operations a byte.
PEAKS = Peaks(device="toy", source="measured", compute_tflops={"float32": 1.0, "tf32": 4.0}, bandwidth_gb_per_s=100.0)


def product(flops=10_000_000, num_bytes=200_000, dtype="float32", operator="aten::addmm", region=M):
    return OperatorCall(region=region, operator=operator, flops=flops, num_bytes=num_bytes, dtype=dtype)


def device_scene(scene, *, runs=1, wait=True, kernel="gemm"):
    """In each run of 300 us: two linears in m (20 and 30 us, queued), a sum outside (40 us), then a wait."""
    for run in range(runs):
        base, number = 1000 * run, 10 * run
        scene.run(run, base, 300).label("untuned_module", "m", base + 5, 60)
        for index, duration in enumerate((20, 30)):
            start = base + 10 + 25 * index
            scene.op("aten::linear", start, 20).op("aten::addmm", start + 2, 15)
            scene.call("cudaLaunchKernel", start + 4, 5, number + index + 1)
            scene.kernel(kernel, base + 100 + 20 * index, duration, number + index + 1)
        scene.op("aten::sum", base + 70, 20).call("cudaLaunchKernel", base + 75, 5, number + 3)
        scene.kernel("reduce_kernel", base + 150, 40, number + 3)
        if wait:
            scene.call("cudaDeviceSynchronize", base + 92, 200)
    return scene


def analyse(scene, calls, peaks=PEAKS, **options):
    trace = scene.trace()
    attribution = attribute(trace)
    table = list_kernels(trace, attribution, only_runs=True)
    match = match_work(table, attribution, calls)
    roofline = build_roofline(table, match, peaks)
    critical = find_critical(table, HostParts(trace, attribution))
    return table, match, roofline, rank_groups(table, match, roofline, critical, **options)


def test_the_nth_call_is_the_nth_operator_in_every_run(scene):
    calls = [product(1), product(2), product(0, 4000, operator="aten::sum", region=None)]
    _, match, roofline, _ = analyse(device_scene(scene, runs=2), calls)
    assert match.call.tolist() == [0, 1, 2, 0, 1, 2]
    assert match.num_mismatched == 0
    assert [(row.operator, row.region_id, row.count, row.flops) for row in roofline.rows] == [
        ("aten::addmm", M, 4, 6),
        ("aten::sum", None, 2, 0),
    ]
    assert roofline.known_share == 1
    assert roofline.flops_share == pytest.approx(50 / 90)


def test_another_number_of_calls_is_not_matched_and_the_share_says_so(scene):
    _, match, roofline, ranking = analyse(device_scene(scene), [product(), product(0, 1, "float32", "aten::sum", None)])
    assert match.call.tolist() == [-1, -1, 1]
    assert match.num_mismatched == 1
    assert roofline.known_share == pytest.approx(40 / 90)
    unknown = next(group for group in ranking.groups if group.operator == "aten::linear")
    assert (unknown.achieved_frac, unknown.possible_win_us) == (None, 50)
    assert "upper bound" in unknown.reason


def test_operator_in_another_region_is_not_matched(scene):
    calls = [product(region="untuned_module:other")] * 2
    assert analyse(device_scene(scene), calls)[1].call.tolist() == [-1, -1, -1]


def test_operator_inside_a_counted_one_belongs_to_it(scene):
    scene.run(0, 0, 300).op("aten::clone", 10, 30).op("aten::copy_", 12, 20)
    scene.call("cudaLaunchKernel", 15, 5, 1).kernel("direct_copy_kernel", 40, 10, 1)
    scene.op("aten::copy_", 50, 20).call("cudaLaunchKernel", 55, 5, 2).kernel("direct_copy_kernel", 80, 10, 2)
    calls = [product(0, 8, operator="aten::clone", region=None), product(0, 4, operator="aten::copy_", region=None)]
    assert analyse(scene, calls)[1].call.tolist() == [0, 1]


def test_in_place_or_not_is_the_same_operator(scene):
    scene.run(0, 0, 300).op("aten::add_", 10, 30).call("cudaLaunchKernel", 15, 5, 1).kernel("k", 40, 10, 1)
    assert analyse(scene, [product(0, 8, operator="aten::add", region=None)])[1].call.tolist() == [0]


def test_call_of_several_kernels_counts_once(scene):
    scene.run(0, 0, 300).op("aten::addmm", 10, 50)
    for index in range(2):
        scene.call("cudaLaunchKernel", 15 + 10 * index, 5, index + 1).kernel("gemm", 80 + 20 * index, 20, index + 1)
    scene.call("cudaLaunchKernel", 40, 5, 3).kernel("FillFunctor", 120, 25, 3)
    (row,) = analyse(scene, [product(region=None)])[2].rows
    assert (row.count, row.num_kernels, row.flops, row.total_us) == (1, 3, 10_000_000, 65)
    assert row.family == "gemm", "of two products of 20 us each, although a fill takes 25"


def test_achieved_figures_by_hand(scene):
    calls = [product(), product(), product(0, 3_600_000, operator="aten::sum", region=None)]
    rows = {row.operator: row for row in analyse(device_scene(scene), calls)[2].rows}
    addmm, total = rows["aten::addmm"], rows["aten::sum"]
    assert addmm.compute_tflops == pytest.approx(0.4)  # 2 x 10 MFLOP in 50 us
    assert addmm.bandwidth_gb_per_s == pytest.approx(8)  # 400 kB in 50 us
    assert (addmm.arithmetic_intensity, addmm.ridge_flops_per_byte) == (50, 10)
    assert (addmm.compute_frac, addmm.bandwidth_frac) == (pytest.approx(0.4), pytest.approx(0.08))
    assert addmm.achieved_frac == pytest.approx(0.4)
    assert "at 40% of the measured compute peak and 8% of the measured bandwidth" in addmm.statement
    assert (total.compute_tflops, total.compute_frac, total.arithmetic_intensity) == (None, None, None)
    assert total.bandwidth_frac == pytest.approx(0.9)
    assert "near the bandwidth, which may be" in total.statement


def test_tensor_cores_are_told_by_the_kernels_name(scene):
    row = analyse(device_scene(scene, kernel="sm90_xmma_gemm_f32f32_tf32f32_f32"), [product()] * 2)[2].rows[0]
    assert (row.precision, row.compute_frac) == ("tf32", pytest.approx(0.1))


def test_unknown_peaks_give_figures_without_fractions(scene):
    row = analyse(device_scene(scene), [product()] * 2, peaks=None)[2].rows[0]
    assert row.compute_tflops == pytest.approx(0.4)
    assert (row.compute_frac, row.bandwidth_frac, row.ridge_flops_per_byte, row.achieved_frac) == (None,) * 4
    double = analyse(scene, [product(dtype="float64")] * 2)[2].rows[0]
    assert (double.precision, double.compute_frac) == ("float64", None)


@pytest.mark.parametrize(
    ("compute", "bandwidth", "words"),
    [
        (0.8, 0.2, "near the compute peak, which may be"),
        (0.1, 0.05, "near neither: launch or occupancy limited? A kernel of it takes 3 us"),
        (0.5, 0.4, "between the two cases"),
        (0.2, 1.5, "above a peak: a cache holds the data"),
        (None, None, "no peak or no count"),
    ],
)
def test_statement_names_possibilities(compute, bandwidth, words):
    assert words in describe(compute, bandwidth, 3.0, "measured")


def test_a_cache_is_no_roof(scene):
    """Memory at twice its bandwidth says that a cache served it; the product itself is at 40 % of the peak."""
    row = analyse(device_scene(scene), [product(num_bytes=5_000_000)] * 2)[2].rows[0]
    assert row.bandwidth_frac == pytest.approx(2)
    assert row.achieved_frac == pytest.approx(0.4)


def test_device_bound_ranking_is_by_what_is_left_to_the_roof(scene):
    calls = [product(), product(), product(0, 3_600_000, operator="aten::sum", region=None)]
    table, _, _, ranking = analyse(device_scene(scene, runs=2), calls, calls_us=400.0, stage_share=0.5)
    addmm, total = ranking.groups
    assert (addmm.operator, addmm.share, addmm.critical_us) == ("aten::addmm", pytest.approx(100 / 180), 100)
    assert addmm.possible_win_us == pytest.approx(100 * 0.6)
    assert (addmm.possible_win_frac, addmm.run_win_frac) == (pytest.approx(0.15), pytest.approx(0.075))
    assert total.possible_win_us == pytest.approx(80 * 0.1)
    kernels = {row.kernel: row for row in summarize_kernels(table, win_ns=ranking.win_ns)}
    assert kernels["gemm"].possible_win_us == pytest.approx(60)
    assert (kernels["gemm"].family, kernels["reduce_kernel"].family) == ("gemm", "reduction")
    assert summarize_kernels(table)[0].possible_win_us is None


def test_shorter_share_can_win_more(scene):
    calls = [product(24_500_000), product(24_500_000), product(0, 40_000, operator="aten::sum", region=None)]
    groups = analyse(device_scene(scene), calls)[3].groups
    assert [group.operator for group in groups] == ["aten::sum", "aten::addmm"]
    assert groups[0].share < groups[1].share


def test_host_bound_kernels_win_nothing(scene):
    """Each kernel ends long before the next launch; only the last is waited for, by nothing that follows."""
    scene.run(0, 0, 1000)
    for index in range(4):
        start = 10 + 200 * index
        scene.op("aten::mm", start, 20).call("cudaLaunchKernel", start + 5, 5, index + 1)
        scene.kernel("gemm", start + 15, 50, index + 1)
    calls = [product(operator="aten::mm", region=None)] * 4
    (group,) = analyse(scene, calls)[3].groups
    assert (group.total_us, group.critical_us) == (200, 50)
    assert group.possible_win_us == pytest.approx(50 * 0.8)
    assert "25% of its time is waited for" in group.reason


def test_nothing_counted_and_nothing_there(scene):
    _, match, roofline, ranking = analyse(device_scene(scene), [])
    assert (match.call.max(), roofline.rows, roofline.known_share) == (-1, [], 0)
    assert [group.achieved_frac for group in ranking.groups] == [None, None]


def test_empty_table(make_scene):
    _, _, roofline, ranking = analyse(make_scene("empty").run(0, 0, 10), [product()])
    assert (roofline.rows, ranking.groups) == ([], [])
