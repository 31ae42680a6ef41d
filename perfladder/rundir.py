"""The run directory: every rung's result lies there, complete, before anyone else hears of it.

runs/<workload>/<time>-<id>/
    run.json            what was run, how far it came, how it ended
    workload.yaml       the workload as it was understood
    environment.json    what the session found when it loaded the target
    <n>-<rung>/<rung>.json   one rung's result, with its traces and captures beside it
    <n>-<rung>/key.json      what that result rests on
    report.html, report.md, report.json
    session.log         all that the target printed
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from perfladder.content_key import ContentKey
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import flush_to_disk, write_atomically
from perfladder.models import SCHEMA_VERSION, Model, newer_schema
from perfladder.workload import Workload

RunStatus = Literal["running", "done", "failed", "interrupted"]
RunKind = Literal["profile", "tuning"]
M = TypeVar("M", bound=BaseModel)

_MIN_FREE_BYTES = 256 << 20
KEY_FILE = "key.json"
SETTINGS_FILE = "settings.json"
"""In a tuning run: what it was asked for, besides the workload."""
TUNINGS = "tunings"
"""Folder of tuning runs in a runs folder, where nothing takes them for profiles."""


class RungEntry(Model):
    """One rung's place in the run."""

    name: str
    folder: str
    status: str
    reason: str | None = None
    content_key: str | None = Field(default=None, description="Digest of what the result rests on.")


