"""What of a run is in which MLflow store, noted in the run's `mlflow.json`; and uploading what is not.

A part (`begin`, the name of a rung or a step, `registration` of a kept archive, `end`) is noted once all of it is
there, with what it was made of then. A part that is missing, or has changed since, is uploaded as a whole; the store
then has it once, for every upload finds what is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import write_atomically
from perfladder.models import SCHEMA_VERSION, Model, digest
from perfladder.rundir import RunDirectory, RungEntry, read_model, seems_to_run
from perfladder.tuning.proof_model import OUTCOME_FILE, ProofOutcome

if TYPE_CHECKING:
    from perfladder.tasks.store import TrackingStore

FILE_NAME = "mlflow.json"
BEGIN, END, REGISTRATION = "begin", "end", "registration"
_LINKS = {
    "mlflow_run_id",
    "mlflow_tracking_uri",
    "mlflow_error",
    "mlflow_run_url",
    "mlflow_model_version",
}
"""Fields of a record that uploading itself changes."""

NOT_PART_OF_IT = frozenset({FILE_NAME, "keep", "removed.json"})
"""What perfladder keeps for itself in a run's folder, and uploads nowhere."""


class Part(Model):
    """One part of a run as it was uploaded: digest of the record, and size and time of each file."""

    uploaded_at: str
    record: str
    files: dict[str, str] = {}


class StoreUploads(Model):
    """What is in one store."""

    tracking_uri: str
    experiment: str
    mlflow_run_id: str
    parts: dict[str, Part] = {}


class Uploads(Model):
    """`mlflow.json`."""

    schema_version: int = SCHEMA_VERSION
    stores: list[StoreUploads] = []

    def to(self, uri: str, experiment: str) -> StoreUploads | None:
        """What is in that store and experiment."""
        found = (store for store in self.stores if (store.tracking_uri, store.experiment) == (uri, experiment))
        return next(found, None)


class RunSync(Model):
    """What became of one run."""

    run: str
    status: Literal["uploaded", "there_already", "running", "failed"]
    num_parts: int = 0
    mlflow_run_id: str | None = None
    detail: str = ""


class SyncResult(Model):
    """All that `perfladder sync` tells."""

    schema_version: int = SCHEMA_VERSION
    tracking_uri: str
    experiment: str
    runs: list[RunSync]

    @property
    def num_failed(self) -> int:
        """Runs of which something is missing in the store."""
        return sum(run.status == "failed" for run in self.runs)


def read_uploads(run: RunDirectory) -> Uploads:
    """The notes of a run; a damaged file counts as none, for uploading again does no harm."""
    path = run.path / FILE_NAME
    if not path.is_file():
        return Uploads()
    try:
        return read_model(path, Uploads)
    except InputError:
        return Uploads()


def part_of(run: RunDirectory, name: str) -> Part:
    """A part as it is now."""
    record = run.record
    stated: object = {"run_id": record.run_id}
    paths: Iterable[Path] = ()
    if name == END:
        stated = record.model_dump(mode="json", exclude=_LINKS)
        paths = (path for path in run.path.iterdir() if path.name != "run.json" and path.suffix != ".log")
    elif name == REGISTRATION:
        archive = kept_archive(run)
        paths = () if archive is None else (archive,)
    elif (entry := _entry(run, name)) is not None:
        stated = entry.model_dump(mode="json")
        paths = (run.path / entry.folder).rglob("*")
    files = {
        str(path.relative_to(run.path)): _stamp(path)
        for path in paths
        if not path.name.startswith(".") and path.name not in NOT_PART_OF_IT
        if path.is_file() and not path.is_symlink()
    }
    return Part(uploaded_at=datetime.now(UTC).isoformat(timespec="seconds"), record=digest(stated), files=files)


def kept_archive(run: RunDirectory) -> Path | None:
    """The archive that a tuning run keeps; None of one that keeps nothing, and of other runs."""
    path = run.path / OUTCOME_FILE
    if run.record.kind != "tuning" or not path.is_file():
        return None
    archive = read_model(path, ProofOutcome).archive
    return None if archive is None else run.path / archive


def note_part(run: RunDirectory, uri: str, experiment: str, name: str, part: Part) -> None:
    """Write down that a part is in a store."""
    uploads = read_uploads(run)
    mlflow_run_id = run.record.mlflow_run_id or ""
    store = uploads.to(uri, experiment)
    # Another id: what was noted is of a run that somebody has deleted there.
    parts = store.parts if store is not None and store.mlflow_run_id == mlflow_run_id else {}
    changed = StoreUploads(
        tracking_uri=uri, experiment=experiment, mlflow_run_id=mlflow_run_id, parts={**parts, name: part}
    )
    others = [other for other in uploads.stores if other is not store]
    text = Uploads(stores=[*others, changed]).model_dump_json(indent=1)
    write_atomically(run.path / FILE_NAME, text)


