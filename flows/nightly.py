"""Nightly profiling: every workload of a folder is measured and judged by its history, as a Prefect flow.

A regression ends the flow run as failed, and emits an event that automations act on.
"""

# No postponed annotations: where a worker loads the flow from this file, Prefect cannot resolve the parameters' types.

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed

from perfladder.errors import NotPossibleHereError
from perfladder.flows.begin import begin
from perfladder.flows.config import ProfilePipelineConfig
from perfladder.flows.profile_pipeline import climb_begun
from perfladder.ladder import ClimbOutcome
from perfladder.nightly.config import NightlyConfig
from perfladder.nightly.model import Night, NightVerdict
from perfladder.nightly.outcome import NightlyOutcome
from perfladder.nightly.plain import measured, run_night
from perfladder.tasks.find import find_anywhere
from perfladder.tasks.nightly import keep_night, publish_night, publish_outcome, read_history_task, tell_regression
from perfladder.tasks.store import TrackingStore, resolve_tracking_uri
from perfladder.workload import WorkloadFile

__all__ = ["NightlyConfig", "nightly", "nightly_now"]

Tell = Callable[[str], None]

_OPTIONS: dict[str, Any] = {"name": "nightly", "retries": 0, "persist_result": False}


@flow(**_OPTIONS)
def nightly(config: NightlyConfig) -> State[NightlyOutcome]:
    """Profile and judge every workload, against the Prefect server of your own settings.

    The flow run fails if there is a regression, or if a workload could not be measured; its message says which.
    """
    # Settings without an address mean a server in this process, which no other worker shares.
    outcome = _watch_all(config, get_run_logger().info, is_shared=PREFECT_API_URL.value() is not None)
    return _state_of(outcome)


def nightly_now(config: NightlyConfig, tell: Tell, *, is_shared: bool) -> NightlyOutcome:
    """The same flow for the command line, with its own way to show progress.

    Args:
        config: What to do.
        tell: Shows one line.
        is_shared: Whether others use the Prefect server as well: then the device is taken there too.

    Raises:
        NotPossibleHereError: The Prefect server failed before anything was judged.
    """
    outcomes: list[NightlyOutcome] = []

    @flow(**_OPTIONS)
    def nightly(config: NightlyConfig) -> State[NightlyOutcome]:
        outcomes.append(_watch_all(config, tell, is_shared=is_shared))
        return _state_of(outcomes[0])

    try:
        state = nightly(config, return_state=True)
    except Exception as error:  # The flow's own errors are in its state; these are Prefect's.
        if not outcomes:
            raise NotPossibleHereError(f"The Prefect server failed: {error!r}. Go without one (--plain).") from error
        tell(f"The Prefect server failed, and does not know how this night ended: {error!r}.")
    if not outcomes:
        state.result()
    return outcomes[0]


class _FlowSteps:
    """The steps of a night with servers: subflows and tasks."""

    def __init__(self, config: NightlyConfig, store: TrackingStore, tell: Tell, is_shared: bool) -> None:
        self.config, self.store, self.tell, self.is_shared = config, store, tell, is_shared
        self.runs_dir = Path(config.runs_dir)

    def profile(self, file: WorkloadFile, source: str, until: str) -> ClimbOutcome:
        """Climb the ladder in a flow run of its own below this one."""
        asked = self.config
        config = ProfilePipelineConfig(
            workload=file.workload,
            base_dir=str(file.base_dir),
            source=source,
            runs_dir=str(self.runs_dir.resolve()),
            until=until,
            tracking_uri=asked.tracking_uri,
            experiment=asked.experiment,
            max_artifact_bytes=asked.max_artifact_bytes,
        )
        with begin(config, self.tell) as begun:
            begun.ladder.wait_until_loaded()
            begun.store.wait()
            return measured(climb_begun(config, begun, is_shared=self.is_shared))

    def history(self, workload: str) -> list[Night]:
        """Nights of MLflow and of the runs folder."""
        return read_history_task(self.store, self.runs_dir, workload, self.config.history_nights)

    def keep(self, night: Night, verdict: NightVerdict, page: str, second: Night | None) -> None:
        """Upload the night, publish its page, and tell of a regression."""
        keep_night(self.store, night, second)
        publish_night(self.store, night, page)
        if verdict.kind == "regression":
            tell_regression(verdict, night)


def _watch_all(config: NightlyConfig, tell: Tell, *, is_shared: bool) -> NightlyOutcome:
    """All workloads, one after the other, with one open store; then the table of the night."""
    runs_dir = Path(config.runs_dir)
    uri = resolve_tracking_uri(config.tracking_uri, os.environ, runs_dir)
    store = TrackingStore(
        uri, experiment=config.experiment, runs_dir=runs_dir, max_artifact_bytes=config.max_artifact_bytes, tell=tell
    )
    with store:
        outcome = run_night(
            config,
            _FlowSteps(config, store, tell, is_shared),
            find=lambda name: find_anywhere(name, uri, os.environ, runs_dir),
            history_from=f"{store.shown_uri} and {runs_dir.resolve()}",
        )
    publish_outcome(outcome)
    return outcome


def _state_of(outcome: NightlyOutcome) -> State[NightlyOutcome]:
    if outcome.regressions or outcome.failures:
        return Failed(message=outcome.message, data=outcome)
    return Completed(message=outcome.message, data=outcome)
