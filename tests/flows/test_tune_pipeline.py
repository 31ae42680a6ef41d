"""The flow that tunes with proof, once, with real servers: killed on the way, gone on with, kept and registered."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perfladder.errors import InputError
from perfladder.flows.config import TunePipelineConfig
from perfladder.flows.prefect_server import PrefectServer
from perfladder.rundir import RunDirectory
from perfladder.tasks.find import find_in_mlflow
from perfladder.tasks.store import TrackingStore
from perfladder.tasks.uploads import sync_runs, upload_run
from perfladder.tuning.tune_request import BackendChoice, GateChoice, TuneRequest

# All of it is one fixture: about fifteen processes that import torch, one after the other.
pytestmark = pytest.mark.timeout(700)

BeginFlow = Callable[..., Any]
SUPPORT = Path(__file__).parents[1] / "support"
PAGE = "http://127.0.0.1:1/#/experiments/1/runs/2"
STEPS = ["1-profile", "2-tune", "3-replay", "4-profile-tuned", "5-compare"]


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def test_every_field_of_the_form_is_described() -> None:
    for model in (TunePipelineConfig, TuneRequest, BackendChoice, GateChoice):
        assert [name for name, field in model.model_fields.items() if not field.description] == [], model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuning")


@pytest.fixture(scope="module")
def proven(begin_flow: BeginFlow, folder: Path) -> dict[str, Any]:
    """A flow that was killed while it tuned, its store down; and the one that went on, with a store."""
    hold = folder / "hold"
    workload = {"name": "proof", "target": "proof_toy.py:build", "inputs": {"x": {"$tensor": [4, 64]}}}
    workload |= {"device": "cpu", "warmup_runs": 1, "measured_runs": 3}
    backend = {"name": "proof_quick", "options": {"hold": str(hold)}}
    tune = {"modules": ["net"], "backends": [backend], "pairs": 10, "cache_dir": str(folder / "cache")}
    config = {"base_dir": str(SUPPORT), "runs_dir": str(folder / "runs"), "until": "stages", "tune": tune}
    config |= {"pairs": 5, "launches": 3}
    hold.touch()
    killed = begin_flow(workload, hooks={"tune": True}, tracking_uri=free_address(), **config)
    killed.wait_for("trying Quick")
    killed.end(signal.SIGKILL)
    hold.unlink()
    (run_dir,) = (folder / "runs" / "tunings" / "proof").iterdir()
    before = RunDirectory.open(run_dir).record
    flow = begin_flow(workload, hooks={"tune": True}, resume="latest", **config)
    return {**flow.answer(500), "before": before, "log": flow.log.read_text(), "killed_log": killed.log.read_text()}


@pytest.fixture(scope="module")
def run(proven: dict[str, Any]) -> RunDirectory:
    return RunDirectory.open(Path(proven["run_dir"]))


@pytest.fixture(scope="module")
def client(run: RunDirectory) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=run.record.mlflow_tracking_uri)


@pytest.fixture(scope="module")
def prefect_client(folder: Path, run: RunDirectory) -> Iterator[Any]:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with (
        PrefectServer(folder / "runs", variables=os.environ) as server,
        temporary_settings({PREFECT_API_URL: server.wait()}),
        get_client(sync_client=True) as found,
    ):
        yield found


@pytest.mark.slow
def test_a_flow_that_was_killed_goes_on_with_what_was_done(proven: dict[str, Any], run: RunDirectory) -> None:
    assert (proven["verdict"], proven["exit_code"]) == ("kept", 0), proven["log"]
    assert proven["interval"]["low"] > 1
    steps = {step["name"]: (step["status"], step["is_reused"]) for step in proven["steps"]}
    assert steps == {name[2:]: ("done", name == "1-profile") for name in STEPS}
    before = proven["before"]
    assert (before.run_id, before.status) == (run.record.run_id, "running")
    assert [entry.name for entry in before.rungs] == ["profile"]
    assert before.profile_runs["profile"] == proven["plain_run"]
    assert "failed" in (before.mlflow_error or "")
    assert "Traceback" not in proven["killed_log"] + proven["log"]
    assert (run.path / proven["archive"]).is_file()


@pytest.mark.slow
def test_mlflow_has_the_tuning_its_profiles_and_a_model_version(
    proven: dict[str, Any], run: RunDirectory, client: Any, tmp_path: Path
) -> None:
    found = client.get_run(run.record.mlflow_run_id)
    tags, metrics = found.data.tags, found.data.metrics
    assert (found.info.status, tags["perfladder.kind"], tags["perfladder.verdict"]) == ("FINISHED", "tuning", "kept")
    assert tags["perfladder.prefect_flow_run_id"] == run.record.prefect_flow_run_id
    assert found.data.params["proof.tune.backends.0.name"] == "proof_quick"
    assert metrics["speedup_ratio"] == pytest.approx(proven["speedup"])
    assert metrics["replay/net/speedup_ratio"] > 1
    assert metrics["tuned/latency_p50_ms"] < metrics["plain/latency_p50_ms"]
    for side in ("plain", "tuned"):
        profile = client.get_run(tags[f"perfladder.{side}_run"])
        assert profile.data.tags["perfladder.run_dir"] == tags[f"perfladder.{side}_run_dir"]

    (version,) = client.search_model_versions("name = 'perfladder-proof'")
    assert run.record.mlflow_model_version == tags["perfladder.model_version"] == f"perfladder-proof/{version.version}"
    assert version.run_id == found.info.run_id
    assert float(version.tags["perfladder.speedup"]) == pytest.approx(proven["speedup"])
    assert version.tags["perfladder.device"] == "cpu"
    assert version.tags["fingerprint.work"] == version.tags["tuned.fingerprint.work"]
    assert version.tags["fingerprint.configuration"] != version.tags["tuned.fingerprint.configuration"]
    assert version.source.endswith("/2-tune")
    fetched = Path(client.download_artifacts(found.info.run_id, proven["archive"], str(tmp_path)))
    assert fetched.read_bytes() == (run.path / proven["archive"]).read_bytes()
    with pytest.raises(InputError, match="is of a tuning"):
        find_in_mlflow(f"mlflow:{found.info.run_id}", run.record.mlflow_tracking_uri, {}, tmp_path)


@pytest.mark.slow
def test_prefect_has_a_task_a_step_and_its_artifacts(run: RunDirectory, prefect_client: Any, tmp_path: Path) -> None:
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    flow_run = prefect_client.read_flow_run(run.record.prefect_flow_run_id)
    assert (flow_run.name, flow_run.state_name) == (f"proof-{run.record.run_id}", "Completed")
    assert run.record.prefect_flow_run_url is None  # The local server has no pages.
    one = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id]))
    states = {task.name: task.state_name for task in prefect_client.read_task_runs(flow_run_filter=one)}
    assert {name: states[name] for name in STEPS} == {
        name: "TakenOver" if name == "1-profile" else "Completed" for name in STEPS
    }
    assert set(states.values()) == {"Completed", "TakenOver"}
    assert {"profile-run-to-mlflow", "profile-tuned-run-to-mlflow", "register", "publish"} <= set(states)
    # A SQLite store has no pages, so that this run has no link.
    code = f"flow(name='link')(link_to_mlflow)({PAGE!r}, 'proof')"
    imports = "from prefect import flow; from perfladder.tasks.artifacts import link_to_mlflow"
    variables = {**os.environ, "PREFECT_API_URL": str(prefect_client.api_url), "PREFECT_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-P", "-c", f"{imports}; {code}"], env=variables, check=True, timeout=100)
    found = [(artifact.key, str(artifact.data)) for artifact in prefect_client.read_artifacts()]
    assert [key for key, text in found if "# Tuning of `proof` on cpu: kept" in text] == ["tuning-proof"]
    assert [key for key, text in found if '"profile-tuned"' in text] == ["tuning-steps-proof"]
    assert [key for key, text in found if f"[The run in MLflow]({PAGE})" in text] == ["mlflow-proof"]
    assert {float(text) for key, text in found if key == "tuning-progress-proof"} == {20, 40, 60, 80, 100}


@pytest.mark.slow
def test_what_a_store_that_was_down_missed_is_brought_by_a_sync_once(run: RunDirectory, client: Any) -> None:
    def store(uri: str) -> TrackingStore:
        return TrackingStore(uri, experiment="another", runs_dir=run.path.parents[2])

    uri = str(run.record.mlflow_tracking_uri)
    (before,) = client.search_model_versions("name = 'perfladder-proof'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        with store(free_address()) as down:
            assert upload_run(run, down).status == "failed"
    for expected in ("uploaded", "there_already"):
        (row,) = sync_runs([run.path], store(uri)).runs
        assert row.status == expected, row.detail
    (row,) = sync_runs([run.path], store(uri), again=True).runs
    versions = client.search_model_versions("name = 'perfladder-proof'")
    assert sorted(version.run_id for version in versions) == sorted([before.run_id, row.mlflow_run_id])
