"""The main job: climb the ladder, rung by rung, as a Prefect flow that is kept in MLflow."""

from __future__ import annotations

from typing import Any

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from perfladder.errors import NotPossibleHereError, RungError
from perfladder.flows.begin import Begun, begin
from perfladder.flows.config import ProfilePipelineConfig
from perfladder.flows.run import run_profile_pipeline
from perfladder.ladder import ClimbOutcome
from perfladder.tasks.artifacts import publish
from perfladder.tasks.rungs import climb_rung, log_end, log_rung

__all__ = ["ProfilePipelineConfig", "climb_begun", "profile_pipeline", "run_profile_pipeline"]

_OPTIONS: dict[str, Any] = {"name": "profile-pipeline", "retries": 0, "persist_result": False}


@flow(**_OPTIONS)
def profile_pipeline(config: ProfilePipelineConfig) -> ClimbOutcome:
    """Climb the ladder with every rung as a task, against the Prefect server of your own settings.

    Raises:
        PerfladderError: Nothing could be measured; the flow run then ends as failed.
    """
    with begin(config, get_run_logger().info) as begun:
        begun.ladder.wait_until_loaded()
        outcome = _climb(begun)
    return _measured(outcome, begun)


def climb_begun(config: ProfilePipelineConfig, begun: Begun) -> ClimbOutcome:
    """The same flow over what was begun already, so that nobody waits for servers, imports and the target in turn.

    Raises:
        NotPossibleHereError: The Prefect server failed before anything was measured.
    """
    outcomes: list[ClimbOutcome] = []
    record = begun.ladder.run.record

    @flow(**_OPTIONS, flow_run_name=f"{record.workload_name}-{record.run_id}")
    def profile_pipeline(config: ProfilePipelineConfig) -> ClimbOutcome:
        outcomes.append(_climb(begun))
        return _measured(outcomes[0], begun)

    try:
        state = profile_pipeline(config, return_state=True)
    except Exception as error:  # The flow's own errors are in its state; these are Prefect's.
        if not outcomes:
            raise NotPossibleHereError(f"The Prefect server failed: {error!r}. Climb without one (--plain).") from error
        begun.ladder.tell(f"The Prefect server failed, and does not know how this run ended: {error!r}.")
    if not outcomes:
        state.result()
    return outcomes[0]


def _climb(begun: Begun) -> ClimbOutcome:
    """Climb, and keep each rung in MLflow right after it is on disk; a rung that fails costs that rung only."""
    ladder, store = begun
    ladder.run.update(prefect_flow_run_id=str(flow_run.get_id()))
    store.log_begin(ladder.run)
    with ladder.holding_device():
        for rung in ladder.rungs_to_climb():
            climb_rung(ladder, rung)
            log_rung(store, ladder.run, rung)
    outcome = ladder.finish()
    log_end(store, ladder.run)
    publish(ladder.run, outcome)
    return outcome


def _measured(outcome: ClimbOutcome, begun: Begun) -> ClimbOutcome:
    """Pass an outcome on, unless nothing was measured: then the flow run is a failed one."""
    if outcome.status == "failed":
        raise RungError(begun.ladder.run.record.error or "Nothing could be measured.")
    return outcome
