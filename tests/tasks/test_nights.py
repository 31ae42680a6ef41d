"""Nights in MLflow: written by the upload of a run, read back as a history; without a store the runs folder has it."""

import shutil
from collections.abc import Callable
from pathlib import Path

from perfladder.nightly.records import accept, night_of, read_history, write_night
from perfladder.rundir import RunDirectory
from perfladder.tasks import tracking
from perfladder.tasks.nights import nights_in_store, read_nights, workloads_in_store
from perfladder.tasks.store import Target, TrackingStore
from perfladder.tasks.uploads import END, missing_parts, note_part, part_of

MakeRun = Callable[..., RunDirectory]


def make_night(make_run: MakeRun, loaded_info: str, **changes: object) -> RunDirectory:
    run = make_run()
    (run.path / "environment.json").write_text(loaded_info)
    write_night(night_of(run.path).model_copy(update={"verdict": "ok", **changes}))
    return run


def upload(target: Target, run: RunDirectory) -> None:
    tracking.log_begin(target, run, max_artifact_bytes=1 << 20)
    tracking.log_end(target, run, max_artifact_bytes=1 << 20)


def test_a_night_is_read_back_from_the_store_as_it_was(target: Target, make_run: MakeRun, loaded_info: str) -> None:
    run = make_night(make_run, loaded_info)
    upload(target, run)
    upload(target, make_run())
    (found,) = nights_in_store(target, "toy", 100)
    (here,) = read_history(run.path.parents[1], "toy")
    assert found.mlflow_run_id is not None
    assert found.model_copy(update={"mlflow_run_id": here.mlflow_run_id}) == here
    assert workloads_in_store(target) == ["toy"]
    assert nights_in_store(target, "other", 100) == []
    (stored,) = target.client.search_runs([target.experiment_id], f"tags.`perfladder.run_id` = '{run.record.run_id}'")
    assert stored.data.tags["perfladder.night.verdict"] == "ok"
    assert stored.data.metrics["night/level_ms"] == here.value


def test_a_night_too_long_for_a_tag_is_read_from_its_file(target: Target, make_run: MakeRun, loaded_info: str) -> None:
    stages = {f"blocks.{place}.attention.out_projection": 1.5 for place in range(300)}
    run = make_night(make_run, loaded_info, stages_ms=stages)
    upload(target, run)
    (found,) = nights_in_store(target, "toy", 100)
    assert found.stages_ms == stages


def test_the_runs_folder_goes_first_and_is_the_history_where_no_store_answers(
    target: Target, make_run: MakeRun, loaded_info: str, store_uri: str, tmp_path: Path
) -> None:
    first, second = make_night(make_run, loaded_info), make_night(make_run, loaded_info)
    for run in (first, second):
        upload(target, run)
    accept(second.path)
    shutil.rmtree(first.path)
    lines: list[str] = []
    with TrackingStore(store_uri, experiment=tmp_path.name, runs_dir=tmp_path) as store:
        found = {night.run_id: night for night in read_nights(store, tmp_path / "runs", "toy", 100)}
    assert {run_id: night.is_accepted for run_id, night in found.items()} == {
        first.record.run_id: False,
        second.record.run_id: True,
    }
    with TrackingStore(
        "postgresql+psycopg2://127.0.0.1:1/x", experiment="x", runs_dir=tmp_path, tell=lines.append
    ) as store:
        (only,) = read_nights(store, tmp_path / "runs", "toy", 100)
    assert only.run_id == second.record.run_id
    assert "the history is that of" in lines[0]


def test_a_run_that_became_a_night_after_its_upload_is_uploaded_by_sync(make_run: MakeRun, loaded_info: str) -> None:
    run = make_run()
    (run.path / "environment.json").write_text(loaded_info)
    run.update(mlflow_run_id="0")
    note_part(run, "sqlite:///x", "x", END, part_of(run, END))
    assert END not in missing_parts(run, "sqlite:///x", "x")
    write_night(night_of(run.path))
    assert END in missing_parts(run, "sqlite:///x", "x")
