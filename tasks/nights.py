"""Nights in MLflow: what a run's `night.json` becomes there, and the one reader of a workload's history."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pydantic import ValidationError

from perfladder.errors import InputError
from perfladder.nightly.model import Night, NightRecord
from perfladder.nightly.records import NIGHT_FILE, in_order, read_history, read_record
from perfladder.rundir import RunDirectory, read_model
from perfladder.tasks.store import StoreError, Target, TrackingStore

if TYPE_CHECKING:
    from mlflow.entities import Run

NIGHT_TAG = "perfladder.night"
RECORD_TAG = "perfladder.night.record"
_WORKLOAD_TAG = "perfladder.workload"
_PAGE_SIZE = 200


def night_tags(run: RunDirectory) -> dict[str, str]:
    """Tags of a run that was a night; none for another one. The record is whole in one tag, to be read in one query."""
    record = _record_of(run)
    if record is None:
        return {}
    night, verdict = record.night, record.verdict
    tags = {
        NIGHT_TAG: night.started_at[:10],
        "perfladder.night.verdict": night.verdict,
        "perfladder.night.second_of": night.second_of,
        "perfladder.night.accepted": "true" if night.is_accepted else None,
        "perfladder.night.reason": verdict.reason if verdict is not None else None,
        "perfladder.night.commits": verdict.commits.told if verdict is not None and verdict.commits else None,
        # Where it lies is not the same everywhere, and neither is its id in another store.
        RECORD_TAG: night.model_copy(update={"run_dir": str(run.path), "mlflow_run_id": None}).model_dump_json(),
    }
    return {name: value for name, value in tags.items() if value}


def night_metrics(run: RunDirectory) -> dict[str, float]:
    """Numbers of a run that was a night, to be plotted over time on MLflow's pages."""
    record = _record_of(run)
    if record is None:
        return {}
    night, verdict = record.night, record.verdict
    found = {f"night/level_{night.unit}": night.value}
    if verdict is not None and verdict.baseline is not None and verdict.noise is not None:
        found |= {f"night/baseline_{night.unit}": verdict.baseline, "night/noise_frac": verdict.noise}
        found |= {"night/change_ratio": verdict.ratio or 1.0}
    return found | {f"night/family/{name}/total_us": value for name, value in night.families_us.items()}


def read_nights(store: TrackingStore, runs_dir: Path, workload: str, limit: int) -> list[Night]:
    """All nights of a workload: those in MLflow, and those of the runs folder, which goes first where both have one.

    A store that does not answer is told; the runs folder then has to do.

    Args:
        store: Entered.
        runs_dir: The runs folder.
        workload: Its name.
        limit: Nights, at most, that are read from the store.
    """
    here = read_history(runs_dir, workload, store.tell)
    try:
        stored = store.ask(lambda target: nights_in_store(target, workload, limit))
    except StoreError as error:
        store.tell(f"{workload}: the history is that of {runs_dir} alone: {error}")
        stored = []
    return in_order([*stored, *here])


def nights_in_store(target: Target, workload: str, limit: int) -> list[Night]:
    """The newest nights of a workload in a store, in order of time; what cannot be read is left out."""
    name = workload.replace("'", "")
    wanted = f"tags.`{_WORKLOAD_TAG}` = '{name}' AND tags.`{NIGHT_TAG}` LIKE '%-%'"
    nights: list[Night] = []
    token: str | None = None
    while len(nights) < limit:
        page = target.client.search_runs(
            [target.experiment_id],
            wanted,
            order_by=["attributes.start_time DESC"],
            max_results=min(_PAGE_SIZE, limit - len(nights)),
            page_token=token,
        )
        nights += [night for run in page if (night := _night_in(target, run)) is not None]
        token = page.token
        if not token:
            break
    return in_order(nights)


def workloads_in_store(target: Target) -> list[str]:
    """Names of the workloads whose nights are among the newest in a store."""
    page = target.client.search_runs(
        [target.experiment_id],
        f"tags.`{NIGHT_TAG}` LIKE '%-%'",
        order_by=["attributes.start_time DESC"],
        max_results=1000,
    )
    return sorted({run.data.tags[_WORKLOAD_TAG] for run in page if _WORKLOAD_TAG in run.data.tags})


def upload_nights(store: TrackingStore, folders: Sequence[Path]) -> list[str]:
    """Bring the end of runs into the store once more, now that they are nights; returns what could not be uploaded."""
    failures: list[str] = []
    for folder in folders:
        try:
            failures += store.log_end(RunDirectory.open(folder))
        except StoreError as error:
            failures.append(str(error))
    return failures


def _record_of(run: RunDirectory) -> NightRecord | None:
    if not (run.path / NIGHT_FILE).is_file():
        return None
    with contextlib.suppress(InputError):
        return read_record(run.path)
    return None


def _night_in(target: Target, run: Run) -> Night | None:
    text = run.data.tags.get(RECORD_TAG, "")
    try:
        # What is too long for a tag is its digest there, and whole in the artifact.
        night = _downloaded(target, run) if text.startswith("sha256:") else Night.model_validate_json(text)
    except (ValidationError, InputError, OSError):
        return None
    return night.model_copy(update={"mlflow_run_id": run.info.run_id})


def _downloaded(target: Target, run: Run) -> Night:
    with TemporaryDirectory() as folder:
        target.client.download_artifacts(run.info.run_id, NIGHT_FILE, folder)
        return read_model(Path(folder) / NIGHT_FILE, NightRecord).night
