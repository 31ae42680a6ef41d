"""The whole flow with real servers, read back with Prefect's and MLflow's own clients."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from perfladder.flows.prefect_server import PrefectServer
from perfladder.ladder import RUNGS
from perfladder.rundir import RunDirectory

pytestmark = pytest.mark.slow

BeginFlow = Callable[..., Any]
DEFAULT_RUNGS = [rung for rung in RUNGS if not rung.is_optional]
RUNG_NAMES = [rung.name for rung in DEFAULT_RUNGS]


def record_of(answer: dict[str, Any]) -> Any:
    return RunDirectory.open(Path(answer["run_dir"])).record


def latest_record(runs_dir: Path, name: str = "toy") -> Any:
    return RunDirectory.open(max((runs_dir / name).iterdir())).record


def mlflow_runs(record: Any) -> dict[str | None, Any]:
    """The MLflow runs of a perfladder run, by rung; the parent under None."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=record.mlflow_tracking_uri)
    parent = client.get_run(record.mlflow_run_id)
    filter_string = f"tags.mlflow.parentRunId = '{record.mlflow_run_id}'"
    nested = client.search_runs([parent.info.experiment_id], filter_string)
    return {None: parent, **{run.data.tags["perfladder.rung"]: run for run in nested}}


@pytest.fixture(scope="module")
def prefect_client(runs_dir: Path) -> Iterator[Any]:
    """Prefect's own client, on the local server started again after the flows have ended."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with (
        PrefectServer(runs_dir, variables=os.environ) as server,
        temporary_settings({PREFECT_API_URL: server.wait()}),
        get_client(sync_client=True) as client,
    ):
        yield client


def task_runs(client: Any, record: Any) -> dict[str, Any]:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[record.prefect_flow_run_id]))
    return {run.name: run for run in client.read_task_runs(flow_run_filter=flow_run)}


@pytest.fixture(scope="module")
def toy_answer(begin_flow: BeginFlow, toy: dict[str, Any]) -> dict[str, Any]:
    """One finished flow of the toy."""
    flow = begin_flow(toy)
    answer: dict[str, Any] = flow.answer()
    answer["log"] = flow.log.read_text()
    return answer


def test_the_run_is_done_and_on_disk(toy_answer: dict[str, Any]) -> None:
    assert (toy_answer["status"], toy_answer["exit_code"]) == ("done", 0), toy_answer
    record = record_of(toy_answer)
    assert [entry.name for entry in record.rungs] == RUNG_NAMES
    assert record.mlflow_error is None
    assert (Path(toy_answer["run_dir"]) / "report.md").is_file()


def test_the_terminal_shows_the_ladder_and_nothing_of_the_servers(toy_answer: dict[str, Any]) -> None:
    log = toy_answer["log"]
    assert all(rung.question in log for rung in DEFAULT_RUNGS)
    assert [word for word in ("prefect", "mlflow", "alembic", "WARN", "Traceback") if word.lower() in log.lower()] == []


def test_mlflow_has_a_parent_and_a_nested_run_a_rung(toy_answer: dict[str, Any]) -> None:
    record = record_of(toy_answer)
    runs = mlflow_runs(record)
    assert set(runs) == {None, *RUNG_NAMES}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert runs[None].data.params["measured_runs"] == "3"
    assert runs[None].data.tags["perfladder.run_id"] == record.run_id
    assert runs[None].data.tags["perfladder.prefect_flow_run_id"] == record.prefect_flow_run_id
    assert runs[None].data.tags["env.packages.torch"]
    assert runs["stages"].data.metrics["latency_p50_ms"] == runs[None].data.metrics["latency_p50_ms"] > 0
    assert runs["stages"].data.metrics["stage/denoiser/self_ms_p50"] > 0
    assert runs["harness"].data.metrics["timing_ratio"] > 0


def test_prefect_has_the_flow_run_its_task_runs_and_artifacts(toy_answer: dict[str, Any], prefect_client: Any) -> None:
    record = record_of(toy_answer)
    flow_run = prefect_client.read_flow_run(record.prefect_flow_run_id)
    assert (flow_run.name, flow_run.state_name) == (f"toy-{record.run_id}", "Completed")
    runs = task_runs(prefect_client, record)
    rungs = [f"{rung.number}-{rung.name}" for rung in DEFAULT_RUNGS]
    assert set(runs) == {*rungs, *(f"{name}-to-mlflow" for name in rungs), "report-to-mlflow", "publish"}
    assert {run.state_name for run in runs.values()} == {"Completed"}
    assert "Rung 1 of SKILL.md" in runs["1-stages"].state.message
    artifacts = {artifact.key: artifact for artifact in prefect_client.read_artifacts()}
    assert {"report-toy", "findings-toy"} <= set(artifacts)
    assert "toy" in artifacts["report-toy"].data


def test_a_builtin_pipeline_goes_through(begin_flow: BeginFlow) -> None:
    answer = begin_flow("diffusion").answer()
    assert (answer["status"], answer["exit_code"]) == ("done", 0), answer
    assert answer["findings"][0]["stage"] == "unet"
    assert set(mlflow_runs(record_of(answer))) == {None, *RUNG_NAMES}


def test_two_flows_at_once_share_server_and_store_and_measure_in_turn(
    begin_flow: BeginFlow, toy: dict[str, Any], tmp_path: Path
) -> None:
    flows = [begin_flow(toy, runs_dir=str(tmp_path / "runs")) for _ in range(2)]
    for flow in flows:  # The one that has started the server may end before the other.
        flow.process.wait(240)
    records = [record_of(flow.answer()) for flow in flows]
    assert [record.status for record in records] == ["done", "done"]
    assert [set(mlflow_runs(record)) for record in records] == [{None, *RUNG_NAMES}] * 2
    spans = sorted(span_of_measuring(tmp_path / "runs" / "toy" / record.run_id) for record in records)
    assert all(first_end <= second_start for (_, first_end), (second_start, _) in pairwise(spans)), spans


def span_of_measuring(run_dir: Path) -> tuple[float, float]:
    """From the start of the first rung to the end of the last, as seconds of the clock on the wall."""
    from datetime import datetime

    spans = []
    for entry in RunDirectory.open(run_dir).record.rungs:
        result = json.loads((run_dir / entry.folder / f"{entry.name}.json").read_text())
        start = datetime.fromisoformat(result["started_at"]).timestamp()
        spans.append((start, start + result["duration_s"]))
    return min(start for start, _ in spans), max(end for _, end in spans)


def test_a_failed_rung_is_a_failed_task_run_and_the_flow_goes_on(
    begin_flow: BeginFlow, toy: dict[str, Any], tmp_path: Path, prefect_client: Any
) -> None:
    flag = str(tmp_path / "flag")
    flow = begin_flow({**toy, "target_args": {"flag": flag}}, hooks={"on": {RUNGS[1].question: flag}})
    answer = flow.answer()
    assert (answer["status"], answer["exit_code"]) == ("done", 5), answer
    record = record_of(answer)
    states = {name: run.state_name for name, run in task_runs(prefect_client, record).items()}
    assert (states["1-stages"], states["3-capture"], states["3-harness"]) == ("Completed", "Failed", "NotApplicable")
    assert prefect_client.read_flow_run(record.prefect_flow_run_id).state_name == "Completed"
    runs = mlflow_runs(record)
    assert (runs["stages"].info.status, runs["capture"].info.status) == ("FINISHED", "FAILED")
    assert "told to fail" in runs["capture"].data.tags["perfladder.reason"]
    assert "Traceback" not in flow.log.read_text()


def test_a_target_that_fails_at_once_is_a_failed_flow_run(
    begin_flow: BeginFlow, toy: dict[str, Any], prefect_client: Any
) -> None:
    flow = begin_flow({**toy, "inputs": {"fail": True}})
    answer = flow.answer()
    assert (answer["status"], answer["exit_code"]) == ("failed", 3), answer
    assert "Traceback" not in flow.log.read_text()
    record = record_of(answer)
    assert prefect_client.read_flow_run(record.prefect_flow_run_id).state_name == "Failed"
    runs = mlflow_runs(record)
    assert (set(runs), runs[None].info.status) == ({None, "stages"}, "FAILED")
    assert "told to fail" in runs[None].data.tags["perfladder.error"]


def test_a_target_that_cannot_be_loaded_does_not_wait_for_the_server(
    begin_flow: BeginFlow, toy: dict[str, Any], tmp_path: Path, fake_server: Callable[[str], str]
) -> None:
    hooks = {"fake_server": fake_server("hangs"), "limit_s": 200}
    runs_dir = tmp_path / "runs"
    answer = begin_flow({**toy, "target": "toy.py:build_nothing"}, hooks=hooks, runs_dir=str(runs_dir)).answer(100)
    assert answer["exit_code"] == 3
    assert "the toy cannot be built" in answer["error"]
    record = latest_record(runs_dir)
    assert (record.status, record.prefect_flow_run_id) == ("failed", None)
    runs = mlflow_runs(record)
    assert (set(runs), runs[None].info.status) == ({None}, "FAILED")
    assert "the toy cannot be built" in runs[None].data.tags["perfladder.error"]


def test_a_server_that_cannot_start_ends_the_run_with_its_log(
    begin_flow: BeginFlow, toy: dict[str, Any], tmp_path: Path, fake_server: Callable[[str], str]
) -> None:
    hooks = {"fake_server": fake_server("ends"), "limit_s": 200}
    answer = begin_flow(toy, hooks=hooks, runs_dir=str(tmp_path / "runs")).answer()
    assert answer["exit_code"] == 4
    assert "port taken, or what else there is" in answer["error"]
    record = latest_record(tmp_path / "runs")
    assert (record.status, record.exit_code) == ("failed", 4)
    assert mlflow_runs(record)[None].info.status == "FAILED"


def test_a_store_that_is_down_costs_no_measurement(begin_flow: BeginFlow, toy: dict[str, Any]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        flow = begin_flow(toy, tracking_uri=f"http://127.0.0.1:{unused.getsockname()[1]}")
        answer = flow.answer()
    assert (answer["status"], answer["exit_code"]) == ("done", 0), answer
    record = record_of(answer)
    assert "MLflow (http://127.0.0.1" in record.mlflow_error
    assert [entry.name for entry in record.rungs] == RUNG_NAMES
    assert flow.log.read_text().count("MLflow (http://127.0.0.1") == 1


def test_wrong_input_starts_nothing(begin_flow: BeginFlow, toy: dict[str, Any], tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    for config in ({"tracking_uri": "file:///tmp/mlruns"}, {"until": "kernel"}):
        answer = begin_flow(toy, runs_dir=str(runs_dir), **config).answer()
        assert answer["exit_code"] == 2, answer
    assert not runs_dir.exists()


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("starting", signal.SIGKILL),
        ("measuring", signal.SIGKILL),
        ("measuring", signal.SIGTERM),
        ("measuring", signal.SIGINT),
    ],
)
def test_however_it_is_ended_no_process_is_left(
    begin_flow: BeginFlow, toy: dict[str, Any], tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    runs_dir = tmp_path / "runs"
    flow = begin_flow({**toy, "measured_runs": 100000}, runs_dir=str(runs_dir))
    if moment == "measuring":
        flow.wait_for(RUNGS[0].question)
    else:
        wait_for_file(runs_dir / ".perfladder/prefect/server.json")
    flow.end(number)
    if number == signal.SIGINT:
        record = latest_record(runs_dir)
        assert record.status == "interrupted"
        assert mlflow_runs(record)[None].info.status == "KILLED"


def wait_for_file(path: Path) -> None:
    import time

    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_that_dies_on_the_way_costs_no_measurement(
    begin_flow: BeginFlow, toy: dict[str, Any], tmp_path: Path
) -> None:
    runs_dir = tmp_path / "runs"
    flow = begin_flow(toy, runs_dir=str(runs_dir))
    flow.wait_for(RUNGS[0].question)
    os.kill(json.loads((runs_dir / ".perfladder/prefect/server.json").read_text())["server_pid"], signal.SIGKILL)
    answer = flow.answer()
    assert answer["status"] == "done", answer
    assert [entry.name for entry in record_of(answer).rungs] == RUNG_NAMES
    assert "does not know how this run ended" in flow.log.read_text()


def test_the_flow_runs_in_a_users_script_with_the_users_server(
    begin_flow: BeginFlow, toy: dict[str, Any], tmp_path: Path, runs_dir: Path, prefect_client: Any
) -> None:
    variables = {"PREFECT_API_URL": str(prefect_client.api_url)}
    config = {"runs_dir": str(tmp_path / "runs"), "until": "stages"}
    for hooks in ({"direct": True}, {}):
        answer = begin_flow(toy, hooks=hooks, variables=variables, **config).answer()
        record = record_of(answer)
        assert prefect_client.read_flow_run(record.prefect_flow_run_id).state_name == "Completed"
        assert not (tmp_path / "runs" / ".perfladder" / "prefect").exists()


def test_a_users_server_that_does_not_answer_is_named(begin_flow: BeginFlow, toy: dict[str, Any]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/api"
        answer = begin_flow(toy, variables={"PREFECT_API_URL": url}).answer()
    assert answer["exit_code"] == 4
    assert url in answer["error"]
