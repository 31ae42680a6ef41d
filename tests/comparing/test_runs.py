"""Two versions compared by their run directories: what may be compared, and what is said of it."""

import re

import pytest
from clocked_runs import IDLE, clocked_run

import perfladder as pl
from perfladder.comparing.model import RunComparison
from perfladder.comparing.views import render_comparison
from perfladder.environment import DeviceSnapshot
from perfladder.errors import InputError
from perfladder.ladder import load_results
from perfladder.rundir import RunDirectory
from perfladder.rungs.kernels import KernelsResult
from perfladder.rungs.regions import RegionsResult, RegionSummary
from perfladder.timing.results import Compilations
from perfladder.trace.kernels import KernelSummary
from perfladder.trace.launches import FamilyRow

PARTS = {"encoder": 10.0, "decoder": 30.0}


def change_stages(path, **changes):
    """Rewrite rung 1 of a run with other values."""
    run = RunDirectory.open(path)
    result = load_results(run)["stages"].model_copy(update=changes)
    run.write_result(path / "1-stages", "stages", result, "done", None)


def row(rows, name):
    return next(row for row in rows if row.name == name)


def codes(comparison):
    return [warning.code for warning in comparison.warnings]


def regions(cpu_ms):
    summaries = [
        RegionSummary(
            region_id=f"untuned_module:{name}",
            name=name,
            module_type="Linear",
            calls_per_run=1,
            cpu_ms=ms,
            cpu_share=0.5,
            device_ms=None,
            device_share=None,
        )
        for name, ms in cpu_ms.items()
    ]
    return RegionsResult(regions=summaries)


def kernels(us, stage="decoder"):
    """Rung 4 with kernels by (name, family)."""
    rows = [
        KernelSummary(
            kernel=name,
            category="kernel",
            operator="aten::mm",
            outer_operator=None,
            function=None,
            region=None,
            count=2,
            total_us=time_us,
            mean_us=time_us / 2,
            share=0.5,
            family=family,
            example_event=0,
        )
        for (name, family), time_us in us.items()
    ]
    families = {}
    for (_, family), time_us in us.items():
        families[family] = families.get(family, 0.0) + time_us
    return KernelsResult(
        stage=stage,
        kind="kernels",
        kernels=rows,
        families=[
            FamilyRow(
                family=family,
                count=2,
                total_us=time_us,
                share=0.5,
                launch_call_us=None,
                mean_gap_us=None,
                mean_launch_latency_us=None,
            )
            for family, time_us in families.items()
        ],
    )


def test_a_slower_stage_is_found_with_an_interval_and_the_others_are_the_same(tmp_path):
    baseline = clocked_run(tmp_path, PARTS, commit="a" * 40)
    candidate = clocked_run(tmp_path, {**PARTS, "decoder": 36.0}, seed=1, commit="b" * 40)
    found = pl.compare(baseline, candidate)
    assert (found.verdict, found.is_slower, found.next_step) == ("slower", True, None)
    end_to_end, stages = found.scenarios[0].end_to_end, found.scenarios[0].stages
    assert end_to_end.comparison.unit == "launches"
    assert end_to_end.interval.low < 41 / 47 < end_to_end.interval.high < 1
    assert end_to_end.speedup == pytest.approx(41 / 47, rel=0.02)
    decoder, encoder = row(stages, "decoder"), row(stages, "encoder")
    assert (decoder.verdict, encoder.verdict) == ("slower", "same")
    assert decoder.change == pytest.approx(6, rel=0.1)
    assert 0 < encoder.same_within <= 0.05
    assert stages[0] is decoder, "the largest change comes first"
    assert row(stages, "(outside every stage)").speedup == pytest.approx(1)
    assert {d.field for d in found.configuration} == {"commit"}
    assert found.warnings == []


def test_swapping_the_sides_turns_slower_into_faster(tmp_path):
    baseline = clocked_run(tmp_path, PARTS)
    candidate = clocked_run(tmp_path, {**PARTS, "decoder": 36.0}, seed=1)
    found = pl.compare(candidate, baseline)
    assert (found.verdict, found.is_slower) == ("faster", False)
    assert found.metric.speedup > 1


