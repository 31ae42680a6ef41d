"""The steps of a night as tasks: read the history, upload the night, publish its page, tell of a regression."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Completed, Failed

from perfladder.nightly.model import Night, NightVerdict
from perfladder.nightly.outcome import NightlyOutcome
from perfladder.nightly.words import alarm_of, percent
from perfladder.rundir import RunDirectory
from perfladder.tasks.artifacts import key_of
from perfladder.tasks.nights import read_nights, upload_nights
from perfladder.tasks.steps import skill_task
from perfladder.tasks.store import StoreError, TrackingStore

REGRESSION_EVENT = "perfladder.regression"
NEW_LABEL = "perfladder.is_new"

_PLAIN: dict[str, Any] = {"cache_policy": NO_CACHE, "retries": 0, "persist_result": False}
_SENDING: dict[str, Any] = {"cache_policy": NO_CACHE, "retries": 1, "retry_delay_seconds": 1, "persist_result": False}


@skill_task("6. Decide, and stop", name="read-history", task_run_name="read-history-{workload}", **_PLAIN)
def read_history_task(store: TrackingStore, runs_dir: Path, workload: str, limit: int) -> list[Night]:
    """Nights of a workload, from MLflow and from the runs folder."""
    return read_nights(store, runs_dir, workload, limit)


def keep_night(store: TrackingStore, night: Night, second: Night | None) -> None:
    """Upload as a task; what fails is told, and costs nothing: the run directory has everything."""
    folders = [Path(one.run_dir) for one in (night, second) if one is not None]
    keep_night_task(store, night.workload, folders, return_state=True)


@skill_task("7. Report", name="night-to-mlflow", task_run_name="night-to-mlflow-{workload}", **_PLAIN)
def keep_night_task(store: TrackingStore, workload: str, folders: list[Path]) -> State[None]:
    """Upload what the night adds to its runs."""
    if store.problem is not None:
        return Completed(name="NotUploaded", message=store.problem)
    failures = upload_nights(store, folders)
    return Failed(message="; ".join(failures)) if failures else Completed(message="Uploaded")


def publish_night(store: TrackingStore, night: Night, page: str) -> None:
    """Publish as a task; without it, the run directory still has everything."""
    publish_night_task(night, page, mlflow_page(store, Path(night.run_dir)), return_state=True)


@skill_task("7. Report", name="publish-night", task_run_name="publish-{night.workload}", **_SENDING)
def publish_night_task(night: Night, page: str, link: str | None) -> None:
    """Create the artifacts `night-<workload>` and, where MLflow has pages, `mlflow-<workload>`."""
    create_markdown_artifact(page, key=key_of("night", night.workload), description=f"In {night.run_dir}")
    if link is not None:
        create_link_artifact(link, link_text=f"{night.workload} in MLflow", key=key_of("mlflow", night.workload))


def publish_outcome(outcome: NightlyOutcome) -> None:
    """Publish the table of all workloads as a task."""
    publish_outcome_task(outcome, return_state=True)


@skill_task("7. Report", name="publish", task_run_name="publish", **_SENDING)
def publish_outcome_task(outcome: NightlyOutcome) -> None:
    """Create the artifact `nightly`: one row for each workload."""
    create_table_artifact(outcome_table(outcome), key="nightly", description=outcome.message[:1000])


def outcome_table(outcome: NightlyOutcome) -> list[dict[str, Any]]:
    """One row for each workload."""
    return [_row(row.workload or row.source, row.verdict, row.error, row.run_dir) for row in outcome.workloads]


def tell_regression(verdict: NightVerdict, night: Night) -> None:
    """Emit the event as a task."""
    tell_regression_task(verdict, night, return_state=True)


@skill_task("7. Report", name="tell-regression", task_run_name="tell-regression-{verdict.workload}", **_SENDING)
def tell_regression_task(verdict: NightVerdict, night: Night) -> None:
    """Emit `perfladder.regression` about the workload; automations take it from there."""
    emit_event(
        REGRESSION_EVENT,
        resource={
            "prefect.resource.id": f"perfladder.workload.{verdict.workload}",
            "prefect.resource.name": verdict.workload,
            NEW_LABEL: "true" if verdict.is_new else "false",
        },
        payload={
            "message": alarm_of(verdict),
            "run_dir": night.run_dir,
            "mlflow_run_id": night.mlflow_run_id,
            "verdict": verdict.model_dump(mode="json"),
        },
    )


def mlflow_page(store: TrackingStore, run_dir: Path) -> str | None:
    """The page of a run in MLflow; None for a store without pages, or a run that is not there."""
    run_id = RunDirectory.open(run_dir).record.mlflow_run_id
    if run_id is None or urlsplit(store.uri).scheme not in ("http", "https") or store.problem is not None:
        return None
    try:
        experiment_id = store.ask(lambda target: target.experiment_id)
    except StoreError:
        return None
    return f"{store.shown_uri.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}"


def _row(workload: str, verdict: NightVerdict | None, error: str | None, run_dir: str | None) -> dict[str, Any]:
    interval = verdict.interval if verdict is not None else None
    commits = verdict.commits if verdict is not None else None
    return {
        "workload": workload,
        "verdict": "failed" if verdict is None else verdict.kind,
        "tonight": None if verdict is None else f"{verdict.value:.4g} {verdict.unit}",
        "change": None if verdict is None or verdict.ratio is None else percent(verdict.ratio),
        "interval": None if interval is None else f"{percent(interval.low)} to {percent(interval.high)}",
        "commits": None if commits is None else commits.told,
        "moved": None if verdict is None else ", ".join(f"{row.name} {percent(row.ratio)}" for row in verdict.moved),
        "reason": error or (verdict.reason if verdict is not None else None),
        "run": run_dir,
    }
