"""Runs are found by what MLflow knows of them, and brought here where their folder is elsewhere."""

from collections.abc import Callable
from pathlib import Path

import pytest

from perfladder.errors import InputError
from perfladder.ladder import load_results
from perfladder.rundir import RunDirectory
from perfladder.tasks import tracking
from perfladder.tasks.find import find_anywhere, find_in_mlflow
from perfladder.tasks.store import Target

MakeRun = Callable[..., RunDirectory]
Find = Callable[[str], Path]


@pytest.fixture
def uploaded(target: Target, make_run: MakeRun) -> RunDirectory:
    run = make_run()
    run.update(mlflow_run_id=tracking.log_begin(target, run, max_artifact_bytes=1 << 20))
    for entry in run.record.rungs:
        tracking.log_rung(target, run, entry.name, max_artifact_bytes=1 << 20)
    tracking.log_end(target, run, max_artifact_bytes=1 << 20)
    return run


@pytest.fixture
def find(store_uri: str, tmp_path: Path) -> Find:
    return lambda name: find_in_mlflow(name, store_uri, {}, tmp_path / "runs")


def test_a_run_is_found_by_its_mlflow_id_that_of_a_rung_and_a_tag(
    uploaded: RunDirectory, target: Target, find: Find, store_uri: str
) -> None:
    run_id = uploaded.record.run_id
    nested = target.client.search_runs([target.experiment_id], "tags.`perfladder.rung` = 'stages'")
    names = [f"mlflow:{uploaded.record.mlflow_run_id}", f"mlflow:{nested[0].info.run_id}"]
    names.append(f"tag:perfladder.run_id={run_id}")
    assert [find(name) for name in names] == [uploaded.path] * 3
    assert find_anywhere(",".join(names), store_uri, {}, uploaded.path.parent.parent) == [uploaded.path] * 3
    assert find_anywhere(run_id, store_uri, {}, uploaded.path.parent.parent) == [uploaded.path]


def test_a_run_of_another_machine_is_fetched_with_the_results_of_its_rungs(uploaded: RunDirectory, find: Find) -> None:
    expected = load_results(uploaded)
    uploaded.path.rename(uploaded.path.with_name("elsewhere"))
    found = find(f"mlflow:{uploaded.record.mlflow_run_id}")
    assert found.name == uploaded.record.mlflow_run_id
    run = RunDirectory.open(found)
    assert run.record.run_id == uploaded.record.run_id
    assert load_results(run) == expected


def test_what_mlflow_does_not_have_is_said(find: Find, target: Target, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="MLflow has no run 'nonsense'"):
        find("mlflow:nonsense")
    with pytest.raises(InputError, match="no run of perfladder with this tag"):
        find("tag:git.commit=nonsense")
    for name in ("tag:git.commit", "tag:a=it's", "tag:a`b=c"):
        with pytest.raises(InputError, match="expected tag:KEY=VALUE"):
            find(name)
    foreign = target.client.create_run(target.experiment_id)
    with pytest.raises(InputError, match="not one of perfladder's"):
        find(f"mlflow:{foreign.info.run_id}")
    with pytest.raises(InputError, match="no MLflow store"):
        find_in_mlflow("mlflow:x", None, {}, tmp_path / "empty")
    assert not (tmp_path / "empty").exists(), "looking makes no store"