def test_two_single_launches_are_undecided_however_far_apart_and_say_what_to_do(tmp_path):
    baseline = clocked_run(tmp_path, PARTS, launches=1)
    candidate = clocked_run(tmp_path, {**PARTS, "decoder": 90.0}, launches=1)
    found = pl.compare(baseline, candidate)
    assert (found.verdict, found.is_slower) == ("undecided", False)
    assert found.metric.speedup == pytest.approx(41 / 101, rel=0.05)
    assert found.metric.interval is None
    assert "there are 1 and 1" in found.reason
    assert "--set launches=5" in found.next_step
    assert "--interleave" in found.next_step


def test_five_runs_a_side_count_as_five_launches_and_give_regions_an_interval(tmp_path):
    sides = [
        [
            clocked_run(
                tmp_path, {**PARTS, "decoder": ms}, launches=1, seed=n, further=(regions({"decoder": ms + 0.1 * n}),)
            )
            for n in range(5)
        ]
        for ms in (30.0, 36.0)
    ]
    found = pl.compare(*sides)
    assert (found.verdict, found.baseline.num_launches, len(found.baseline.runs)) == ("slower", 5, 5)
    assert found.regions.rows[0].verdict == "slower"


def test_one_profiled_window_a_side_gives_a_ratio_and_no_verdict(tmp_path):
    baseline = clocked_run(tmp_path, PARTS, further=(regions({"decoder": 30.0, "old": 5.0}),))
    candidate = clocked_run(tmp_path, PARTS, seed=1, further=(regions({"decoder": 60.0, "new": 7.0}),))
    found = pl.compare(baseline, candidate).regions
    assert [(r.name, r.speedup, r.interval, r.verdict) for r in found.rows] == [("decoder", 0.5, None, "undecided")]
    assert [(r.name, r.only, r.value) for r in found.only_one_side] == [("new", "candidate", 7), ("old", "baseline", 5)]


def test_kernels_that_moved_are_named_with_their_us_and_families_of_one_side_too(tmp_path):
    before = {("gemm_128", "gemm"): 100.0, ("add", "elementwise"): 10.0, ("softmax", "softmax"): 4.0}
    after = {("gemm_256", "gemm"): 70.0, ("add", "elementwise"): 12.0}
    sides = [clocked_run(tmp_path, PARTS, seed=n, further=(kernels(us),)) for n, us in enumerate((before, after))]
    found = pl.compare(*sides)
    assert [(k.name, k.change_us, k.candidate_count) for k in found.kernels_moved] == [
        ("gemm_128", -100, 0),
        ("gemm_256", 70, 2),
        ("softmax", -4, 0),
        ("add", 2, 2),
    ]
    assert row(found.families.rows, "gemm").speedup == pytest.approx(100 / 70)
    assert [(r.name, r.only) for r in found.families.only_one_side] == [("softmax", "baseline")]
    text = render_comparison(found)
    assert "| gemm_256 | gemm | not there | 70 us | +70 us |" in text
    assert "`softmax` is in the baseline only: 4 us" in text


def test_kernels_of_another_stage_are_not_compared(tmp_path):
    us = {("gemm", "gemm"): 1.0}
    sides = [clocked_run(tmp_path, PARTS, further=(kernels(us, stage),)) for stage in ("decoder", "encoder")]
    found = pl.compare(*sides)
    assert (found.families, found.kernels_moved) == (None, [])
    assert codes(found) == ["RUNG_NOT_COMPARED"]


def test_a_stage_of_one_side_only_is_named(tmp_path):
    baseline = clocked_run(tmp_path, {**PARTS, "upscaler": 5.0})
    candidate = clocked_run(tmp_path, {**PARTS, "safety": 4.0}, seed=1)
    found = pl.compare(baseline, candidate).scenarios[0]
    assert {r.name for r in found.stages} == {"encoder", "decoder", "(outside every stage)"}
    assert {(r.name, r.only) for r in found.only_one_side} == {("upscaler", "baseline"), ("safety", "candidate")}


def test_different_work_is_refused_with_the_fields_that_differ(tmp_path):
    baseline = clocked_run(tmp_path, PARTS, inputs={"width": 4})
    candidate = clocked_run(tmp_path, PARTS, inputs={"width": 8}, seed=0, model="sd-tiny")
    with pytest.raises(
        InputError, match=r"(?s)same work.*inputs\.width: 4 in the baseline, 8 in the candidate"
    ) as caught:
        pl.compare(baseline, candidate)
    assert "model: None in the baseline, 'sd-tiny' in the candidate" in str(caught.value)
    assert "dtype" in str(caught.value), "what may differ is said"


