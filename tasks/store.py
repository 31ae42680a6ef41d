"""The MLflow store of a run: opened once under a lock, written by one thread, and never waited for without limit."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import urlsplit

from perfladder.errors import InputError
from perfladder.rundir import RunDirectory
from perfladder.tasks.running import running_address
from perfladder.tasks.uploads import BEGIN, END, REGISTRATION, Part, kept_archive, note_part, part_of
from perfladder.tasks.variables import variables_set

if TYPE_CHECKING:
    from mlflow import MlflowClient

T = TypeVar("T")

_VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Stdout may be for one JSON document.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # With MLflow's own values, one call to a server that is down takes four minutes; with these, three seconds.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
}
_OPEN_LIMIT_S = {"http": 30.0, "https": 30.0}
_OPEN_LIMIT_OTHERS_S = 120.0
"""A database may have to be created first, and may wait for another process that creates it."""

_CALL_LIMIT_S = 60.0
_SLOW_BYTES_PER_S = 5e6
"""An archive may need so much longer than other uploads."""

_RECONNECT_PAUSES_S = (0.5, 1.5)
_MAX_FAILURES = 2
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SERVERS = ("http", "https", "databricks", "uc")


class StoreError(Exception):
    """The tracking store cannot be reached, refuses, or did not answer in time."""


class Named(Protocol):
    """A rung, or a step of a tuning run."""

    @property
    def name(self) -> str:
        """By which the run's record has it."""


class Target(NamedTuple):
    """An open store: its client, and the experiment that runs go to."""

    client: MlflowClient
    experiment_id: str


def resolve_tracking_uri(asked: str | None, variables: Mapping[str, str], runs_dir: Path) -> str:
    """The store to use: what was asked for, else MLFLOW_TRACKING_URI, else the server that is up, else SQLite.

    The SQLite store lies in the runs folder.

    Raises:
        InputError: A file store, which MLflow does not write any more, or no known kind.
    """
    uri = asked or variables.get("MLFLOW_TRACKING_URI", "").strip()
    path = str(runs_dir.resolve() / "mlflow.db").replace("%", "%25").replace("?", "%3F")
    default = f"sqlite:///{path}"
    if not uri:
        running = running_address("mlflow", variables)
        return running.url if running is not None else default
    scheme = re.split(r"[:+]", uri, maxsplit=1)[0].lower() if ":" in uri or uri == "databricks" else ""
    if scheme in ("", "file"):
        raise InputError(
            f"The tracking URI {uri!r} names a file store, which MLflow has retired. Use a database such as {default}, "
            "or the address of an MLflow server."
        )
    if scheme not in _DATABASES + _SERVERS:
        known = ", ".join(f"{name}:" for name in _DATABASES + _SERVERS)
        raise InputError(f"The tracking URI {masked(uri)!r} is of no known kind; accepted: {known}")
    return uri


def masked(uri: str) -> str:
    """An address without its password."""
    return re.sub(r"(//[^/@:]*):[^/@]*@", r"\1:***@", uri)


