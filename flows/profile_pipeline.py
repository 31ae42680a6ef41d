"""The main job: climb the ladder, rung by rung, as a Prefect flow that is kept in MLflow."""

# No postponed annotations: where a worker loads the flow from this file, Prefect cannot resolve the parameters' types.

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from perfladder.errors import InputError, NotPossibleHereError, RungError
from perfladder.flows.begin import Begun, begin
from perfladder.flows.config import ProfilePipelineConfig
from perfladder.flows.run import run_profile_pipeline
from perfladder.ladder import ClimbOutcome
from perfladder.rundir import RunDirectory
from perfladder.tasks.artifacts import page_of_flow_run, publish
from perfladder.tasks.device_slots import device_slots
from perfladder.tasks.rungs import climb_rung, log_end, log_rung

__all__ = ["ProfilePipelineConfig", "climb_begun", "profile_pipeline", "run_profile_pipeline"]

_OPTIONS: dict[str, Any] = {"name": "profile-pipeline", "retries": 0, "persist_result": False}


@flow(**_OPTIONS)
def profile_pipeline(config: ProfilePipelineConfig) -> ClimbOutcome:
    """Climb the ladder with every rung as a task, against the Prefect server of your own settings.

    A flow run that is retried goes on with the run directory that it began.

    Raises:
        PerfladderError: Nothing could be measured; the flow run then ends as failed.
    """
    if config.resume is None and (flow_run.get_run_count() or 0) > 1:
        config = config.model_copy(update={"resume": run_of_flow_run(str(flow_run.get_id()), Path(config.runs_dir))})
    with begin(config, get_run_logger().info) as begun:
        note_flow_run(begun.ladder.run)
        begun.ladder.wait_until_loaded()
        # Settings without an address mean a server in this process, which no other worker shares.
        outcome = _climb(begun, is_shared=PREFECT_API_URL.value() is not None)
    return _measured(outcome, begun)


def climb_begun(config: ProfilePipelineConfig, begun: Begun, *, is_shared: bool) -> ClimbOutcome:
    """The same flow over what was begun already, so that nobody waits for servers, imports and the target in turn.

    Args:
        config: What to profile.
        begun: What was begun.
        is_shared: Whether others use the Prefect server as well: then the device is taken there too.

    Raises:
        NotPossibleHereError: The Prefect server failed before anything was measured.
    """
    outcomes: list[ClimbOutcome] = []
    record = begun.ladder.run.record

    @flow(**_OPTIONS, flow_run_name=f"{record.workload_name}-{record.run_id}")
    def profile_pipeline(config: ProfilePipelineConfig) -> ClimbOutcome:
        note_flow_run(begun.ladder.run)
        outcomes.append(_climb(begun, is_shared=is_shared))
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


def run_of_flow_run(flow_run_id: str, runs_dir: Path) -> str | None:
    """The folder of the run that a flow run has begun and not finished; None if there is none."""
    for path in sorted(runs_dir.glob("*/*/run.json"), reverse=True):
        with suppress(InputError):
            record = RunDirectory.open(path.parent).record
            if record.prefect_flow_run_id == flow_run_id and not record.is_finished:
                return str(path.parent)
    return None


def note_flow_run(run: RunDirectory) -> None:
    """Note the flow run in the run's record, with its page."""
    run.update(prefect_flow_run_id=str(flow_run.get_id()), prefect_flow_run_url=page_of_flow_run())


def _climb(begun: Begun, *, is_shared: bool) -> ClimbOutcome:
    """Climb, and keep each rung in MLflow right after it is on disk; a rung that fails costs that rung only."""
    ladder, store = begun
    store.log_begin(ladder.run)
    # The server's slot first: who waits for it must not hold the machine's own lock.
    slots = device_slots(ladder.info.lock_names, ladder.tell) if is_shared else nullcontext()
    with slots, ladder.holding_device():
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
