"""The tasks that every rung goes through: climb it, and keep it in MLflow."""

from __future__ import annotations

from typing import Any

from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from perfladder.ladder import Climb, Rung
from perfladder.rundir import RunDirectory
from perfladder.rungs.base import RungResult
from perfladder.tasks.steps import rung_step, skill_task
from perfladder.tasks.store import Named, StoreError, TrackingStore
from perfladder.tuning.prove import Step

# A cached, retried or shared measurement is a wrong one. Tasks are called directly, never submitted: the children are
# started from the main thread, and nothing runs beside a measurement.
_MEASURING: dict[str, Any] = {"cache_policy": NO_CACHE, "retries": 0, "persist_result": False}
_UPLOADING: dict[str, Any] = {"cache_policy": NO_CACHE, "retries": 1, "retry_delay_seconds": 1, "persist_result": False}


def climb_rung(ladder: Climb, rung: Rung) -> RungResult:
    """Climb a rung as a task such as `1-stages`, whose description names what SKILL.md says under "Rung 1"."""
    name = f"{rung.number}-{rung.name}"
    description = f"SKILL.md, {rung_step(rung.number)}: {rung.question}"
    step = climb_rung_task.with_options(name=name, task_run_name=name, description=description)
    outcome = step(ladder, rung, return_state=True).result(raise_on_failure=False)
    if isinstance(outcome, BaseException):  # Not the rung's failure, which is a result, but the run directory's, say.
        raise outcome
    return ladder.results[rung.name]


@skill_task("3. Climb", **_MEASURING)
def climb_rung_task(ladder: Climb, rung: Rung) -> State[RungResult]:
    """Climb one rung; its outcome becomes the task run's state."""
    result = ladder.climb_rung(rung)
    if result.status == "failed":
        return Failed(message=result.reason, data=result)
    if rung.name in ladder.reused:
        return Completed(name="TakenOver", message=f"As measured at {result.started_at}", data=result)
    if result.status == "done":
        return Completed(message=f"{rung_step(rung.number)} of SKILL.md: {rung.question}", data=result)
    return Completed(name=result.status.title().replace("_", ""), message=result.reason, data=result)


def log_rung(store: TrackingStore, run: RunDirectory, rung: Rung | Step) -> None:
    """Upload a finished rung, or step of a tuning, as a task.

    What fails is told and noted in the run's record, and costs no measurement.
    """
    _upload(store, run, f"{rung.number}-{rung.name}-to-mlflow", rung)


def log_end(store: TrackingStore, run: RunDirectory) -> None:
    """Upload the report and how the run ended, as a task."""
    _upload(store, run, "report-to-mlflow", None)


def _upload(store: TrackingStore, run: RunDirectory, name: str, rung: Named | None) -> None:
    upload_task.with_options(name=name, task_run_name=name)(store, run, rung, return_state=True)


@skill_task("3. Climb", **_UPLOADING, retry_condition_fn=lambda _task, _run, state: _is_worth_a_retry(state))
def upload_task(store: TrackingStore, run: RunDirectory, rung: Named | None) -> State[None]:
    """Upload one rung or step, or the end of the run."""
    if store.problem is not None:
        return Completed(name="NotUploaded", message=store.problem)
    failures = store.log_rung(run, rung) if rung is not None else store.log_end(run)
    if failures:
        return Failed(message="; ".join(failures))
    return Completed(message="Uploaded")


def _is_worth_a_retry(state: State[Any]) -> bool:
    """A store that failed may answer the second time; files that it refuses, it refuses again."""
    return isinstance(state.result(raise_on_failure=False), StoreError)
