"""Opening a store, and living without one."""

import contextlib
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mlflow import MlflowClient

from perfladder.errors import InputError
from perfladder.ladder import RUNGS
from perfladder.rundir import RunDirectory
from perfladder.tasks.store import StoreError, TrackingStore, masked, resolve_tracking_uri

MakeRun = Callable[..., RunDirectory]


def test_the_default_store_lies_in_the_runs_folder(tmp_path: Path) -> None:
    assert resolve_tracking_uri(None, {"MLFLOW_TRACKING_URI": ""}, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"


def test_the_users_store_is_used() -> None:
    variables = {"MLFLOW_TRACKING_URI": "http://there:5000"}
    assert resolve_tracking_uri(None, variables, Path()) == "http://there:5000"
    assert resolve_tracking_uri("databricks", variables, Path()) == "databricks"
    assert resolve_tracking_uri("postgresql+psycopg2://u:p@h/d", {}, Path()) == "postgresql+psycopg2://u:p@h/d"


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "./mlruns", "mlruns"])
def test_a_file_store_is_refused_with_what_to_use(uri: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"file store.*sqlite:///.*mlflow\.db"):
        resolve_tracking_uri(uri, {}, tmp_path)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match=r"'redis://u:\*\*\*@h' is of no known kind; accepted: sqlite:"):
        resolve_tracking_uri("redis://u:secret@h", {}, Path())


def test_passwords_are_not_shown() -> None:
    assert masked("postgresql://u:secret@h/d") == "postgresql://u:***@h/d"
    assert masked("http://h:5000") == "http://h:5000"


def test_a_store_that_is_down_costs_seconds_and_is_noted_in_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    told: list[str] = []
    run = make_run()
    with TrackingStore(f"http://127.0.0.1:{port}", experiment="e", runs_dir=tmp_path, tell=told.append) as store:
        store.log_begin(run)
        with pytest.raises(StoreError):
            store.log_end(run)
    assert len(told) == 1
    assert str(run.path) in told[0]
    record = RunDirectory.open(run.path).record
    assert record.mlflow_run_id is None
    assert "MLflow (http://127.0.0.1" in (record.mlflow_error or "")
    assert record.status == "done"


def test_a_call_that_hangs_is_left_alone(
    make_run: MakeRun, store_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perfladder.tasks import tracking

    monkeypatch.setattr(tracking, "log_begin", lambda *_, **__: time.sleep(2))
    run = make_run()
    with TrackingStore(store_uri, experiment="e", runs_dir=tmp_path, call_limit_s=0.1) as store:
        store.wait()
        store.log_begin(run)
        assert "no answer within 0.1 s" in (store.problem or "")
        with pytest.raises(StoreError):
            store.log_end(run)


def test_a_store_that_fails_once_is_asked_again(
    make_run: MakeRun, store_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from perfladder.tasks import tracking

    answers = iter([OSError("locked"), None])

    def log_begin(*_: object, **__: object) -> str:
        if error := next(answers):
            raise error
        return "id"

    monkeypatch.setattr(tracking, "log_begin", log_begin)
    run = make_run()
    with TrackingStore(store_uri, experiment="e", runs_dir=tmp_path) as store:
        store.log_begin(run)
        assert run.record.mlflow_run_id is None
        store.log_begin(run)
    assert run.record.mlflow_run_id == "id"


@pytest.mark.slow
def test_eight_writers_of_a_database_that_is_locked_for_a_while_lose_nothing(make_run: MakeRun, tmp_path: Path) -> None:
    uri, runs = f"sqlite:///{tmp_path}/mlflow.db", [make_run() for _ in range(8)]
    with TrackingStore(uri, experiment="e", runs_dir=tmp_path) as store:
        store.wait()

    def upload(run: RunDirectory) -> list[str]:
        with TrackingStore(uri, experiment="e", runs_dir=tmp_path) as store:
            store.log_begin(run)
            return [*store.log_rung(run, RUNGS[0]), *store.log_end(run)]

    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with ThreadPoolExecutor(8) as pool:
            uploads = [pool.submit(upload, run) for run in runs]
            time.sleep(2)
            other.execute("COMMIT")
    assert [upload.result() for upload in uploads] == [[]] * 8
    client = MlflowClient(tracking_uri=uri)
    (experiment,) = [found for found in client.search_experiments() if found.name == "e"]
    tags = [run.data.tags for run in client.search_runs([experiment.experiment_id])]
    found = sorted((tag["perfladder.run_id"], tag.get("perfladder.rung", "")) for tag in tags)
    assert found == sorted((run.record.run_id, rung) for run in runs for rung in ("", "stages"))
    assert [run.record.mlflow_error for run in runs] == [None] * 8


def test_variables_are_put_back(tmp_path: Path, store_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "7")
    before = dict(os.environ)
    with TrackingStore(store_uri, experiment="e", runs_dir=tmp_path):
        assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "7"
    assert dict(os.environ) == before


@pytest.mark.slow
def test_processes_open_a_new_store_at_once(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path\n"
        "from perfladder.tasks.store import TrackingStore, resolve_tracking_uri\n"
        "folder = Path(sys.argv[1])\n"
        "with TrackingStore(resolve_tracking_uri(None, {}, folder), experiment='e', runs_dir=folder) as store:\n"
        "    store.wait(); sys.exit(store.problem)\n"
    )
    folder = tmp_path / "run ?#%s é"
    folder.mkdir()
    command = [sys.executable, "-c", script, str(folder)]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    results = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert [code for _, code in results] == [0] * 3, results
    assert {path.name for path in folder.iterdir()} == {"mlflow.db", "mlflow.db.lock"}