def test_configuration_and_environment_are_what_is_compared(tmp_path):
    baseline = clocked_run(tmp_path, PARTS, dtype=None)
    candidate = clocked_run(tmp_path, PARTS, seed=1, dtype="bfloat16", compile={"mode": "reduce-overhead"})
    path = candidate / "environment.json"
    path.write_text(re.sub(r'"torch":"[^"]*"', '"torch":"9.9"', path.read_text()))
    found = pl.compare(baseline, candidate)
    changed = {d.field: d.candidate for d in found.configuration}
    assert changed == {"dtype": "bfloat16", "compile.mode": "reduce-overhead"}
    assert [(d.field, d.candidate) for d in found.environment] == [("packages.torch", "9.9")]


def test_other_ways_of_measuring_and_another_state_of_the_machine_are_warnings(tmp_path):
    baseline = clocked_run(tmp_path, PARTS)
    candidate = clocked_run(tmp_path, PARTS, seed=1, measured_runs=12, dirty=True, commit="c" * 40)
    busy = IDLE.model_copy(update={"load_average_1m": 1.9, "torch_threads": 2})
    clocks = [DeviceSnapshot(index=0, sm_clock_mhz=mhz) for mhz in (1980, 1500)]
    for path, before, device in ((baseline, IDLE, clocks[0]), (candidate, busy, clocks[1])):
        after = before.model_copy(update={"devices": [device]})
        change_stages(path, snapshot_before=before, snapshot_after=after)
    found = pl.compare(baseline, candidate)
    messages = {warning.code: warning.message for warning in found.warnings}
    assert set(messages) == {"PROTOCOL_DIFFERS", "MACHINE_STATE_DIFFERS", "UNCOMMITTED_CHANGES"}
    assert "measured_runs 10 and 12" in messages["PROTOCOL_DIFFERS"]
    state = messages["MACHINE_STATE_DIFFERS"]
    assert all(part in state for part in ("load 0.1 and 1.9", "torch threads 1 and 2", "clock MHz 1980 and 1500"))
    assert "candidate had" in messages["UNCOMMITTED_CHANGES"]


def test_another_output_is_a_warning_and_so_is_a_run_that_was_cut_off(tmp_path):
    baseline, candidate = (clocked_run(tmp_path, PARTS, seed=n) for n in (0, 1))
    observed = load_results(RunDirectory.open(candidate))["stages"].observed
    change_stages(candidate, observed=observed.model_copy(update={"output_shapes": {"output": [1, 8]}}))
    RunDirectory.open(candidate).update(status="interrupted")
    found = pl.compare(baseline, candidate)
    assert codes(found) == ["OUTPUT_DIFFERS", "RUN_INCOMPLETE"]
    assert "[1, 4] and [1, 8]" in found.warnings[0].message


def test_more_graph_breaks_are_counted_whatever_the_times_say(tmp_path):
    sides = [clocked_run(tmp_path, PARTS, seed=n) for n in (0, 1)]
    for path, breaks in zip(sides, (0, 2), strict=True):
        change_stages(path, compilations={"first_call": Compilations(graphs=3, graph_breaks=breaks)})
    found = pl.compare(*sides)
    assert [(c.name, c.baseline, c.candidate) for c in found.counts] == [("graph_breaks", 0, 2)]
    assert found.has_more_graph_breaks
    assert not pl.compare(*reversed(sides)).has_more_graph_breaks


@pytest.mark.parametrize(
    ("metric", "name"), [("throughput", "time of an item (throughput)"), ("latency_p95", "latency_p95")]
)
def test_the_verdict_is_that_of_the_workloads_own_metric(tmp_path, metric, name):
    baseline = clocked_run(tmp_path, PARTS, metric=metric, items_per_call=4)
    candidate = clocked_run(tmp_path, {**PARTS, "decoder": 20.0}, seed=1, metric=metric, items_per_call=4)
    found = pl.compare(baseline, candidate)
    assert (found.metric_name, found.metric.name, found.verdict) == (metric, name, "faster")
    if metric == "throughput":
        assert found.metric.baseline == pytest.approx(41 / 4, rel=0.05)