class RunRecord(Model):
    """`run.json`."""

    schema_version: int = SCHEMA_VERSION
    kind: RunKind = "profile"
    run_id: str
    workload_name: str
    workload_source: str
    base_dir: str
    perfladder_version: str
    process_id: int | None = None
    started_at: str
    resumed_at: list[str] = []
    ended_at: str | None = None
    status: RunStatus = "running"
    exit_code: int | None = None
    error: str | None = None
    rungs: list[RungEntry] = []
    stopped_because: str | None = None
    mlflow_run_id: str | None = None
    mlflow_tracking_uri: str | None = None
    mlflow_error: str | None = None
    mlflow_run_url: str | None = Field(default=None, description="Its page; None: the store has none.")
    mlflow_model_version: str | None = Field(default=None, description="Name and version of a kept archive there.")
    prefect_flow_run_id: str | None = None
    prefect_flow_run_url: str | None = Field(default=None, description="Its page; None: the server ends with the run.")
    profile_runs: dict[str, str] = Field(default={}, description="Of a tuning run: the run of each step that profiles.")

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to measure: it came to its end, and no rung failed."""
        return self.status == "done" and not any(entry.status == "failed" for entry in self.rungs)


class RunDirectory:
    """One run's folder, written by one process."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.record = record
        self._release: weakref.finalize[..., RunDirectory] | None = None

    @classmethod
    def create(cls, root: Path, workload: Workload, *, source: str, base_dir: Path, kind: RunKind = "profile") -> Self:
        """Make a new run's folder below `root`, and find out now whether it can be written.

        Args:
            root: The runs folder.
            workload: What is run.
            source: What the user named it by; empty where no name loads it again, as for a script: then the run's own
                copy does.
            base_dir: Where its relative paths start.

        Raises:
            NotPossibleHereError: The folder is read-only or its disk is full.
        """
        from perfladder import __version__

        now = datetime.now(UTC)
        run_id = f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        path = root.resolve() / workload.name / run_id
        record = RunRecord(
            kind=kind,
            run_id=run_id,
            workload_name=workload.name,
            workload_source=source or str(path / "workload.yaml"),
            base_dir=str(base_dir),
            perfladder_version=__version__,
            process_id=os.getpid(),
            started_at=now.isoformat(),
        )
        run = cls(path, record)
        with _writing(path, "Choose another with --out."):
            path.mkdir(parents=True)
            run._hold()
            run._begin(workload)
        return run

    @classmethod
    def resume(cls, path: Path, workload: Workload, *, kind: RunKind = "profile") -> Self:
        """Open an unfinished run to go on with it, and find out now whether it can be written.

        Raises:
            InputError: It is finished, another process is writing it, or it is of another workload.
            NotPossibleHereError: The folder is read-only or its disk is full.
        """
        run = cls.open(path.resolve())
        if run.record.kind != kind:
            verb = {"profile": "perfladder run", "tuning": "perfladder tune --prove"}[run.record.kind]
            raise InputError(f"--resume: {path} was made by {verb}; go on with it by the same command.")
        if run.record.workload_name != workload.name:
            raise InputError(
                f"--resume: run {run.record.run_id} is of the workload {run.record.workload_name!r}, and "
                f"{workload.name!r} was given. Give the workload that the run was started with."
            )
        run._hold()
        run.record = cls.open(run.path).record
        if run.record.is_finished:
            run.close()
            raise InputError(
                f"--resume: run {run.record.run_id} is finished, and there is nothing to go on with. Leave --resume "
                f"out to measure anew, or show it with: perfladder report {run.path}"
            )
        from perfladder import __version__

        hint = (
            f"Make room, or make it writable, then give the same command once more. {run.path} has all that was kept."
        )
        try:
            with _writing(run.path, hint):
                run.record = run.record.model_copy(
                    update={
                        "status": "running",
                        "perfladder_version": __version__,
                        "process_id": os.getpid(),
                        "resumed_at": [*run.record.resumed_at, datetime.now(UTC).isoformat(timespec="milliseconds")],
                        "ended_at": None,
                        "exit_code": None,
                        "error": None,
                        "stopped_because": None,
                    }
                )
                for part in run.path.glob(".*.part"):
                    part.unlink()
                run._begin(workload)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a finished or unfinished run to read it.

        Raises:
            InputError: There is no run, or it is from a newer perfladder.
        """
        if not (path / "run.json").is_file():
            raise InputError(f"{path} is no run: it has no run.json. A run's folder is runs/<workload>/<time>-<id>.")
        return cls(path, read_model(path / "run.json", RunRecord))

    def update(self, **changes: object) -> None:
        """Change the record, on disk first of all.

        Raises:
            NotPossibleHereError: It cannot be written; what is on disk stays as it was.
        """
        record = self.record.model_copy(update=changes)
        with self.writing():
            write_atomically(self.path / "run.json", record.model_dump_json(indent=1))
        self.record = record

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a full or read-only disk into one message that says how to go on."""
        hint = f"What was finished is kept. Make room, then go on with it: --resume {self.record.run_id}"
        with _writing(self.path, hint):
            yield

    def close(self) -> None:
        """Let other processes go on with the run; the kernel does so for one that dies."""
        if self._release is not None:
            self._release()
            self._release = None

    def rung_folder(self, number: int, name: str) -> Path:
        """The folder of one rung, made when asked for."""
        folder = self.path / f"{number}-{name}"
        folder.mkdir(exist_ok=True)
        return folder

    def write_result(
        self,
        folder: Path,
        name: str,
        result: BaseModel,
        status: str,
        reason: str | None,
        key: ContentKey | None = None,
    ) -> Path:
        """Write a rung's result after all that lies beside it, then note it in the record.

        Args:
            folder: The rung's.
            name: The rung.
            result: What it saw.
            status: How it ended.
            reason: Why, if it is not done.
            key: What the result rests on; without one it is never taken over.
        """
        path = folder / f"{name}.json"
        with self.writing():
            for beside in folder.rglob("*"):
                if beside.is_dir() or (beside.is_file() and not beside.is_symlink()):
                    flush_to_disk(beside)
            if key is not None:
                write_atomically(folder / KEY_FILE, key.model_dump_json(indent=1))
            write_atomically(path, result.model_dump_json(indent=1))
        entry = RungEntry(
            name=name,
            folder=folder.name,
            status=status,
            reason=reason,
            content_key=key.digest if key is not None else None,
        )
        before = self.record.rungs
        is_new = name not in [e.name for e in before]
        self.update(rungs=[*before, entry] if is_new else [entry if e.name == name else e for e in before])
        return path

    def forget_result(self, name: str) -> None:
        """Take a rung out of the record, and then all its files away, finished or not."""
        entries = [entry for entry in self.record.rungs if entry.name != name]
        if len(entries) < len(self.record.rungs):
            self.update(rungs=entries)
        with self.writing():
            for folder in self.path.glob(f"*-{name}"):
                shutil.rmtree(folder)

    def _begin(self, workload: Workload) -> None:
        free_bytes = shutil.disk_usage(self.path).free
        if free_bytes < _MIN_FREE_BYTES:
            raise OSError(f"only {free_bytes >> 20} MiB are free, at least {_MIN_FREE_BYTES >> 20} MiB are needed")
        text = yaml.safe_dump(workload.model_dump(mode="json"), sort_keys=False)
        write_atomically(self.path / "workload.yaml", text)
        write_atomically(self.path / "run.json", self.record.model_dump_json(indent=1))

    def _hold(self) -> None:
        """Be the one process that writes here, by a lock on the folder itself, which leaves no file behind.

        Raises:
            InputError: Another process is that.
        """
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        self._release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise InputError(
                f"--resume: run {self.record.run_id} is still being written, by process {self.record.process_id}. "
                "Wait for its end, or end it first."
            ) from None
        except OSError:  # Some network file systems lock no folders; there, nobody else is noticed.
            return

    def relative(self, path: str | os.PathLike[str]) -> str:
        """A path below the run, as it is written in reports."""
        return os.path.relpath(path, self.path)


@contextlib.contextmanager
def _writing(path: Path, hint: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise NotPossibleHereError(f"The run directory {path} cannot be written: {error}. {hint}") from error


def seems_to_run(record: RunRecord) -> bool:
    """Whether a run has not ended, and the process that writes it lives; its number may be another's by now."""
    return record.status == "running" and os.path.exists(f"/proc/{record.process_id}")


def read_model(path: Path, kind: type[M]) -> M:
    """Read a file of ours.

    Raises:
        InputError: It is missing, damaged, or from a newer schema.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    if (version := newer_schema(text)) is not None:
        raise InputError(
            f"{path} has schema version {version}: a newer perfladder wrote it, and this one reads up to "
            f"{SCHEMA_VERSION}. Update perfladder to read it."
        )
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(f"{path} is damaged: {where + ': ' if where else ''}{first['msg']}.") from error
