"""All that rung 4 derives from a window, on recorded CUDA windows, against plain loops over their JSON."""

import gzip
import json
from pathlib import Path

import pytest

from perfladder.peaks import datasheet_peaks
from perfladder.profiling.kernel_evidence import add_idle, collect_evidence, per_call
from perfladder.trace.attribution import attribute
from perfladder.trace.kernels import list_kernels
from perfladder.trace.model import Trace
from perfladder.trace.regions import report_regions
from perfladder.trace.residual import IdleSplit
from perfladder.trace.work import OperatorCall

CUDA = Path(__file__).parents[1] / "data" / "cuda"
RUNS = 3
SHEET = datasheet_peaks("NVIDIA H200", reason="a recorded window")


def spans(scene):
    with gzip.open(CUDA / f"{scene}.json.gz") as file:
        return [event for event in json.load(file)["traceEvents"] if event["ph"] == "X"]


def collect(scene, **options):
    trace = Trace.read(CUDA / f"{scene}.json.gz")
    attribution = attribute(trace)
    table = list_kernels(trace, attribution, only_runs=True)
    report = report_regions(trace, attribution)
    idle = add_idle([run.device for run in report.runs])
    return collect_evidence(table, attribution, idle, repeats=RUNS, peaks=SHEET, **options), report


def test_work_of_a_convolution_is_held_against_the_peaks():
    """The window's own network: 32 to 32 channels, 3x3, on [2, 32, 16, 16]."""
    flops = 2 * (2 * 32 * 16 * 16) * (32 * 9)
    num_bytes = 4 * (2 * 2 * 32 * 256 + 32 * 32 * 9 + 32)
    call = OperatorCall("untuned_module:net.conv", "aten::convolution", flops, num_bytes, "float32")
    evidence, _ = collect("eager", calls=[call])
    (row,) = evidence.roofline
    took = sum(e["dur"] for e in work("eager") if "fprop_implicit_gemm" in e["name"])
    assert (row.count, row.flops, row.precision, row.family) == (1, flops, "float32", "convolution")
    assert row.num_kernels == 2  # the product, and the bias
    assert row.total_us > took / RUNS
    assert row.compute_tflops == pytest.approx(flops / row.total_us / 1e6)
    assert row.compute_frac == pytest.approx(row.compute_tflops / 67)
    assert "of the data sheet compute peak" in row.statement
    assert evidence.flops_known_share == pytest.approx(row.total_us * RUNS / sum(e["dur"] for e in work("eager")))


def work(scene):
    return [e for e in spans(scene) if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]


def test_waits_of_the_stage_are_named_and_those_of_the_replay_are_not():
    evidence, _ = collect("eager")
    assert {(site.outer_operator, site.count) for site in evidence.synchronizations} == {
        ("aten::item", 1),
        ("aten::to", 1),
    }
    assert collect("compiled")[0].synchronizations == []


@pytest.mark.parametrize("scene", ["eager", "graph", "compiled", "streams"])
def test_everything_adds_up_a_call(scene):
    evidence, report = collect(scene)
    total = sum(e["dur"] for e in work(scene)) / RUNS
    for rows in (evidence.families, evidence.kernels, evidence.ranking, evidence.operator_ranking):
        assert sum(row.total_us for row in rows) == pytest.approx(total)
        assert sum(row.share for row in rows) == pytest.approx(1)
    busy = sum(run.device.busy_us for run in report.runs) / sum(run.device.window_us for run in report.runs)
    assert evidence.bound.profiled_busy_frac == pytest.approx(busy)
    assert evidence.bound.verdict == "host"
    won = sum(group.possible_win_us for group in evidence.ranking)
    assert won == pytest.approx(evidence.bound.critical_frac * total)
    assert all(group.achieved_frac is None for group in evidence.ranking)


def test_a_device_that_is_busy_in_plain_runs_is_waited_for_everywhere():
    evidence, _ = collect("eager", unprofiled_ms=0.08, busy_ms=0.075)
    assert evidence.bound.verdict == "device"
    assert all(group.critical_us == pytest.approx(group.total_us) for group in evidence.ranking)


def test_rows_of_several_runs_become_those_of_a_call():
    idle = IdleSplit(window_us=9, busy_us=3, idle_us=6, waiting_for_launch_us=3, in_synchronization_us=0, other_us=3)
    assert add_idle([idle, None, idle]).window_us == 18
    assert add_idle([None]) is None
    row = collect("eager")[0].families[0]
    assert per_call(row, 2).total_us == row.total_us / 2
    assert per_call(row, 2).mean_gap_us == row.mean_gap_us