def missing_parts(run: RunDirectory, uri: str, experiment: str) -> list[str]:
    """Which parts are not in a store as they are now. Files that have been deleted here since count as there."""
    store = read_uploads(run).to(uri, experiment)
    noted = store.parts if store is not None else {}
    return [name for name in _part_names(run) if not _is_there(part_of(run, name), noted.get(name))]


def sync_runs(
    paths: Sequence[Path], store: TrackingStore, *, again: bool = False, tell: Callable[[str], None] = lambda _: None
) -> SyncResult:
    """Upload what of some runs is not in a store.

    Args:
        paths: The runs' folders.
        store: The store, not entered yet: it is opened when something is missing.
        again: Whether to upload also what is noted as there, for a store that has lost it.
        tell: Shows one line.

    Raises:
        NotPossibleHereError: Another process uploads runs of that runs folder now.
    """
    with contextlib.ExitStack() as opened:
        if paths:
            opened.enter_context(_alone(store.runs_dir))
        rows = [_sync_run(path, store, opened, again, tell) for path in paths]
    return SyncResult(tracking_uri=store.shown_uri, experiment=store.experiment, runs=rows)


def _sync_run(
    path: Path, store: TrackingStore, opened: contextlib.ExitStack, again: bool, tell: Callable[[str], None]
) -> RunSync:
    try:
        run = RunDirectory.open(path)
        if (settled := _settled(run, store, again)) is not None:
            return settled
        if not store.is_entered:
            opened.enter_context(store)
        tell(f"{run.record.workload_name}/{run.record.run_id}")
        return upload_run(run, store, again=again)
    except InputError as error:
        return RunSync(run=str(path), status="failed", detail=str(error))


@contextlib.contextmanager
def _alone(runs_dir: Path) -> Iterator[None]:
    """One upload of a runs folder at a time: two would make each run twice."""
    from filelock import FileLock, Timeout

    path = runs_dir / ".perfladder" / "sync.lock"
    lock = FileLock(path, timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise NotPossibleHereError(f"Another process uploads the runs of {runs_dir} now. Try again later.") from None
    except OSError as error:
        raise NotPossibleHereError(f"The folder {runs_dir} cannot be written: {error.strerror}.") from error
    try:
        yield
    finally:
        lock.release()


def _settled(run: RunDirectory, store: TrackingStore, again: bool) -> RunSync | None:
    """What to tell of a run that needs no upload, else None."""
    if seems_to_run(run.record):
        return RunSync(run=str(run.path), status="running", detail="It is uploaded when it has ended.")
    if again or missing_parts(run, store.shown_uri, store.experiment):
        return None
    noted = read_uploads(run).to(store.shown_uri, store.experiment)
    return RunSync(
        run=str(run.path), status="there_already", mlflow_run_id=noted.mlflow_run_id if noted is not None else None
    )


def upload_run(run: RunDirectory, store: TrackingStore, *, again: bool = False) -> RunSync:
    """Upload the parts that are missing; a store that fails is asked for no further part of this run."""
    from perfladder.tasks.store import StoreError

    names = _part_names(run) if again else missing_parts(run, store.shown_uri, store.experiment)
    failures: list[str] = []
    try:
        for name in names:
            failures += store.log_part(run, name)
    except StoreError as error:
        return RunSync(run=str(run.path), status="failed", num_parts=len(names), detail=str(error))
    if failures:
        detail = f"Not in MLflow: {'; '.join(failures)}"
        return RunSync(run=str(run.path), status="failed", num_parts=len(names), detail=detail)
    run.update(mlflow_error=None)
    return RunSync(run=str(run.path), status="uploaded", num_parts=len(names), mlflow_run_id=run.record.mlflow_run_id)


def _part_names(run: RunDirectory) -> list[str]:
    registration = [REGISTRATION] if kept_archive(run) is not None else []
    return [BEGIN, *(entry.name for entry in run.record.rungs), *registration, END]


def _entry(run: RunDirectory, name: str) -> RungEntry | None:
    return next((entry for entry in run.record.rungs if entry.name == name), None)


def _is_there(now: Part, noted: Part | None) -> bool:
    return noted is not None and now.record == noted.record and now.files.items() <= noted.files.items()


def _stamp(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"
