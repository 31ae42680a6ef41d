"""All that rung 4 derives from a window, on recorded CUDA windows, against plain loops over their JSON."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from perfladder.peaks import datasheet_peaks
from perfladder.profiling.kernel_evidence import collect_evidence, per_call
from perfladder.trace.attribution import attribute
from perfladder.trace.kernels import list_kernels
from perfladder.trace.model import Trace
from perfladder.trace.regions import middle_run, report_regions
from perfladder.trace.repeats import take_typical
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
    idle = middle_run(report.runs).device
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


@pytest.mark.parametrize(
    ("scene", "verdict"), [("eager", "host"), ("graph", "mixed"), ("compiled", "host"), ("streams", "mixed")]
)
def test_everything_adds_up_a_call(scene, verdict):
    evidence, report = collect(scene)
    total = sum(e["dur"] for e in work(scene)) / RUNS
    for rows in (evidence.families, evidence.kernels, evidence.ranking, evidence.operator_ranking):
        assert sum(row.total_us for row in rows) == pytest.approx(total)
        assert sum(row.share for row in rows) == pytest.approx(1)
    middle = middle_run(report.runs).device
    assert evidence.bound.profiled_busy_frac == pytest.approx(middle.busy_us / middle.window_us)
    assert evidence.bound.verdict == verdict
    won = sum(group.possible_win_us for group in evidence.ranking)
    assert won == pytest.approx(evidence.bound.critical_frac * total)
    assert all(group.achieved_frac is None for group in evidence.ranking)


@pytest.mark.parametrize("scene", ["eager", "graph", "compiled", "streams"])
def test_a_pause_of_the_machine_in_one_repeat_moves_no_share_and_no_order(scene):
    trace = Trace.read(CUDA / f"{scene}.json.gz")
    table = list_kernels(trace, attribute(trace), only_runs=True)
    longest = table.event[table.duration_ns.argmax()]
    before, after = (typical(one) for one in (trace, paused(trace, trace.start_ns[longest] + 1, 50_000_000)))
    assert [row.kernel for row in after.kernels] == [row.kernel for row in before.kernels]
    assert [row.total_us for row in after.kernels] == pytest.approx([row.total_us for row in before.kernels])
    assert [row.share for row in after.families] == pytest.approx([row.share for row in before.families])
    assert [row.operator for row in after.operator_ranking] == [row.operator for row in before.operator_ranking]
    won, still = ([row.possible_win_us for row in one.operator_ranking] for one in (before, after))
    assert still == pytest.approx(won)
    (stalled,) = (row for row in after.kernels if max(row.repeat_us) > 50_000)
    assert sum(us > 50_000 for us in stalled.repeat_us) == 1
    for rows in (after.families, after.kernels, after.ranking, after.operator_ranking):
        assert sum(row.share for row in rows) == pytest.approx(1)
        assert sum(row.total_us for row in rows) == pytest.approx(sum(row.total_us for row in before.families))


def paused(trace, at_ns, pause_ns):
    """The window of a machine that stood still for a while: what runs then takes longer, and all else comes later."""
    is_running = (trace.start_ns <= at_ns) & (trace.end_ns > at_ns)
    return replace(
        trace,
        start_ns=trace.start_ns + pause_ns * (trace.start_ns > at_ns),
        duration_ns=trace.duration_ns + pause_ns * is_running,
    )


def typical(trace):
    """The evidence with the typical repeat of each row, as rung 4 has it."""
    attribution = attribute(trace)
    table = take_typical(list_kernels(trace, attribution, only_runs=True), RUNS)
    middle = middle_run(report_regions(trace, attribution).runs)
    return collect_evidence(table, attribution, middle.device, repeats=RUNS, peaks=SHEET)


def test_a_device_that_is_busy_in_plain_runs_is_waited_for_everywhere():
    evidence, _ = collect("eager", unprofiled_ms=0.08, busy_ms=0.075)
    assert evidence.bound.verdict == "device"
    assert all(group.critical_us == pytest.approx(group.total_us) for group in evidence.ranking)


def test_rows_of_several_runs_become_those_of_a_call():
    row = collect("eager")[0].families[0]
    assert per_call(row, 2).total_us == row.total_us / 2
    assert per_call(row, 2).mean_gap_us == row.mean_gap_us
