"""What a kernel's metrics say together, and on which side of each limit they stand."""

import pytest

from perfladder.nsight import thresholds as t
from perfladder.nsight.diagnosis import diagnose
from perfladder.nsight.thresholds import THRESHOLDS, limit

FMA = "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed"
TENSOR = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"


def stall(reason: str) -> str:
    return f"{t.STALL_PREFIX}{reason}{t.STALL_SUFFIX}"


PRODUCT = {t.COMPUTE: 88.0, t.MEMORY: 45.0, t.DRAM: 20.0, t.L2: 45.0, TENSOR: 86.0, t.WAVES: 8.0, t.ISSUE: 0.4}
STREAMING = {t.COMPUTE: 20.0, t.MEMORY: 92.0, t.DRAM: 92.0, t.L2: 50.0, FMA: 8.0, t.WAVES: 40.0}
WAITING = {
    t.COMPUTE: 25.0,
    t.MEMORY: 30.0,
    t.WAVES: 5.0,
    t.ISSUE: 0.2,
    t.WARP_LATENCY: 20.0,
    stall("long_scoreboard"): 12.0,
    stall("wait"): 3.0,
    stall("selected"): 1.0,
}
SMALL = {t.COMPUTE: 3.0, t.MEMORY: 4.0, t.WAVES: 0.1, t.GRID: 12.0, "launch__sm_count": 132.0}


def changed(metrics, **by_name):
    return {**metrics, **{getattr(t, name.upper()): value for name, value in by_name.items()}}


def test_a_product_of_matrices_is_limited_by_compute_and_a_pipe_agrees():
    found = diagnose(PRODUCT)
    assert (found.verdict, found.busiest_pipe, found.undecided_because) == ("compute", "tensor", [])
    assert "compute at 88 % and memory at 45 %" in found.statement
    assert any(reason.startswith("Memory at 45 %") for reason in found.rules_out)
    assert any(reason.startswith("Device memory at 20 %") for reason in found.rules_out)


def test_a_pipe_that_only_fetches_is_no_witness_for_compute():
    fetching = {"sm__inst_executed_pipe_lsu.avg.pct_of_peak_sustained_elapsed": 95.0}
    assert diagnose({**PRODUCT, TENSOR: 20.0, **fetching}).verdict == "undecided"
    assert diagnose({t.COMPUTE: 90.0, t.MEMORY: 20.0, **fetching}).busiest_pipe is None


def test_an_elementwise_kernel_is_limited_by_device_memory():
    found = diagnose(STREAMING)
    assert (found.verdict, found.level, found.undecided_because) == ("memory", "dram", [])
    assert any("No pipe is used more than 8 %" in reason for reason in found.rules_out)


@pytest.mark.parametrize(("name", "level"), [("dram", "dram"), ("l2", "l2"), ("l1", "l1")])
def test_the_outermost_busy_level_of_memory_is_named(name, level):
    metrics = changed({**STREAMING, t.DRAM: 10.0, t.L2: 10.0, t.L1: 95.0}, **{name: 90.0})
    assert diagnose(metrics).level == level


def test_waiting_warps_are_latency_with_their_reason():
    found = diagnose(WAITING)
    assert found.verdict == "latency"
    assert "60% of their time waiting (long_scoreboard)" in found.statement
    assert found.stalls[0].reason == "long_scoreboard"
    assert found.stalls[0].share == pytest.approx(0.6)


def test_warps_that_do_not_fit_are_latency_with_the_limiter():
    metrics = {t.COMPUTE: 25.0, t.MEMORY: 30.0, t.WAVES: 5.0, t.ISSUE: 0.2, t.POSSIBLE_OCCUPANCY: 25.0}
    metrics |= {"launch__occupancy_limit_registers": 2.0, "launch__occupancy_limit_warps": 8.0}
    found = diagnose(metrics)
    assert (found.verdict, found.occupancy_limiter) == ("latency", "registers")
    assert "only 25 % of the warps fit (registers)" in found.statement


def test_a_launch_smaller_than_the_device_is_named_before_anything_else():
    found = diagnose(SMALL)
    assert found.verdict == "launch"
    assert "(12 blocks on 132 multiprocessors)" in found.observations[-1].statement
    assert found.tail_frac is None


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({}, "SpeedOfLight"),
        ({t.COMPUTE: 90.0}, "gpu__compute_memory_throughput"),
        ({**PRODUCT, TENSOR: 20.0}, "The busiest pipe, tensor, is used 20 % only"),
        ({t.COMPUTE: 90.0, t.MEMORY: 20.0}, "No pipe was measured"),
        ({t.COMPUTE: 20.0, t.MEMORY: 90.0}, "No level of memory was measured"),
        ({**STREAMING, t.DRAM: 30.0, t.L2: 40.0}, "Device memory is used 30 % only"),
        ({**WAITING, t.ISSUE: 0.9}, "contradicts waiting"),
        ({t.COMPUTE: 25.0, t.MEMORY: 30.0}, "launch__waves_per_multiprocessor was not collected"),
        ({t.COMPUTE: 25.0, t.MEMORY: 30.0, t.WAVES: 9.0, t.ISSUE: 0.1}, "No stall reason stands out"),
    ],
)
def test_one_figure_alone_or_figures_that_disagree_are_undecided(metrics, reason):
    found = diagnose(metrics)
    assert found.verdict == "undecided"
    assert any(reason in because for because in found.undecided_because), found.undecided_because


