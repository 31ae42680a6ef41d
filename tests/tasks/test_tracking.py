"""A run directory in MLflow, read back with MLflow's own client."""

from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.entities import Run

from perfladder.ladder import rung_named
from perfladder.nsight.diagnosis import Diagnosis, Observation
from perfladder.rundir import RunDirectory
from perfladder.rungs.ncu import NcuResult, ProfiledLaunch
from perfladder.rungs.stages import StagesResult
from perfladder.tasks import tracking
from perfladder.tasks.store import Target

MakeRun = Callable[..., RunDirectory]
LIMIT = 1 << 20


def upload(target: Target, run: RunDirectory, limit: int = LIMIT) -> list[str]:
    tracking.log_begin(target, run, max_artifact_bytes=limit)
    failures = [
        text
        for entry in run.record.rungs
        for text in tracking.log_rung(target, run, entry.name, max_artifact_bytes=limit)
    ]
    return failures + tracking.log_end(target, run, max_artifact_bytes=limit)


def runs_of(target: Target) -> dict[str, Run]:
    return {run.info.run_name: run for run in target.client.search_runs([target.experiment_id])}


def artifacts(target: Target, run: Run) -> set[str]:
    return {info.path for info in target.client.list_artifacts(run.info.run_id)}


def test_a_run_becomes_a_parent_and_a_nested_run_a_rung(target: Target, make_run: MakeRun) -> None:
    run = make_run()
    assert upload(target, run) == []
    found = runs_of(target)
    parent, stages = found[run.record.run_id], found["1-stages"]
    assert set(found) == {run.record.run_id, "1-stages", "3-capture"}
    assert stages.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert parent.data.params["inputs.text"] == "hello"
    assert parent.data.params["measured_runs"] == "10"
    assert parent.data.metrics["latency_p50_ms"] == 10.0
    assert parent.data.tags["perfladder.exit_code"] == "0"
    assert parent.info.end_time == 1767323105000
    assert stages.info.end_time - stages.info.start_time == 1500
    assert stages.data.metrics["stage/unet/self_ms_p50"] == 5.0
    assert artifacts(target, parent) == {"report.html", "report.md", "run.json", "workload.yaml"}
    assert artifacts(target, stages) == {"metric_names.json", "stages.json"}


def test_an_optional_rung_is_a_nested_run_with_its_report_as_artifact(target: Target, make_run: MakeRun) -> None:
    run = make_run()
    observation = Observation(metric="dram__throughput.avg.pct", value=92.0, unit="%", statement="-")
    diagnosis = Diagnosis(verdict="memory", statement="-", observations=[observation])
    launch = ProfiledLaunch(index=0, name="k", demangled_name="k", is_asked_kernel=True, diagnosis=diagnosis)
    folder = run.rung_folder(5, "ncu")
    (folder / "kernel.ncu-rep").write_bytes(b"NVR")
    run.write_result(folder, "ncu", NcuResult(kernel="k", launches=[launch], verdict="memory"), "done", None)
    assert upload(target, run) == []
    found = runs_of(target)["5-ncu"]
    assert found.data.metrics["launch/0/dram__throughput.avg.pct"] == 92.0
    assert {"kernel.ncu-rep", "ncu.json"} <= artifacts(target, found)


def test_uploading_again_changes_nothing(target: Target, make_run: MakeRun) -> None:
    run = make_run(long="y" * 7000)
    upload(target, run)
    before = {name: (run.info.run_id, run.data.to_dictionary()) for name, run in runs_of(target).items()}
    assert upload(target, run) == []
    assert {name: (run.info.run_id, run.data.to_dictionary()) for name, run in runs_of(target).items()} == before
    stages_id = before["1-stages"][0]
    assert len(target.client.get_metric_history(stages_id, "latency_p50_ms")) == 1


def test_a_run_that_is_gone_on_with_is_continued_in_place(target: Target, make_run: MakeRun) -> None:
    run = make_run()
    upload(target, run)
    before = {name: found.info.run_id for name, found in runs_of(target).items()}
    run.update(resumed_at=["2026-01-02T04:00:00+00:00"], status="running", ended_at=None)
    text = (run.path / "workload.yaml").read_text()
    (run.path / "workload.yaml").write_text(text.replace("timeout_s: 600.0", "timeout_s: 900.0"))
    tracking.log_begin(target, run, max_artifact_bytes=LIMIT)
    parent = runs_of(target)[run.record.run_id]
    assert (parent.info.run_id, parent.info.status) == (before[run.record.run_id], "RUNNING")
    assert parent.data.params["timeout_s"] == "600.0"
    assert parent.data.tags["perfladder.resumed_with.timeout_s"] == "900.0"


