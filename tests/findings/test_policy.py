"""The policy table, row by row, on recorded results and on results made for a case; every row has both sides."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from backgrounds import make_background

from perfladder.findings import POLICY, collect_findings, rungs_to_skip, smallest_next_experiment
from perfladder.findings.host_bound import Pace, pace_findings
from perfladder.findings.load import load_findings
from perfladder.findings.movement import communication_findings, transfer_findings
from perfladder.findings.regions import regions_findings
from perfladder.findings.stages import stages_findings
from perfladder.ladder import rung_named
from perfladder.rundir import read_model
from perfladder.rungs.base import RungResult
from perfladder.rungs.regions import RegionsResult
from perfladder.rungs.stages import StagesResult
from perfladder.stats import Interval, Samples, summarize
from perfladder.target import LoadedInfo
from perfladder.timing.results import CadenceTiming, Compilations, MemoryGrowth, ScenarioTiming, StageTiming
from perfladder.trace.copies import CopySite
from perfladder.trace.lanes import HostGap
from perfladder.trace.residual import HostSplit, IdleSplit
from perfladder.trace.timeline import CommunicationRow, Overlap, Timeline
from perfladder.trace.waits import WaitModel, WaitSite
from perfladder.workload import parse_workload

RECORDED = Path(__file__).parents[1] / "data" / "findings"
NAMES = sorted(path.name for path in RECORDED.iterdir() if path.is_dir())


def recorded(name):
    """The findings of a recorded climb, from its result files."""
    folder, results = RECORDED / name, {}
    for rung in ("stages", "capture", "regions", "harness", "kernels"):
        if (path := folder / f"{rung}.json").exists():
            results[rung] = read_model(path, rung_named(rung).result_type)
    info = read_model(folder / "environment.json", LoadedInfo)
    workload = parse_workload({"name": name, "target": f"planted.py:{name}", "device": "cuda"})
    return collect_findings(workload, info, results, source=f"{name}.yaml")


EXPECTED = {
    "chain": {"dominant_stage", "host_bound_dispatch"},
    "glue": {"dominant_stage", "host_bound_python"},
    "copies": {"outside_dominates", "transfer_bound"},
    "products": {"dominant_stage", "device_bound", "dominant_kernels"},
    "wide": {"dominant_stage", "wider_dtype", "device_bound", "largest_possible_win"},
    "waiting": {"dominant_stage", "host_bound_synchronization", "device_bound"},
    "ahead": {"dominant_stage", "host_bound_python"},
}
CAUSES = {
    "host_bound_synchronization",
    "host_bound_dispatch",
    "host_bound_python",
    "transfer_bound",
    "communication_bound",
    "device_bound",
    "wider_dtype",
    "compile_churn",
    "memory_capacity",
}


@pytest.mark.parametrize("name", NAMES)
def test_planted_faults_are_found_and_nothing_else_is_called_the_cause(name):
    kinds = {finding.kind for finding in recorded(name)}
    assert EXPECTED[name] <= kinds
    assert kinds & CAUSES == EXPECTED[name] & CAUSES


@pytest.mark.parametrize("name", NAMES)
def test_every_finding_can_be_checked_and_promises_nothing(name):
    for finding in recorded(name):
        assert finding.evidence
        assert finding.uncertainty
        assert finding.refuted_by
        assert finding.next_experiment
        folder = RECORDED / name
        for evidence in finding.evidence:
            file = evidence.source.partition(".json")[0]
            assert (folder / f"{file}.json").exists(), evidence.source
        text = json.dumps(finding.model_dump())
        assert "speedup" not in text
        assert finding.next_command is None or finding.next_command.startswith("perfladder ")


def test_commands_of_findings_exist():
    from typer.testing import CliRunner

    from perfladder.cli import app

    commands = {f.next_command for name in NAMES for f in recorded(name) if f.next_command}
    assert commands
    for command in commands:
        verb = command.split()[1]
        options = [word for word in command.split() if word.startswith("--")]
        shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"}).output
        assert all(option in shown for option in options), command


def test_the_first_experiment_settles_the_cause():
    assert smallest_next_experiment(recorded("wide")).kind == "wider_dtype"
    assert smallest_next_experiment(recorded("glue")).kind == "host_bound_python"
    assert smallest_next_experiment([]) is None


def test_what_dominates_outside_makes_replays_needless():
    assert set(rungs_to_skip(recorded("copies"))) == {"capture", "harness", "kernels", "ncu"}
    assert rungs_to_skip(recorded("glue")) == {}


# Rows that no recorded climb has, and the other side of each threshold.


def timing(share=0.9, dtypes=(), name="unet", **fields):
    interval = Interval(low=share - 0.02, high=share + 0.02)
    samples = Samples(launches=[[share] * 3])
    return StageTiming(
        name=name,
        owner_type="Net",
        is_module=True,
        dtypes=list(dtypes),
        calls_per_run=1,
        total_ms=samples,
        self_ms=samples,
        call_ms=summarize([share] * 3),
        share=share,
        share_interval=interval,
        **fields,
    )


def stages(*rows, outside=0.05, **fields):
    scenario = ScenarioTiming(
        name="default",
        wall_ms=Samples(launches=[[1.0] * 3]),
        outside_ms=Samples(launches=[[outside] * 3]),
        outside_share=outside,
        outside_share_interval=Interval(low=outside - 0.01, high=outside + 0.01),
        stages=list(rows),
    )
    return StagesResult(scenarios=[scenario], **fields)


def kinds_of(result, device="cpu", **workload):
    return {finding.kind for finding in stages_findings(result, make_background(device, **workload))}


def test_stage_shares():
    assert "dominant_stage" in kinds_of(stages(timing(0.3)))
    assert "no_dominant_stage" in kinds_of(stages(timing(0.21)))
    assert "outside_dominates" in kinds_of(stages(timing(0.3), outside=0.6))
    assert "outside_dominates" not in kinds_of(stages(timing(0.45), outside=0.505))
    assert "outside_dominates" in kinds_of(stages())


@pytest.mark.parametrize(
    ("parts", "is_found"),
    [
        ({"first_call": Compilations(graphs=3)}, False),
        ({"first_call": Compilations(graphs=3, graph_breaks=2)}, True),
        ({"measured": Compilations(graphs=1, recompiles=1)}, True),
        ({"warmup": Compilations(limit_hits=1)}, True),
        ({}, False),
    ],
)
def test_compile_churn(parts, is_found):
    assert ("compile_churn" in kinds_of(stages(timing(), compilations=parts))) is is_found


def test_wider_weights_count_where_the_stage_takes_time():
    narrow, wide = timing(0.4, ["bfloat16"], "encoder"), timing(0.5, ["float32"], "decoder")
    assert "wider_dtype" in kinds_of(stages(narrow, wide))
    assert "wider_dtype" not in kinds_of(stages(narrow, timing(0.09, ["float32"], "decoder")))
    assert "wider_dtype" not in kinds_of(stages(timing(0.4, ["float32"]), wide))
    assert "wider_dtype" not in kinds_of(stages(narrow, timing(0.5, ["bfloat16", "float32"], "decoder")))


def test_memory_capacity():
    total = make_background().info.environment.total_memory_bytes
    assert "memory_capacity" in kinds_of(stages(timing(), peak_host_rss_bytes=int(total * 0.85)))
    assert "memory_capacity" not in kinds_of(stages(timing(), peak_host_rss_bytes=int(total * 0.7)))
    failed = RungResult(rung="harness", status="failed", reason="torch.OutOfMemoryError: CUDA out of memory.")
    background = make_background()

    def of(result):
        return [f.kind for f in collect_findings(background.workload, background.info, {"harness": result})]

    assert of(failed) == ["memory_capacity"]
    assert of(failed.model_copy(update={"reason": "ValueError: no"})) == []


def test_memory_of_a_stage_and_its_growth():
    from perfladder.timing.results import StageMemory

    memory = StageMemory(peak_bytes=10, increase_bytes=5, self_peak_bytes=10)
    result = stages(timing(memory=memory), dominating="unet")
    assert "peak_memory_stage" in kinds_of(result, metric="peak_memory")
    assert "peak_memory_stage" not in kinds_of(result)
    growth = MemoryGrowth(is_growing=True, bytes_per_run=1e6, reason="It grows.")
    assert "memory_grows" in kinds_of(stages(timing(), host_memory_growth=growth))
    found = stages_findings(stages(timing(), host_memory_growth=growth), make_background())
    assert [one.uncertainty for one in found if one.kind == "memory_grows"] == ["It grows"]
    level = growth.model_copy(update={"is_growing": False})
    assert "memory_grows" not in kinds_of(stages(timing(), host_memory_growth=level))


@pytest.mark.parametrize(("headroom_ms", "kind"), [(1.0, "cadence_met"), (-1.0, "cadence_missed")])
def test_cadence(headroom_ms, kind):
    chunks = summarize([10.0] * 5)
    cadence = CadenceTiming.model_construct(
        chunk_ms=chunks,
        first_chunk_ms=Samples(launches=[[10.0] * 3]),
        headroom_ms=headroom_ms,
        num_late_chunks=1,
        num_stalls=0,
    )
    result = stages(timing())
    result = result.model_copy(update={"scenarios": [result.default.model_copy(update={"cadence": cadence})]})
    media = {"frames_per_chunk": 1, "fps": 50}
    found = kinds_of(result, metric="cadence_p95", media=media)
    assert kind in found
    assert not found & ({"cadence_met", "cadence_missed"} - {kind})


HOST = {name: 0.0 for name in HostSplit.model_fields if name not in ("num_operators", "synchronizations")}


def pace(busy_ms=4.0, plain_ms=10.0, edge_us=0.0, stage=None, waits=None, **host):
    idle = IdleSplit(
        window_us=20_000,
        busy_us=4_000,
        idle_us=16_000,
        waiting_for_launch_us=16_000,
        in_synchronization_us=0,
        other_us=0,
        edge_us=edge_us,
    )
    return Pace(
        rung="regions" if stage is None else "kernels",
        stage=stage,
        host=HostSplit(**(HOST | host)),
        idle=None if busy_ms is None else idle,
        busy_ms=busy_ms,
        plain_ms=plain_ms,
        waits=waits,
    )


DISPATCHING = {"operator_dispatch_us": 6000.0, "kernel_launch_us": 3000.0, "python_us": 3000.0, "num_operators": 1000}


@pytest.mark.parametrize(
    ("found", "kinds"),
    [
        (pace(**DISPATCHING), ["host_bound_dispatch"]),
        (pace(busy_ms=9.1, **DISPATCHING), []),
        # Python that is no more than calling the operators takes.
        (pace(python_us=9000.0, operator_dispatch_us=3000.0, num_operators=1000), ["host_bound_dispatch"]),
        (pace(python_us=9000.0, operator_dispatch_us=3000.0, num_operators=100), ["host_bound_python"]),
        (pace(), ["device_mostly_idle"]),
        # Idle at the edges only: a run says so, a stage alone is no finding.
        (pace(edge_us=5500, **DISPATCHING), ["device_mostly_idle"]),
        (pace(edge_us=5500, stage="unet", **DISPATCHING), []),
        (pace(plain_ms=None, **DISPATCHING), []),
        # On a CPU, operators' own work against the plain duration.
        (pace(busy_ms=None, operator_compute_us=6000.0, **DISPATCHING), []),
        (pace(busy_ms=None, operator_compute_us=4000.0, **DISPATCHING), ["host_bound_dispatch"]),
        (pace(busy_ms=None, python_us=9000.0, num_operators=10), ["host_bound_python"]),
        (pace(busy_ms=None), []),
    ],
)
def test_who_keeps_the_pace(found, kinds):
    assert [finding.kind for finding in pace_findings(found, make_background())] == kinds


@pytest.mark.parametrize("workload", [{"compile": {}}, {"tuned": {"archive": "net.ait"}}, {"nproc": 2}])
def test_no_tuning_is_proposed_where_it_would_be_refused(workload):
    (plain,) = pace_findings(pace(stage="unet", **DISPATCHING), make_background(modules=["unet"]))
    assert plain.next_command == "perfladder tune n.yaml --module unet --backend inductor_jit:cuda_graphs=true"
    (refused,) = pace_findings(pace(stage="unet", **DISPATCHING), make_background(modules=["unet"], **workload))
    assert refused.kind == plain.kind
    assert refused.next_command is None


@pytest.mark.parametrize(
    ("after", "before", "place"),
    [
        ("marked_stage:check", "untuned_module:unet", "between check and unet"),
        (None, "untuned_module:unet", "before unet"),
        ("untuned_module:vae", None, "after vae"),
    ],
)
def test_where_the_host_is_longest_outside_regions_is_said(after, before, place):
    waits_at_edges = replace(
        pace(busy_ms=8.0, edge_us=1500.0), gap=HostGap(after=after, before=before, duration_us=1400)
    )
    (found,) = pace_findings(waits_at_edges, make_background())
    assert found.next_experiment.endswith(f" The host's longest stretch outside every region, 1.4 ms, is {place}.")
    short = replace(waits_at_edges, gap=HostGap(after=after, before=before, duration_us=100))
    assert "stretch" not in pace_findings(short, make_background())[0].next_experiment


@pytest.mark.parametrize("stage", ["vae.decode", "decode", None])
def test_a_stage_that_is_no_module_is_not_named_to_tuning(stage):
    (found,) = pace_findings(pace(stage=stage, **DISPATCHING), make_background(modules=["unet"]))
    assert found.next_command == "perfladder tune n.yaml --backend inductor_jit:cuda_graphs=true"


@pytest.mark.parametrize(("others_us", "is_found"), [(0.0, False), (900.0, True)])
def test_time_outside_modules_is_no_cause_where_other_threads_work(others_us, is_found):
    data = json.loads((RECORDED / "glue" / "regions.json").read_text())
    data["residual"]["cpu_share"], data["device_busy_ms"] = 0.9, None
    for run in data["runs"]:
        run["other_threads_cpu_time_us"] = others_us / 1000 * run["wall_time_us"]
    kinds = {finding.kind for finding in regions_findings(RegionsResult.model_validate(data), make_background("cpu"))}
    assert ("other_threads" in kinds) is is_found
    assert ("outside_regions" in kinds) is not is_found
    assert ("host_bound_python" in kinds) is not is_found


def wait_model(without_ms):
    site = WaitSite(
        operator="aten::_local_scalar_dense",
        outer_operator="aten::item",
        call="cudaStreamSynchronize",
        region_id="untuned_module:scheduler.step",
        count=4,
        wait_us=3000.0,
    )
    return WaitModel(host_scale=0.5, plain_us=10_000, without_waits_us=without_ms * 1000, sites=(site,))


def test_waits_are_the_cause_where_a_quarter_of_the_idle_time_goes_with_them():
    (finding,) = pace_findings(pace(waits=wait_model(8.0), **DISPATCHING), make_background())
    assert finding.kind == "host_bound_synchronization"
    assert "`aten::item` in scheduler.step" in finding.claim
    assert "about 20% less" in finding.claim
    (other,) = pace_findings(pace(waits=wait_model(8.6), **DISPATCHING), make_background())
    assert other.kind == "host_bound_dispatch"
    # All of the idle time, and still not worth it.
    (short,) = pace_findings(pace(busy_ms=8.9, waits=wait_model(9.85), **DISPATCHING), make_background())
    assert short.kind == "host_bound_dispatch"


def copy(kind, total_us):
    return CopySite(
        kind=kind,
        host_memory="pageable",
        operator="aten::copy_",
        outer_operator="aten::to",
        region_id=None,
        count=2,
        total_us=total_us,
        num_bytes=1000,
        bandwidth_gb_per_s=1.0,
        host_us=total_us,
    )


def test_transfers_count_from_a_fifth_of_a_plain_run():
    found = transfer_findings(pace(), [copy("HtoD", 1500), copy("DtoH", 600), copy("DtoD", 9000)], make_background())
    assert [finding.kind for finding in found] == ["transfer_bound"]
    assert "to the device" in found[0].claim
    assert "pageable" in found[0].claim
    assert transfer_findings(pace(), [copy("HtoD", 1500), copy("DtoD", 9000)], make_background()) == []


@pytest.mark.parametrize(("exposed_us", "kinds"), [(2500, ["communication_bound"]), (1500, [])])
def test_collectives_count_where_nothing_hides_them(exposed_us, kinds):
    overlap = Overlap(
        communication_us=2 * 4000,
        compute_us=2 * 4000,
        overlap_us=2 * (4000 - exposed_us),
        exposed_communication_us=2 * exposed_us,
        overlap_frac=1 - exposed_us / 4000,
    )
    row = CommunicationRow(name="ncclDevKernel_AllReduce", device_type="CUDA", count=4, total_us=8000)
    timeline = Timeline(devices=(), streams=(), copies=(), communication=(row,), overlap=overlap, warnings=())
    found = communication_findings(pace(), timeline, 2, make_background())
    assert [finding.kind for finding in found] == kinds


def test_the_table_has_each_kind_once_and_skips_only_rungs_that_exist():
    kinds = [row.kind for row in POLICY]
    assert len(kinds) == len(set(kinds))
    for row in POLICY:
        assert all(rung_named(name) for name in row.skips)
        assert bool(row.skips) == bool(row.reason)
    assert load_findings(StagesResult()) == []


def test_what_the_model_of_waits_predicts_is_what_the_same_loop_takes_without_them():
    waits = read_model(RECORDED / "waiting" / "regions.json", rung_named("regions").result_type).waits
    ahead = read_model(RECORDED / "ahead" / "stages.json", StagesResult).default.wall_ms.summary.p50
    assert waits.without_waits_us / 1000 == pytest.approx(ahead, rel=0.1)
    assert waits.plain_us / 1000 > 1.3 * ahead
