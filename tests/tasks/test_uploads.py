"""What of a run is in a store: noted in the run, uploaded once, completed when it is half there."""

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from perfladder.errors import NotPossibleHereError
from perfladder.ladder import rung_named
from perfladder.rundir import RunDirectory
from perfladder.tasks import tracking, uploads
from perfladder.tasks.store import StoreError, TrackingStore
from perfladder.tasks.uploads import missing_parts, read_uploads, sync_runs

MakeRun = Callable[..., RunDirectory]
MakeStore = Callable[..., TrackingStore]
PARTS = ["begin", "stages", "capture", "end"]


@pytest.fixture
def make_store(store_uri: str, tmp_path: Path) -> MakeStore:
    """A store that is not opened yet, with an experiment of the test's own."""

    def make(uri: str = store_uri, **options: Any) -> TrackingStore:
        return TrackingStore(uri, experiment=tmp_path.name, runs_dir=tmp_path / "runs", **options)

    return make


@contextmanager
def server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """A server that answers every request alike."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        do_POST = do_PUT = do_GET

        def log_message(self, *_: object) -> None:
            return None

    class Threaded(socketserver.ThreadingMixIn, HTTPServer):
        daemon_threads = True

    with Threaded(("127.0.0.1", 0), Handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_address[1]}"
        one.shutdown()


def refuse(request: BaseHTTPRequestHandler) -> None:
    request.send_response(413)
    request.send_header("Content-Length", "0")
    request.end_headers()


def hang(_: BaseHTTPRequestHandler) -> None:
    time.sleep(5)


def statuses(result: uploads.SyncResult) -> list[str]:
    return [row.status for row in result.runs]


def stored(store: TrackingStore) -> list[tuple[str, dict[str, Any]]]:
    client = MlflowClient(store.uri)
    experiment = client.get_experiment_by_name(store.experiment)
    return [(run.info.run_id, run.data.to_dictionary()) for run in client.search_runs([experiment.experiment_id])]


def test_a_run_that_was_missed_is_uploaded_once(make_run: MakeRun, make_store: MakeStore) -> None:
    run = make_run()
    run.update(mlflow_error="MLflow was down")
    first = sync_runs([run.path], make_store())
    assert statuses(first) == ["uploaded"]
    assert first.runs[0].num_parts == len(PARTS)
    record = RunDirectory.open(run.path).record
    assert (record.mlflow_run_id, record.mlflow_error) == (first.runs[0].mlflow_run_id, None)
    before = stored(make_store())
    second = sync_runs([run.path], make_store())
    assert (statuses(second), second.runs[0].num_parts) == (["there_already"], 0)
    assert second.runs[0].mlflow_run_id == record.mlflow_run_id
    # Also when the note is lost, or not believed.
    (run.path / "mlflow.json").unlink()
    assert statuses(sync_runs([run.path], make_store())) == ["uploaded"]
    assert statuses(sync_runs([run.path], make_store(), again=True)) == ["uploaded"]
    assert stored(make_store()) == before


def test_half_of_a_run_is_completed(make_run: MakeRun, make_store: MakeStore) -> None:
    run = make_run()
    with make_store() as store:
        store.log_rung(run, rung_named("stages"))
    assert missing_parts(run, store.shown_uri, store.experiment) == ["capture", "end"]
    result = sync_runs([run.path], make_store())
    assert (statuses(result), result.runs[0].num_parts) == (["uploaded"], 2)
    assert len(stored(store)) == 3


def test_what_has_changed_since_is_uploaded_and_what_was_deleted_is_not_missed(
    make_run: MakeRun, make_store: MakeStore
) -> None:
    run, store = make_run(), make_store()
    trace = run.path / "1-stages/stages.trace.json"
    trace.write_text("{}")
    sync_runs([run.path], store)
    trace.unlink()
    assert missing_parts(run, store.shown_uri, store.experiment) == []
    (run.path / "1-stages/more.json").write_text("{}")
    run.update(stopped_because="enough is known")
    assert missing_parts(run, store.shown_uri, store.experiment) == ["stages", "end"]
    assert missing_parts(run, "http://another", store.experiment) == PARTS


def test_a_file_that_is_refused_is_tried_again_next_time(
    make_run: MakeRun, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    send = MlflowClient.log_artifact

    def refuse_stages(client: MlflowClient, run_id: str, path: str, folder: str | None = None) -> None:
        if path.endswith("stages.json"):
            raise OSError("no space left on device")
        send(client, run_id, path, folder)

    with monkeypatch.context() as full:
        full.setattr(MlflowClient, "log_artifact", refuse_stages)
        (row,) = sync_runs([run.path], make_store()).runs
    assert row.status == "failed"
    assert "stages.json (OSError: no space left on device)" in row.detail
    result = sync_runs([run.path], make_store())
    assert (statuses(result), result.runs[0].num_parts) == (["uploaded"], 1)
    assert RunDirectory.open(run.path).record.mlflow_error is None


def test_a_file_that_is_not_there_afterwards_is_noticed(
    make_run: MakeRun, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MlflowClient, "log_artifact", lambda *_: None)
    (row,) = sync_runs([make_run().path], make_store()).runs
    assert "stages.json (did not arrive)" in row.detail


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "what"), [(refuse, "413"), (hang, "ReadTimeoutError")])
def test_a_server_that_refuses_or_hangs_costs_seconds_and_the_run_stays_whole(
    make_run: MakeRun, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, answer: Any, what: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    run, other = make_run(), make_run()
    files = {path: path.read_bytes() for path in run.path.rglob("*.json") if path.name != "run.json"}
    with server(answer) as uri:
        rows = sync_runs([run.path, other.path], make_store(uri)).runs
    assert [row.status for row in rows] == ["failed", "failed"]
    assert what in rows[0].detail
    assert {path: path.read_bytes() for path in files} == files
    record = RunDirectory.open(run.path).record
    assert (record.status, record.mlflow_run_id) == ("done", None)
    assert read_uploads(run).stores == []


def test_a_run_that_goes_on_and_one_that_is_damaged_cost_no_other(make_run: MakeRun, make_store: MakeStore) -> None:
    running, broken, good = make_run(), make_run(), make_run()
    running.update(status="running", ended_at=None)
    (broken.path / "run.json").write_text("{")
    result = sync_runs([running.path, broken.path, good.path], make_store())
    assert statuses(result) == ["running", "failed", "uploaded"]
    assert "is damaged" in result.runs[1].detail


def test_a_damaged_note_counts_as_none(make_run: MakeRun) -> None:
    run = make_run()
    (run.path / "mlflow.json").write_text("{")
    assert read_uploads(run).stores == []


def test_two_uploads_at_once_are_refused(make_run: MakeRun, make_store: MakeStore) -> None:
    run = make_run()
    with uploads._alone(make_store().runs_dir), pytest.raises(NotPossibleHereError, match="Another process uploads"):
        sync_runs([run.path], make_store())


def test_nothing_to_upload_makes_nothing(make_store: MakeStore) -> None:
    store = make_store()
    assert sync_runs([], store).runs == []
    assert not store.runs_dir.exists()


def test_a_note_that_cannot_be_written_costs_nothing(
    make_run: MakeRun, make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("perfladder.tasks.store.note_part", full)
    run = make_run()
    with make_store() as store:
        assert store.log_rung(run, rung_named("stages")) == []
    assert run.record.mlflow_error is None


def test_the_parent_run_shows_stages_and_report_and_no_infinite_number(
    make_run: MakeRun, make_store: MakeStore
) -> None:
    run, store = make_run(), make_store()
    path = run.path / "1-stages/stages.json"
    result = json.loads(path.read_text())
    result["metric"]["interval"]["high"] = 1e400
    path.write_text(json.dumps(result))
    (run.path / "report.md").write_text("# Report\n" + "a line\n" * 2000)
    sync_runs([run.path], store)
    parent = MlflowClient(store.uri).get_run(str(RunDirectory.open(run.path).record.mlflow_run_id))
    assert parent.data.metrics["stage/unet/self_ms_p50"] == 5.0
    assert parent.data.metrics["stage/down_x28_0_x29_/share"] == 0.5
    assert "latency_p50_high_ms" not in parent.data.metrics
    description = parent.data.tags["mlflow.note.content"]
    assert description.startswith("# Report\na line")
    assert description.endswith("The rest is in the artifact `report.md`.")
    assert len(description) <= tracking.MAX_TAG_CHARS


def test_a_store_that_fails_says_so_to_who_asked_for_the_run(make_run: MakeRun, make_store: MakeStore) -> None:
    with make_store("sqlite:////no/\0/mlflow.db") as store, pytest.raises(StoreError):
        store.begin(make_run())
