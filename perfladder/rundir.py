"""The run directory: every rung's result lies there, complete, before anyone else hears of it.

runs/<workload>/<time>-<id>/
    run.json            what was run, how far it came, how it ended
    workload.yaml       the workload as it was understood
    environment.json    what the session found when it loaded the target
    <n>-<rung>/<rung>.json   one rung's result, with its traces and captures beside it
    report.md, report.json
    session.log         all that the target printed
"""

from __future__ import annotations

import os
import secrets
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import write_atomically
from perfladder.models import SCHEMA_VERSION, Model, newer_schema
from perfladder.workload import Workload

RunStatus = Literal["running", "done", "failed", "interrupted"]
M = TypeVar("M", bound=BaseModel)

_MIN_FREE_BYTES = 256 << 20


class RungEntry(Model):
    """One rung's place in the run."""

    name: str
    folder: str
    status: str
    reason: str | None = None


class RunRecord(Model):
    """`run.json`."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    workload_name: str
    workload_source: str
    base_dir: str
    perfladder_version: str
    process_id: int | None = None
    started_at: str
    ended_at: str | None = None
    status: RunStatus = "running"
    exit_code: int | None = None
    error: str | None = None
    rungs: list[RungEntry] = []
    stopped_because: str | None = None
    mlflow_run_id: str | None = None
    mlflow_tracking_uri: str | None = None
    mlflow_error: str | None = None
    prefect_flow_run_id: str | None = None


class RunDirectory:
    """One run's folder, written by one process."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self.record = record

    @classmethod
    def create(cls, root: Path, workload: Workload, *, source: str, base_dir: Path) -> Self:
        """Make a new run's folder below `root`, and find out now whether it can be written.

        Raises:
            NotPossibleHereError: The folder is read-only or its disk is full.
        """
        from perfladder import __version__

        now = datetime.now(UTC)
        run_id = f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        path = root.resolve() / workload.name / run_id
        record = RunRecord(
            run_id=run_id,
            workload_name=workload.name,
            workload_source=source,
            base_dir=str(base_dir),
            perfladder_version=__version__,
            process_id=os.getpid(),
            started_at=now.isoformat(),
        )
        try:
            path.mkdir(parents=True)
            free_bytes = shutil.disk_usage(path).free
            if free_bytes < _MIN_FREE_BYTES:
                raise OSError(f"only {free_bytes >> 20} MiB are free, at least {_MIN_FREE_BYTES >> 20} MiB are needed")
            write_atomically(path / "workload.yaml", yaml.safe_dump(workload.model_dump(mode="json"), sort_keys=False))
            run = cls(path, record)
            run.update()
        except OSError as error:
            raise NotPossibleHereError(
                f"The run directory {path} cannot be written: {error}. Choose another with --out."
            ) from error
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
        """Change the record, on disk first of all."""
        self.record = self.record.model_copy(update=changes)
        write_atomically(self.path / "run.json", self.record.model_dump_json(indent=1))

    def rung_folder(self, number: int, name: str) -> Path:
        """The folder of one rung, made when asked for."""
        folder = self.path / f"{number}-{name}"
        folder.mkdir(exist_ok=True)
        return folder

    def write_result(self, folder: Path, name: str, result: BaseModel, status: str, reason: str | None) -> Path:
        """Write a rung's result, then note it in the record."""
        path = folder / f"{name}.json"
        write_atomically(path, result.model_dump_json(indent=1))
        entry = RungEntry(name=name, folder=folder.name, status=status, reason=reason)
        self.update(rungs=[*(e for e in self.record.rungs if e.name != name), entry])
        return path

    def relative(self, path: str | os.PathLike[str]) -> str:
        """A path below the run, as it is written in reports."""
        return os.path.relpath(path, self.path)


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
