"""Begin everything that takes long, side by side; imports neither Prefect nor MLflow by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from perfladder.errors import NotPossibleHereError
from perfladder.files import cache_folder
from perfladder.flows.config import ProfilePipelineConfig, TunePipelineConfig
from perfladder.ladder import Climb
from perfladder.progress import Progress
from perfladder.rundir import RunDirectory
from perfladder.rungs.cost import Ask
from perfladder.tasks.store import StoreError, TrackingStore, resolve_tracking_uri
from perfladder.tuning.prove import Proof
from perfladder.workload import Workload, WorkloadFile, load_workload

_PATIENCE_S = 10.0
"""How long someone who ends the run, by Ctrl-C say, waits for the store."""


Config = ProfilePipelineConfig | TunePipelineConfig


class BegunTuning(NamedTuple):
    """A tuning run, and the tracking store that is opening."""

    proof: Proof
    store: TrackingStore


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
    file, store = workload_file(config.workload, config.base_dir), _store(config, tell)
    ladder = Climb(
        file,
        source=_source(config, file),
        runs_dir=Path(config.runs_dir),
        until=config.until,
        tell=tell,
        ask=ask,
        step=step,
        resume=config.resume,
    )
    with closing(ladder.run), _recorded(ladder.run, store), ladder:
        yield Begun(ladder, store)


@contextmanager
def begin_tuning(
    config: TunePipelineConfig, tell: Callable[[str], None], on_progress: Callable[[Progress], None] = lambda _: None
) -> Iterator[BegunTuning]:
    """Make or find the tuning run and open the tracking store; however the block ends, the end is recorded.

    Raises:
        InputError: A wrong workload, setting or tracking URI, before anything is started.
    """
    file, store = workload_file(config.workload, config.base_dir), _store(config, tell)
    proof = Proof(
        file,
        config.settings,
        source=_source(config, file),
        runs_dir=Path(config.runs_dir),
        tell=tell,
        on_progress=on_progress,
        resume=config.resume,
        cache=cache_folder(os.environ),
    )
    with _recorded(proof.run, store), proof:
        yield BegunTuning(proof, store)


@contextmanager
def _recorded(run: RunDirectory, store: TrackingStore) -> Iterator[None]:
    """The store, open; when the block has ended, it is told how the run did."""
    with store:
        if run.record.mlflow_error is not None:
            run.update(mlflow_error=None)
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception):
                store.longest_wait_s = _PATIENCE_S
            raise
        finally:
            with suppress(StoreError, NotPossibleHereError):
                store.log_end(run)


def workload_file(workload: Workload | str, base_dir: str | None) -> WorkloadFile:
    """The workload of a config, and where its relative paths start.

    Raises:
        InputError: There is no such file, or it is wrong.
    """
    if isinstance(workload, Workload):
        return WorkloadFile(workload, Path(base_dir or ".").resolve())
    return load_workload(workload)


def _store(config: Config, tell: Callable[[str], None]) -> TrackingStore:
    runs_dir = Path(config.runs_dir)
    return TrackingStore(
        resolve_tracking_uri(config.tracking_uri, os.environ, runs_dir),
        experiment=config.experiment,
        runs_dir=runs_dir,
        max_artifact_bytes=config.max_artifact_bytes,
        tell=tell,
    )


def _source(config: Config, file: WorkloadFile) -> str:
    if config.source is not None:
        return config.source
    return config.workload if isinstance(config.workload, str) else file.workload.name
