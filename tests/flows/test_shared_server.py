"""The flow in a worker's process, on a server that others use too: it takes the device, is cancelled, and retried."""

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

from perfladder.guard import descendants
from perfladder.rundir import RunDirectory

pytestmark = pytest.mark.slow

SERVE = """
from perfladder.flows.profile_pipeline import profile_pipeline
if __name__ == "__main__":  # Each flow run's process imports this file again.
    profile_pipeline.serve(name="test", pause_on_shutdown=False, print_starting_message=False)
"""


until = functools.partial(wait_until, limit_s=120, poll_s=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared-server")


@pytest.fixture(scope="module")
def variables(folder: Path, server_variables: dict[str, str]) -> dict[str, str]:
    """With a temporary folder of their own, flows take turns with each other, not with other jobs of this machine."""
    return {**server_variables, "TMPDIR": str(folder)}


@pytest.fixture(scope="module")
def runner(folder: Path, variables: dict[str, str], client: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that starts flow runs of the deployment `profile-pipeline/test`, each in a process of its own."""
    script = folder / "serve.py"
    script.write_text(SERVE)
    with (folder / "runner.log").open("w") as log:
        process = subprocess.Popen([sys.executable, str(script)], env=variables, stdout=log, stderr=log, cwd=folder)
    try:
        until(lambda: client.read_deployments())
        yield process
    finally:
        process.terminate()
        process.wait(60)


def slots(client: Any) -> list[int]:
    return [limit.active_slots for limit in client.read_global_concurrency_limits(10, 0)]


def mlflow_runs(run_dir: Path) -> dict[str | None, list[str]]:
    """States of the MLflow runs of a run directory, by rung; of the parent by None."""
    from mlflow import MlflowClient

    record = RunDirectory.open(run_dir).record
    store = MlflowClient(tracking_uri=record.mlflow_tracking_uri)
    found: dict[str | None, list[str]] = {}
    for run in store.search_runs([store.get_run(record.mlflow_run_id).info.experiment_id]):
        found.setdefault(run.data.tags.get("perfladder.rung"), []).append(run.info.status)
    return found


def test_a_cancelled_flow_ends_at_once_and_its_retry_goes_on_with_the_same_run(
    folder: Path, toy: dict[str, Any], client: Any, runner: subprocess.Popen[bytes]
) -> None:
    from prefect.states import AwaitingRetry, Cancelling

    hold, runs_dir = folder / "hold", folder / "runs"
    workload = {**toy, "target_args": {"hold": str(hold)}}
    config = {"workload": workload, "base_dir": str(Path(__file__).parent), "runs_dir": str(runs_dir)}
    (deployment,) = client.read_deployments()
    flow_run = client.create_flow_run_from_deployment(deployment.id, parameters={"config": config})
    until(lambda: list(runs_dir.glob("toy/*/1-stages/stages.json")))
    hold.touch()
    (run_dir,) = (runs_dir / "toy").iterdir()
    until(lambda: "stages" in [entry.name for entry in RunDirectory.open(run_dir).record.rungs])
    assert slots(client) == [1]

    client.set_flow_run_state(flow_run.id, Cancelling())
    until(lambda: not any(map(is_session, descendants(runner.pid))), limit_s=10)
    until(lambda: client.read_flow_run(flow_run.id).state_name == "Cancelled", limit_s=60)
    record = RunDirectory.open(run_dir).record
    assert (record.status, record.exit_code, record.error) == ("interrupted", 143, "interrupted")
    assert record.prefect_flow_run_id == str(flow_run.id)
    assert slots(client) == [0]
    assert mlflow_runs(run_dir)[None] == ["KILLED"]

    hold.unlink()
    client.set_flow_run_state(flow_run.id, AwaitingRetry(), force=True)
    until(lambda: client.read_flow_run(flow_run.id).state.is_final())
    assert client.read_flow_run(flow_run.id).state_name == "Completed", (folder / "runner.log").read_text()
    assert list((runs_dir / "toy").iterdir()) == [run_dir]
    again = RunDirectory.open(run_dir).record
    assert (again.status, again.run_id, len(again.resumed_at)) == ("done", record.run_id, 1)
    assert again.mlflow_run_id == record.mlflow_run_id
    assert mlflow_runs(run_dir) == {name: ["FINISHED"] for name in (None, *(entry.name for entry in again.rungs))}
    assert {run.state_name for run in client.read_task_runs() if run.name == "1-stages"} == {"Completed", "TakenOver"}
    assert slots(client) == [0]


def is_session(pid: int) -> bool:
    try:
        return b"perfladder.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