def test_peak_memory_of_one_run_a_side_is_undecided(tmp_path):
    sides = [clocked_run(tmp_path, PARTS, metric="peak_memory", seed=n) for n in (0, 1)]
    found = pl.compare(*sides)
    assert (found.verdict, found.metric.unit) == ("undecided", "bytes")


def test_a_change_below_the_least_effect_is_the_same_and_one_around_it_undecided(tmp_path):
    baseline = clocked_run(tmp_path, PARTS, noise=0.001)
    candidate = clocked_run(tmp_path, {**PARTS, "decoder": 31.2}, seed=1, noise=0.001)
    assert pl.compare(baseline, candidate, min_effect=0.01).verdict == "slower"
    assert pl.compare(baseline, candidate, min_effect=0.05).verdict == "same"
    below_noise = pl.compare(baseline, candidate, aa_noise_floor=0.1)
    assert (below_noise.verdict, "noise floor" in below_noise.reason) == ("undecided", True)


def test_runs_that_nobody_can_compare_are_refused(tmp_path):
    run = clocked_run(tmp_path, PARTS)
    with pytest.raises(InputError, match="Both sides name the run"):
        pl.compare(run, run)
    with pytest.raises(InputError, match="given twice"):
        pl.compare([run, run], clocked_run(tmp_path, PARTS))
    with pytest.raises(InputError, match=r"one version.*commit is 'a+' and 'b+'"):
        pl.compare(run, [clocked_run(tmp_path, PARTS, commit=c * 40) for c in "ab"])
    with pytest.raises(InputError, match="min_effect is -1"):
        pl.compare(run, clocked_run(tmp_path, PARTS), min_effect=-1)
    (run / "1-stages" / "stages.json").write_text("{")
    with pytest.raises(InputError, match=r"stages\.json is damaged"):
        pl.compare(run, clocked_run(tmp_path, PARTS))


def test_a_run_without_stage_timing_says_so(tmp_path, make_workload):
    run = RunDirectory.create(tmp_path, make_workload(), source="x", base_dir=tmp_path)
    run.update(status="failed", error="the target cannot be built.")
    with pytest.raises(InputError, match=r"no stage timing.*the target cannot be built\. Run the"):
        pl.compare(run.path, clocked_run(tmp_path, PARTS))


def test_every_scenario_is_compared_and_a_slower_one_is_not_overlooked(tmp_path):
    fields = {"scenarios": {"wide": {"width": 8}}}
    sides = [clocked_run(tmp_path, PARTS, seed=n, **fields) for n in (0, 1)]
    stages = load_results(RunDirectory.open(sides[1]))["stages"]
    wide = stages.scenarios[1]
    launches = [[2 * value for value in launch] for launch in wide.wall_ms.launches]
    slower = wide.model_copy(update={"wall_ms": wide.wall_ms.model_copy(update={"launches": launches})})
    change_stages(sides[1], scenarios=[stages.scenarios[0], slower])
    found = pl.compare(*sides)
    assert [s.name for s in found.scenarios] == ["default", "wide"]
    assert (found.verdict, found.is_slower) == ("same", True)


def test_the_comparison_survives_its_file_and_renders_alike(tmp_path):
    sides = [clocked_run(tmp_path, PARTS, seed=n) for n in (0, 1)]
    found = pl.compare(*sides)
    again = RunComparison.model_validate_json(found.model_dump_json())
    assert again == found
    assert render_comparison(again) == render_comparison(found)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_tables_fit_the_terminal(tmp_path, width):
    from rich.console import Console
    from rich.markdown import Markdown

    sides = [clocked_run(tmp_path, {**PARTS, "a" * 70 + "." + "b" * 30: 1.0}.copy(), seed=n) for n in (0, 1)]
    console = Console(width=width, file=(tmp_path / "out").open("w+"))
    console.print(Markdown(render_comparison(pl.compare(*sides))))
    console.file.seek(0)
    lines = console.file.read().splitlines()
    console.file.close()
    assert max(map(len, lines)) <= width
    assert any("decoder" in line for line in lines)
