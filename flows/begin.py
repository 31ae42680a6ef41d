"""Begin everything that takes long, side by side; imports neither Prefect nor MLflow by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from perfladder.errors import NotPossibleHereError
from perfladder.flows.config import ProfilePipelineConfig
from perfladder.ladder import Climb
from perfladder.rungs.cost import Ask
from perfladder.tasks.store import StoreError, TrackingStore, resolve_tracking_uri
from perfladder.workload import Workload, WorkloadFile, load_workload

_PATIENCE_S = 10.0
"""How long someone who ends the run, by Ctrl-C say, waits for the store."""


class Begun(NamedTuple):
    """A ladder whose target is loading, and the tracking store that is opening."""

    ladder: Climb
    store: TrackingStore


@contextmanager
def begin(
    config: ProfilePipelineConfig, tell: Callable[[str], None], *, ask: Ask | None = None, step: bool = False
) -> Iterator[Begun]:
    """Start the children and open the tracking store; however the block ends, the end is recorded and nothing is left.

    Raises:
        InputError: A wrong workload or tracking URI, before anything is started.
    """
    file = _workload_file(config)
    runs_dir = Path(config.runs_dir)
    store = TrackingStore(
        resolve_tracking_uri(config.tracking_uri, os.environ, runs_dir),
        experiment=config.experiment,
        runs_dir=runs_dir,
        max_artifact_bytes=config.max_artifact_bytes,
        tell=tell,
    )
    source = config.source
    if source is None:
        source = config.workload if isinstance(config.workload, str) else file.workload.name
    ladder = Climb(
        file,
        source=source,
        runs_dir=runs_dir,
        until=config.until,
        tell=tell,
        ask=ask,
        step=step,
        resume=config.resume,
    )
    with closing(ladder.run), store:
        if ladder.run.record.mlflow_error is not None:
            ladder.run.update(mlflow_error=None)
        try:
            with ladder:
                yield Begun(ladder, store)
        except BaseException as error:
            if not isinstance(error, Exception):
                store.longest_wait_s = _PATIENCE_S
            raise
        finally:
            with suppress(StoreError, NotPossibleHereError):
                store.log_end(ladder.run)


def _workload_file(config: ProfilePipelineConfig) -> WorkloadFile:
    if isinstance(config.workload, Workload):
        return WorkloadFile(config.workload, Path(config.base_dir or ".").resolve())
    return load_workload(config.workload)
