"""Find a run by what MLflow knows of it, and bring its results here where the run directory is elsewhere."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.find_runs import find_runs
from perfladder.rundir import RunRecord, read_model
from perfladder.tasks.store import StoreError, Target, TrackingStore, resolve_tracking_uri

if TYPE_CHECKING:
    from mlflow.entities import Run

_PARENT_TAG = "mlflow.parentRunId"
_FOLDER_TAG = "perfladder.run_dir"
_RUN_ID_TAG = "perfladder.run_id"
_KIND_TAG = "perfladder.kind"
_RUNG_TAG = "perfladder.rung"
_KEY = re.compile(r"[\w./:\- ]+")


def find_anywhere(name: str, tracking_uri: str | None, variables: Mapping[str, str], runs_dir: Path) -> list[Path]:
    """Run directories of a name, by `mlflow:RUN_ID`, `tag:KEY=VALUE`, or as `find_runs` takes it.

    Raises:
        InputError: There is none.
        NotPossibleHereError: MLflow cannot be asked.
    """
    if name.startswith(("mlflow:", "tag:")):
        names = re.split(r",(?=mlflow:|tag:)", name)
        return [find_in_mlflow(one, tracking_uri, variables, runs_dir) for one in names]
    return find_runs(name, runs_dir)


def find_in_mlflow(name: str, tracking_uri: str | None, variables: Mapping[str, str], runs_dir: Path) -> Path:
    """The run directory of `mlflow:RUN_ID`, or of the newest run with a tag, `tag:KEY=VALUE`.

    Args:
        name: What the user typed.
        tracking_uri: The store; None: what the variables name, else the SQLite file in `runs_dir`.
        variables: The process's environment variables.
        runs_dir: A run that is not on this machine is fetched to `.perfladder/mlflow` in it.

    Raises:
        InputError: There is no such run, or perfladder did not make it.
        NotPossibleHereError: MLflow cannot be asked.
    """
    uri = resolve_tracking_uri(tracking_uri, variables, runs_dir)
    path = Path(uri.removeprefix("sqlite:///"))
    if uri.startswith("sqlite:///") and not path.is_file():
        raise InputError(f"{name}: there is no MLflow store at {path}. Name one with --tracking-uri.")
    try:
        with TrackingStore(uri, experiment="perfladder", runs_dir=runs_dir) as store:
            return store.ask(lambda target: _find(target, name, runs_dir))
    except StoreError as error:
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise NotPossibleHereError(f"{name}: {error}") from error


def _find(target: Target, name: str, runs_dir: Path) -> Path:
    run = _run_named(target, name)
    parent = run.data.tags.get(_PARENT_TAG)
    if parent is not None:
        run = target.client.get_run(parent)
    run_id, folder = run.data.tags.get(_RUN_ID_TAG), run.data.tags.get(_FOLDER_TAG)
    if run_id is None or folder is None:
        raise InputError(
            f"{name}: the MLflow run {run.info.run_id} is not one of perfladder's: it has no {_RUN_ID_TAG}."
        )
    if run.data.tags.get(_KIND_TAG) == "tuning":
        raise InputError(
            f"{name}: the MLflow run {run.info.run_id} is of a tuning; its tags name the runs it compared."
        )
    with contextlib.suppress(InputError):
        if read_model(Path(folder) / "run.json", RunRecord).run_id == run_id:
            return Path(folder)
    return _fetch(target, run, runs_dir / ".perfladder" / "mlflow" / run.info.run_id)


def _run_named(target: Target, name: str) -> Run:
    from mlflow.exceptions import MlflowException

    kind, _, what = name.partition(":")
    if kind == "mlflow":
        try:
            return target.client.get_run(what)
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            raise InputError(f"{name}: MLflow has no run {what!r}.") from None
    key, separator, value = what.partition("=")
    if not separator or not _KEY.fullmatch(key) or "'" in value:
        raise InputError(f"{name}: expected tag:KEY=VALUE, such as tag:git.commit=3f2a..., without quotes.")
    experiments = [experiment.experiment_id for experiment in target.client.search_experiments()]
    found = target.client.search_runs(
        experiments, f"tags.`{key}` = '{value}'", order_by=["attributes.start_time DESC"], max_results=200
    )
    ours = [run for run in found if _RUN_ID_TAG in run.data.tags]
    if not ours:
        raise InputError(f"{name}: MLflow has no run of perfladder with this tag.")
    return ours[0]


def _fetch(target: Target, run: Run, folder: Path) -> Path:
    """Make a run directory again from the parent's files and each rung's result; traces stay in the store."""
    client, part = target.client, folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for info in client.list_artifacts(run.info.run_id):
        if not info.is_dir:
            client.download_artifacts(run.info.run_id, info.path, str(part))
    if not (part / "run.json").is_file():
        raise InputError(f"The MLflow run {run.info.run_id} has no run.json, and its folder is not on this machine.")
    record = read_model(part / "run.json", RunRecord)
    nested = client.search_runs([run.info.experiment_id], f"tags.`{_PARENT_TAG}` = '{run.info.run_id}'")
    ids = {one.data.tags.get(_RUNG_TAG): one.info.run_id for one in nested}
    for entry in record.rungs:
        place = part / Path(entry.folder).name
        place.mkdir(exist_ok=True)
        client.download_artifacts(ids[entry.name], f"{entry.name}.json", str(place))
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    return folder
