"""The tasks of a tuning run: do a step, keep it in MLflow, publish what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_progress_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from perfladder.rundir import RunDirectory
from perfladder.rungs.base import RungResult
from perfladder.tasks.artifacts import artifact_key, link_to_mlflow
from perfladder.tasks.steps import skill_task
from perfladder.tasks.store import StoreError, TrackingStore
from perfladder.tasks.uploads import upload_run
from perfladder.tuning.proof_model import REPORT_FILE, ProofOutcome
from perfladder.tuning.prove import STEPS, Proof, Step

_STEP = "6. Decide, and stop"

# A cached, retried or shared measurement is a wrong one. Tasks are called directly, as those of rungs.
_MEASURING: dict[str, Any] = {"cache_policy": NO_CACHE, "retries": 0, "persist_result": False}
_UPLOADING: dict[str, Any] = {"cache_policy": NO_CACHE, "retries": 1, "retry_delay_seconds": 1, "persist_result": False}


def do_step(proof: Proof, step: Step) -> RungResult:
    """Do a step as a task such as `2-tune`; an essential one that fails ends the flow."""
    name = f"{step.number}-{step.name}"
    named = do_step_task.with_options(name=name, task_run_name=name, description=f"SKILL.md, {_STEP}: {step.question}")
    outcome = named(proof, step, return_state=True).result(raise_on_failure=False)
    if isinstance(outcome, BaseException):
        raise outcome
    return proof.results[step.name]


@skill_task(_STEP, **_MEASURING)
def do_step_task(proof: Proof, step: Step) -> State[RungResult]:
    """Do one step; its outcome becomes the task run's state."""
    result = proof.do(step)
    if result.status == "failed":
        return Failed(message=result.reason, data=result)
    if step.name in proof.reused:
        return Completed(name="TakenOver", message=f"As done at {result.started_at}", data=result)
    if result.status == "done":
        return Completed(message=step.question, data=result)
    return Completed(name=result.status.title(), message=result.reason, data=result)


def log_profile(store: TrackingStore, proof: Proof, step: Step) -> None:
    """Upload the run of a step that profiles, as a task; what fails is told, and `perfladder sync` brings it later."""
    folder = proof.run.record.profile_runs.get(step.name)
    if folder is not None and proof.results[step.name].status == "done":
        name = f"{step.name}-run-to-mlflow"
        log_profile_task.with_options(name=name, task_run_name=name)(store, Path(folder), return_state=True)


@skill_task(_STEP, **_UPLOADING)
def log_profile_task(store: TrackingStore, folder: Path) -> State[None]:
    """Upload what of a finished run is not in the store."""
    synced = upload_run(RunDirectory.open(folder), store)
    return Failed(message=synced.detail) if synced.status == "failed" else Completed(message=synced.status)


def register(store: TrackingStore, run: RunDirectory) -> None:
    """Upload and register what is kept, as a task; what fails is told, and `perfladder sync` brings it later."""
    register_task(store, run, return_state=True)


@skill_task(_STEP, name="register", task_run_name="register", **_UPLOADING)
def register_task(store: TrackingStore, run: RunDirectory) -> State[None]:
    """Make the archive a version of a registered model."""
    try:
        failures = store.register(run)
    except StoreError as error:
        return Failed(message=str(error))
    return Failed(message="; ".join(failures)) if failures else Completed(message=run.record.mlflow_model_version)


def publish_proof(run: RunDirectory, outcome: ProofOutcome) -> None:
    """Publish as a task; without it, the run directory still has everything."""
    publish_proof_task(run, outcome, return_state=True)


@skill_task("7. Report", name="publish", task_run_name="publish", **_UPLOADING)
def publish_proof_task(run: RunDirectory, outcome: ProofOutcome) -> None:
    """Create the artifacts `tuning-`, `tuning-steps-` and `mlflow-<workload>`; each run adds a version."""
    where = f"Run {run.record.run_id}, in {run.path}"
    text = (run.path / REPORT_FILE).read_text(encoding="utf-8")
    create_markdown_artifact(text, key=artifact_key("tuning", run), description=where)
    rows = [step.model_dump(mode="json") for step in outcome.steps]
    create_table_artifact(rows, key=artifact_key("tuning-steps", run), description=where)
    link_to_mlflow(run.record.mlflow_run_url, run.record.workload_name)


def show_progress(run: RunDirectory, num_done: int) -> None:
    """Publish how many steps are done, as a task; a server that fails costs nothing."""
    show_progress_task(run, num_done, return_state=True)


@skill_task("7. Report", name="progress", task_run_name="progress", **{**_UPLOADING, "retries": 0})
def show_progress_task(run: RunDirectory, num_done: int) -> None:
    """Create the artifact `tuning-progress-<workload>`: each step adds a version."""
    text = f"{num_done} of {len(STEPS)} steps of run {run.record.run_id}"
    create_progress_artifact(100 * num_done / len(STEPS), key=artifact_key("tuning-progress", run), description=text)