class TrackingStore:
    """A store that opens while other things start; a context manager.

    All calls are made by one daemon thread, so that a store that hangs costs no more than the limit of one call. A
    store that has failed twice in a row, or hangs, is left alone from then on; the run directory has everything.

    Args:
        uri: Where it is; see `resolve_tracking_uri`.
        experiment: Name of the experiment, made when there is none.
        runs_dir: Where a database's artifacts go when it is not a SQLite file, and where locks lie.
        max_artifact_bytes: Larger files are not uploaded.
        tell: Shows one line.
        call_limit_s: The longest wait for one upload.
    """

    def __init__(
        self,
        uri: str,
        *,
        experiment: str,
        runs_dir: Path,
        max_artifact_bytes: int = 256 << 20,
        tell: Callable[[str], None] = lambda _: None,
        call_limit_s: float = _CALL_LIMIT_S,
    ) -> None:
        self.uri, self.experiment, self.tell = uri, experiment, tell
        self.max_artifact_bytes = max_artifact_bytes
        self.call_limit_s = call_limit_s
        self.problem: str | None = None
        self.longest_wait_s = math.inf
        self.runs_dir = runs_dir.resolve()
        self.is_entered = False
        self._failures = 0
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._variables = contextlib.ExitStack()

    @property
    def shown_uri(self) -> str:
        """Where it is, without a password."""
        return masked(self.uri)

    def __enter__(self) -> Self:
        self.is_entered = True
        self._variables.enter_context(variables_set({n: v for n, v in _VARIABLES.items() if n not in os.environ}))
        threading.Thread(target=self._work, name="mlflow", daemon=True).start()
        self._opening: Future[Target] = self._submit(self._open)
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.put(None)
        self._variables.close()

    def wait(self) -> None:
        """Wait until the store is open; when it cannot be opened, say so and go on without it."""
        with contextlib.suppress(StoreError):
            self._target()

    def ask(self, function: Callable[[Target], T]) -> T:
        """Run a function of the open store in its thread, and wait for what it gives.

        Raises:
            StoreError: The store could not be opened, it failed, or it did not answer in time.
        """
        target = self._target()
        return self._result(self._submit(lambda: function(target)), self.call_limit_s)

    def log_begin(self, run: RunDirectory) -> None:
        """Make the run's parent run; a failure is a warning."""
        with contextlib.suppress(StoreError):
            self.begin(run)

    def begin(self, run: RunDirectory) -> None:
        """Make the run's parent run, or find it; once for each run.

        Raises:
            StoreError: It is not in the store.
        """
        if run.record.run_id in self._begun:
            return
        part = part_of(run, BEGIN)
        run.update(mlflow_tracking_uri=self.shown_uri)
        run_id = self._call(run, "log_begin")
        run.update(mlflow_run_id=run_id, mlflow_run_url=self.page_of(run_id))
        self._begun.add(run.record.run_id)
        self._note_part(run, BEGIN, part)

    def log_part(self, run: RunDirectory, name: str) -> list[str]:
        """Upload one part of a run, by its name; returns what could not be uploaded.

        Raises:
            StoreError: It is not in the store.
        """
        self.begin(run)
        if name == BEGIN:
            return []
        if name == END:
            return self.log_end(run)
        return self.register(run) if name == REGISTRATION else self._log(run, name, "log_rung", name)

    def log_rung(self, run: RunDirectory, rung: Named) -> list[str]:
        """Upload one rung, or one step of a tuning run; returns what could not be uploaded.

        Raises:
            StoreError: It is not in the store.
        """
        return self.log_part(run, rung.name)

    def register(self, run: RunDirectory) -> list[str]:
        """Upload the archive that a tuning run keeps, and make it a version of a registered model; once for each run.

        Raises:
            StoreError: It is not in the store.
        """
        self.begin(run)
        archive = kept_archive(run)
        if archive is None:
            return []
        num_bytes = archive.stat().st_size if archive.is_file() else 0
        before, self.call_limit_s = self.call_limit_s, self.call_limit_s + num_bytes / _SLOW_BYTES_PER_S
        try:
            failures = self._log(run, REGISTRATION, "log_registration")
        finally:
            self.call_limit_s = before
        if not failures:
            version: str = self._call(run, "model_version")
            run.update(mlflow_model_version=version)
        return failures

    def page_of(self, run_id: str) -> str | None:
        """The page of an MLflow run; None where the store is a database, which has no pages.

        Raises:
            StoreError: The store could not be opened.
        """
        parts = urlsplit(self.uri)
        if parts.scheme not in ("http", "https"):
            return None
        host = parts.netloc.rpartition("@")[2]
        root = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
        return f"{root}/#/experiments/{self._target().experiment_id}/runs/{run_id}"

    def log_end(self, run: RunDirectory) -> list[str]:
        """Upload how the run ended, and its report; once for each run.

        Raises:
            StoreError: It is not in the store.
        """
        if run.record.run_id in self._ended:
            return []
        self.begin(run)
        failures = self._log(run, END, "log_end")
        self._ended.add(run.record.run_id)
        return failures

    def _log(self, run: RunDirectory, part_name: str, name: str, *arguments: object) -> list[str]:
        part = part_of(run, part_name)
        failures: list[str] = self._call(run, name, *arguments)
        if failures:
            self._note(run, f"Not in MLflow: {'; '.join(failures)}")
        else:
            self._note_part(run, part_name, part)
        return failures

    def _note_part(self, run: RunDirectory, name: str, part: Part) -> None:
        # Not noted, it is uploaded once more than needed.
        with contextlib.suppress(OSError):
            note_part(run, self.shown_uri, self.experiment, name, part)

    def _call(self, run: RunDirectory, name: str, *arguments: object) -> Any:
        """Run one function of `perfladder.tasks.tracking` in the store's thread."""
        try:
            target = self._target()
            function = getattr(importlib.import_module("perfladder.tasks.tracking"), name)
            future = self._submit(lambda: function(target, run, *arguments, max_artifact_bytes=self.max_artifact_bytes))
            result = self._result(future, self.call_limit_s)
        except StoreError as error:
            self._note(run, str(error))
            raise
        return result

    def _note(self, run: RunDirectory, what: str) -> None:
        if run.record.mlflow_error != what:
            self.tell(f"{what} Everything is in {run.path}; `perfladder sync` uploads what is missing.")
            run.update(mlflow_error=what)

    def _target(self) -> Target:
        if self.problem is not None:
            raise StoreError(self.problem)
        return self._result(self._opening, _OPEN_LIMIT_S.get(urlsplit(self.uri).scheme, _OPEN_LIMIT_OTHERS_S))

    def _result(self, future: Future[T], limit_s: float) -> T:
        wait([future], min(limit_s, self.longest_wait_s))
        if not future.done():
            self.problem = f"MLflow ({self.shown_uri}) gave no answer within {min(limit_s, self.longest_wait_s):g} s."
            raise StoreError(self.problem)
        error = future.exception()
        if error is None:
            self._failures = 0
            return future.result()
        self._failures += 1
        reason = next(iter(str(error).strip().splitlines()), "")[:300]
        message = f"MLflow ({self.shown_uri}) failed: {type(error).__name__}: {masked(reason)}."
        if self._failures >= _MAX_FAILURES or future is self._opening:
            self.problem = message
        raise StoreError(message) from error

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((function, future))
        return future

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            function, future = call
            try:
                future.set_result(function())
            except BaseException as error:  # Whatever a store's drivers raise, the measurement goes on.
                future.set_exception(error)

    def _open(self) -> Target:
        """Import MLflow and open the store. Of processes that open a new SQLite store at once, most would fail."""
        from mlflow import MlflowClient

        self._reach_database()
        with self._creation_lock():
            client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            found = client.get_experiment_by_name(self.experiment)
            if found is not None:
                return Target(client, found.experiment_id)
            return Target(
                client, client.create_experiment(self.experiment, artifact_location=self._artifact_location())
            )

    def _reach_database(self) -> None:
        """Connect to a database server: one that refuses MLflow itself would try for 100 seconds."""
        kind = urlsplit(self.uri).scheme.partition("+")[0]
        if kind not in _DATABASES or kind == "sqlite":
            return
        from sqlalchemy import create_engine
        from sqlalchemy.exc import OperationalError
        from sqlalchemy.pool import NullPool

        engine = create_engine(self.uri, poolclass=NullPool)
        for pause_s in (*_RECONNECT_PAUSES_S, None):  # it may be just starting
            try:
                with engine.connect():
                    return
            except OperationalError:
                if pause_s is None:
                    raise
                time.sleep(pause_s)

    def _creation_lock(self) -> contextlib.AbstractContextManager[object]:
        from filelock import FileLock

        if urlsplit(self.uri).scheme in _SERVERS:
            return contextlib.nullcontext()
        name = hashlib.sha256(self.uri.encode()).hexdigest()[:16]
        file = self._sqlite_file()
        path = file.with_name(f"{file.name}.lock") if file else self.runs_dir / ".perfladder" / f"mlflow-{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(path, timeout=_OPEN_LIMIT_OTHERS_S)

    def _sqlite_file(self) -> Path | None:
        from sqlalchemy import make_url

        if not self.uri.startswith("sqlite"):
            return None
        database = make_url(self.uri).database
        return Path(database).resolve() if database else None

    def _artifact_location(self) -> str | None:
        """Beside the SQLite file, or in the runs folder; a server decides for itself."""
        if urlsplit(self.uri).scheme in _SERVERS:
            return None
        file = self._sqlite_file()
        return ((file.parent if file else self.runs_dir) / "mlartifacts").as_uri()
