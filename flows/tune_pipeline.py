"""Tune with proof: profile, tune, replay, profile again, compare, keep or reject, register what is kept in MLflow."""

# No postponed annotations: where a worker loads the flow from this file, Prefect cannot resolve the parameters' types.

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL

from perfladder.errors import NotPossibleHereError
from perfladder.flows.begin import BegunTuning, begin_tuning
from perfladder.flows.config import TunePipelineConfig
from perfladder.flows.profile_pipeline import note_flow_run, run_of_flow_run
from perfladder.flows.run import run_tune_pipeline
from perfladder.rundir import TUNINGS
from perfladder.tasks.device_slots import device_slots
from perfladder.tasks.rungs import log_end, log_rung
from perfladder.tasks.tuning import do_step, log_profile, publish_proof, register, show_progress
from perfladder.tuning.proof_model import ProofOutcome
from perfladder.tuning.prove import STEPS, Step

__all__ = ["TunePipelineConfig", "prove_begun", "run_tune_pipeline", "tune_pipeline"]

_OPTIONS: dict[str, Any] = {"name": "tune-pipeline", "retries": 0, "persist_result": False}


@flow(**_OPTIONS)
def tune_pipeline(config: TunePipelineConfig) -> ProofOutcome:
    """Tune with proof, every step as a task, against the Prefect server of your own settings.

    A flow run that is retried goes on with the tuning run that it began.

    Raises:
        PerfladderError: There is nothing to prove: the workload or the tuning failed; the flow run ends as failed.
    """
    if config.resume is None and (flow_run.get_run_count() or 0) > 1:
        runs_dir = Path(config.runs_dir) / TUNINGS
        config = config.model_copy(update={"resume": run_of_flow_run(str(flow_run.get_id()), runs_dir)})
    with begin_tuning(config, get_run_logger().info) as begun:
        # Settings without an address mean a server in this process, which no other worker shares.
        return _prove(begun, is_shared=PREFECT_API_URL.value() is not None)


def prove_begun(config: TunePipelineConfig, begun: BegunTuning, *, is_shared: bool) -> ProofOutcome:
    """The same flow over what was begun already.

    Args:
        config: What to tune.
        begun: What was begun.
        is_shared: Whether others use the Prefect server as well: then the device is taken there too.

    Raises:
        NotPossibleHereError: The Prefect server failed before anything was decided.
    """
    outcomes: list[ProofOutcome] = []
    record = begun.proof.run.record

    @flow(**_OPTIONS, flow_run_name=f"{record.workload_name}-{record.run_id}")
    def tune_pipeline(config: TunePipelineConfig) -> ProofOutcome:
        outcomes.append(_prove(begun, is_shared=is_shared))
        return outcomes[0]

    try:
        state = tune_pipeline(config, return_state=True)
    except Exception as error:  # The flow's own errors are in its state; these are Prefect's.
        if not outcomes:
            how = f"Go on with what was done, with a server or without one (--plain): --resume {record.run_id}."
            raise NotPossibleHereError(f"The Prefect server failed: {error!r}. {how}") from error
        begun.proof.tell(f"The Prefect server failed, and does not know how this run ended: {error!r}.")
    if not outcomes:
        state.result()
    return outcomes[0]


def _prove(begun: BegunTuning, *, is_shared: bool) -> ProofOutcome:
    """All steps, each kept in MLflow right after it is on disk; the end, whatever the store does."""
    proof, store = begun
    note_flow_run(proof.run)
    if is_shared:
        proof.taking = lambda devices: device_slots(devices, proof.tell)
    store.log_begin(proof.run)
    profile, tune, replay, profile_tuned, compare = STEPS
    _do(begun, profile)
    _do(begun, tune)
    _do(begun, replay)
    _do(begun, profile_tuned)
    _do(begun, compare)
    outcome = proof.finish()
    if outcome.verdict == "kept":
        register(store, proof.run)
    log_end(store, proof.run)
    publish_proof(proof.run, outcome)
    return outcome


def _do(begun: BegunTuning, step: Step) -> None:
    do_step(begun.proof, step)
    log_rung(begun.store, begun.proof.run, step)
    log_profile(begun.store, begun.proof, step)
    show_progress(begun.proof.run, step.number)