def test_a_rung_that_was_measured_again_has_none_of_its_earlier_numbers(
    target: Target, make_run: MakeRun, stages_result: StagesResult
) -> None:
    run = make_run()
    upload(target, run)
    before = {name: found.info.run_id for name, found in runs_of(target).items()}
    (default, _) = stages_result.scenarios
    fewer = default.model_copy(update={"stages": default.stages[1:]})
    again = stages_result.model_copy(update={"started_at": "2026-01-02T04:00:00+00:00", "scenarios": [fewer]})
    run.write_result(run.rung_folder(1, "stages"), "stages", again, "done", None)
    assert upload(target, run) == []
    found = runs_of(target)
    assert set(found) == set(before)
    assert found["1-stages"].info.run_id != before["1-stages"]
    assert "stage/unet/self_ms_p50" not in found["1-stages"].data.metrics
    assert found["3-capture"].info.run_id == before["3-capture"]


def test_names_that_mlflow_refuses_are_spelt_and_mapped(target: Target, make_run: MakeRun) -> None:
    upload(target, make_run())
    stages = runs_of(target)["1-stages"]
    assert stages.data.metrics["stage/down_x28_0_x29_/share"] == 0.5
    import mlflow.artifacts

    names = mlflow.artifacts.load_dict(f"{stages.info.artifact_uri}/metric_names.json")
    assert names["stage/down_x28_0_x29_/share"] == "stage/down(0)/share"


def test_long_values_become_a_digest_and_an_artifact(target: Target, make_run: MakeRun) -> None:
    text = "é" * 7000
    run = make_run(long=text)
    upload(target, run)
    parent = runs_of(target)[run.record.run_id]
    value = parent.data.params["inputs.long"]
    assert value.startswith("sha256:")
    assert "7000 characters" in value
    import mlflow.artifacts

    file = value.rpartition("artifact ")[2].rstrip(")")
    assert mlflow.artifacts.load_text(f"{parent.info.artifact_uri}/{file}") == text


def test_captures_and_logs_stay_on_this_machine(target: Target, make_run: MakeRun) -> None:
    run = make_run()
    upload(target, run)
    capture = runs_of(target)["3-capture"]
    assert artifacts(target, capture) == {"capture.json"}
    assert "1 files with the pipeline's data stay in" in capture.data.tags["perfladder.not_uploaded"]


def test_large_files_are_named_and_kept(target: Target, make_run: MakeRun) -> None:
    run = make_run()
    trace = run.path / "1-stages" / "trace.json"
    trace.write_bytes(b"x" * 9000)
    upload(target, run, limit=8000)
    stages = runs_of(target)["1-stages"]
    assert "trace.json" not in artifacts(target, stages)
    assert stages.data.tags["perfladder.not_uploaded"].startswith("trace.json: ")


def test_links_are_not_followed(target: Target, make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (run.path / "1-stages" / "link.txt").symlink_to(secret)
    (run.path / "link.txt").symlink_to(secret)
    upload(target, run)
    assert not any("link.txt" in artifacts(target, found) for found in runs_of(target).values())


def test_a_failed_rung_and_run_are_failed_in_mlflow(target: Target, make_run: MakeRun) -> None:
    run = make_run()
    result = StagesResult(status="failed", reason="it raised", started_at="2026-01-02T03:04:05+00:00")
    folder = run.rung_folder(1, "stages")
    run.write_result(folder, "stages", result, "failed", "it raised")
    run.update(status="failed", exit_code=3, error="it raised")
    upload(target, run)
    found = runs_of(target)
    assert found["1-stages"].info.status == "FAILED"
    assert found["1-stages"].data.tags["perfladder.reason"] == "it raised"
    assert found[run.record.run_id].info.status == "FAILED"
    assert found[run.record.run_id].data.tags["perfladder.error"] == "it raised"


def test_a_file_that_is_refused_costs_that_file_only(
    target: Target, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    (run.path / "1-stages" / "trace.json").write_bytes(b"x" * 9000)
    send = target.client.log_artifact

    def refuse(run_id: str, path: str, folder: str | None = None) -> None:
        if path.endswith("trace.json"):
            raise OSError("413: too large")
        send(run_id, path, folder)

    monkeypatch.setattr(target.client, "log_artifact", refuse)
    assert upload(target, run) == ["trace.json (OSError: 413: too large)"]
    assert "stages.json" in artifacts(target, runs_of(target)["1-stages"])


def test_a_file_that_arrives_in_part_is_noticed(
    target: Target, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    monkeypatch.setattr(tracking, "_stored_sizes", lambda *_: {"stages.json": 3})
    tracking.log_begin(target, run, max_artifact_bytes=LIMIT)
    (failure,) = tracking.log_rung(target, run, "stages", max_artifact_bytes=LIMIT)
    assert failure.startswith("stages.json (3 of ")


def test_every_rung_can_be_uploaded_before_it_is_known_how_it_ends(target: Target, make_run: MakeRun) -> None:
    run = make_run()
    run.update(status="running", ended_at=None)
    tracking.log_begin(target, run, max_artifact_bytes=LIMIT)
    assert runs_of(target)[run.record.run_id].info.status == "RUNNING"
    assert rung_named("stages").number == 1