def test_shared_memory_that_feeds_tensor_cores_is_no_limit_of_memory():
    product = {**PRODUCT, t.MEMORY: PRODUCT[t.COMPUTE], t.L1: 98.0, t.L2: 48.0, t.DRAM: 21.0}
    assert diagnose(product).verdict == "compute"
    assert "feeds the tensor cores" in diagnose(product).statement
    assert diagnose({**product, t.L2: 90.0}).verdict == "balanced"
    assert diagnose({**product, TENSOR: 20.0}).verdict == "balanced"
    assert diagnose({key: value for key, value in product.items() if key != t.L2}).verdict == "balanced"


def test_stalls_on_the_other_side_do_not_agree_with_a_throughput():
    metrics = {**PRODUCT, TENSOR: 20.0, t.WARP_LATENCY: 10.0, stall("long_scoreboard"): 8.0}
    found = diagnose(metrics)
    assert found.verdict == "undecided"
    assert "Warps wait for long_scoreboard most (80%), which is not a unit that computes." in found.undecided_because
    assert diagnose({**metrics, stall("long_scoreboard"): 0.0, stall("math_pipe_throttle"): 8.0}).verdict == "compute"


SIDES = {
    "busy": lambda x: diagnose({**STREAMING, t.MEMORY: x, t.DRAM: 92.0}).verdict,
    "saturated": lambda x: "little is left" in diagnose({**STREAMING, t.MEMORY: x}).observations[1].statement,
    "balanced": lambda x: diagnose({**PRODUCT, t.MEMORY: 88.0 - x, t.L2: 80.0}).verdict,
    "full_wave": lambda x: diagnose({**SMALL, t.WAVES: x}).verdict,
    "memory_level": lambda x: diagnose({**STREAMING, t.DRAM: x, t.L2: 5.0}).verdict,
    "busy_pipe": lambda x: diagnose({**PRODUCT, TENSOR: x}).verdict,
    "stall": lambda x: diagnose({**WAITING, stall("long_scoreboard"): 20.0 * x}).verdict,
    "issue": lambda x: diagnose({**WAITING, t.ISSUE: x}).verdict,
    "possible_occupancy": lambda x: diagnose({t.POSSIBLE_OCCUPANCY: x}).rules_out == [],
    "lost_occupancy": lambda x: len(diagnose({t.POSSIBLE_OCCUPANCY: 100.0, t.ACHIEVED_OCCUPANCY: 100.0 - x}).rules_out),
    "tail": lambda x: diagnose({t.WAVES: 2 * (1 - x)}).rules_out == [],
    "cached": lambda x: diagnose({t.L2_HITS: x}).rules_out == [],
}


def test_every_row_of_the_table_is_tested():
    assert set(SIDES) == {row.name for row in THRESHOLDS}
    assert all(row.says and row.source and row.unit for row in THRESHOLDS)


@pytest.mark.parametrize("name", SIDES)
def test_a_metric_changes_what_is_said_at_its_limit_and_nowhere_near_it(name):
    step = limit(name) / 100
    below, above = SIDES[name](limit(name) - step), SIDES[name](limit(name) + step)
    assert below != above
    assert SIDES[name](limit(name) - 2 * step) == below
    assert SIDES[name](limit(name) + 2 * step) == above


def test_the_last_wave_that_stays_half_empty_is_told():
    found = diagnose({**STREAMING, t.WAVES: 1.1})
    assert found.tail_frac == pytest.approx(0.45)
    assert any("leaves 45% of all places empty" in row.statement for row in found.observations)


def test_lost_and_missing_occupancy_are_told_apart():
    even = diagnose({t.POSSIBLE_OCCUPANCY: 100.0, t.ACHIEVED_OCCUPANCY: 97.0})
    uneven = diagnose({t.POSSIBLE_OCCUPANCY: 100.0, t.ACHIEVED_OCCUPANCY: 55.0})
    assert any("spread evenly" in reason for reason in even.rules_out)
    assert any("blocks end at different times" in row.statement for row in uneven.observations)


def test_the_roofline_point_is_of_the_precision_that_did_most():
    operation = "smsp__sass_thread_inst_executed_op_{}_pred_on.sum.per_cycle_elapsed"
    metrics = {
        operation.format("fadd"): 100.0,
        operation.format("fmul"): 0.0,
        operation.format("ffma"): 200.0,
        "sm__sass_thread_inst_executed_op_ffma_pred_on.sum.peak_sustained": 1000.0,
        "sm__cycles_elapsed.avg.per_second": 1e9,
        "dram__bytes.sum.per_second": 1e12,
        "dram__bytes.sum.peak_sustained": 1000.0,
        "dram__cycles_elapsed.avg.per_second": 2e9,
    }
    point = diagnose(metrics).roofline
    assert (point.precision, point.compute_frac, point.bandwidth_frac) == ("float32", 0.25, 0.5)
    assert (point.arithmetic_intensity, point.ridge_flops_per_byte) == (0.5, 1.0)
    assert not point.has_uncounted_tensor_work
    assert diagnose({**metrics, TENSOR: 40.0}).roofline.has_uncounted_tensor_work
    del metrics["dram__bytes.sum.per_second"]
    assert diagnose(metrics).roofline is None
