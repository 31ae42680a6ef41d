"""How much disk runs take, and the end of what is large in old ones: traces and captures.

What a run found stays: results, reports, records, logs. A run keeps everything while a file `keep` lies in it, while a
comparison or a baseline in the runs folder names it, and while it runs. Links are neither followed nor deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import Field

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import write_atomically
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.rundir import TUNINGS, RunDirectory, seems_to_run

KEEP_FILE = "keep"
REMOVED_FILE = "removed.json"
_TRACE = re.compile(r"\.trace\.json(\.gz)?$")
_RUN_ID = re.compile(rb"\d{8}T\d{6}-[0-9a-f]{6}")
_NAMING = re.compile(r"^(comparison|baseline).*\.json$")
_MANIFEST = "manifest.json"
_MAX_NAMING_BYTES = 64 << 20
_STORES = ("mlartifacts", ".perfladder")


class Rule(Model):
    """Which runs lose their traces and captures: those beyond both limits that are given."""

    keep: int | None = Field(default=None, ge=0, description="The newest of each workload that stay whole.")
    older_than_days: float | None = Field(default=None, ge=0)

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return self.keep is None and self.older_than_days is None


class RunSize(Model):
    """One run, and what becomes of its data."""

    run: str
    total_bytes: int
    data_bytes: int = Field(description="Of traces and captures.")
    decision: Literal["stays", "would_be_deleted", "deleted"]
    why: str = ""


class GcResult(Model):
    """All that `perfladder gc` tells."""

    schema_version: int = SCHEMA_VERSION
    runs_dir: str
    is_done: bool = Field(description="Whether it was more than a look.")
    runs: list[RunSize]
    other_bytes: dict[str, int] = Field(description="What else lies in the runs folder, by name.")


class Removed(Model):
    """`removed.json`: what was deleted from a run, written before anything is."""

    schema_version: int = SCHEMA_VERSION
    removed_at: str
    files: list[str]


def all_runs(runs_dir: Path) -> list[Path]:
    """The folders of all runs, those of tuning too, the oldest first; those behind links are not among them."""
    root = runs_dir.resolve()
    found = [
        path.parent
        for pattern in ("*/*/run.json", f"{TUNINGS}/*/*/run.json")
        for path in root.glob(pattern)
        if not any(part.is_symlink() for part in (path, *path.parents) if part.is_relative_to(root) and part != root)
    ]
    return sorted(found, key=lambda path: path.name)


def mark(run_dir: Path, *, is_kept: bool) -> None:
    """Protect a run from deletion, or take that back."""
    path = run_dir / KEEP_FILE
    try:
        if is_kept:
            path.touch()
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise NotPossibleHereError(f"{path} cannot be changed: {error.strerror}.") from error


def collect(runs_dir: Path, rule: Rule, *, is_wanted: bool, now: datetime | None = None) -> GcResult:
    """Look at all runs, and delete the traces and captures of those that the rule names.

    Args:
        runs_dir: The runs folder.
        rule: Which runs.
        is_wanted: Whether to delete; else nothing is changed.
        now: What ages are counted to.

    Raises:
        InputError: There is no such folder; or deletion was asked for without a rule.
        NotPossibleHereError: A file cannot be deleted.
    """
    root = runs_dir.resolve()
    if not root.is_dir():
        raise InputError(f"There is no runs folder {runs_dir}. Name it with --out.")
    if is_wanted and rule.is_empty:
        raise InputError("Nothing says which runs: give --keep N, --older-than DAYS, or both.")
    runs, named = all_runs(root), _named_runs(root)
    places = _places(runs)
    rows = [
        _look_at(path, root, _why_whole(path, rule, places[path], path.name in named, now or datetime.now(UTC)))
        for path in runs
    ]
    if is_wanted:
        rows = [_delete(path, row) if row.decision != "stays" else row for path, row in zip(runs, rows, strict=True)]
    return GcResult(runs_dir=str(root), is_done=is_wanted, runs=rows, other_bytes=_others(root, runs))


def _look_at(path: Path, root: Path, why: str) -> RunSize:
    sizes = dict(_sizes(path))
    data = _data_files(path, sizes)
    if not why and not data:
        why = "nothing to delete"
    return RunSize(
        run=str(path.relative_to(root)),
        total_bytes=sum(sizes.values()),
        data_bytes=sum(sizes[name] for name in data),
        decision="stays" if why else "would_be_deleted",
        why=why,
    )


def _why_whole(path: Path, rule: Rule, place: int, is_named: bool, now: datetime) -> str:
    """Why a run stays as it is; empty: it does not."""
    if rule.is_empty:
        return ""
    if (path / KEEP_FILE).exists():
        return "protected"
    if is_named:
        return "a comparison or a baseline names it"
    try:
        record = RunDirectory.open(path).record
    except InputError:
        return "its record cannot be read"
    if seems_to_run(record):
        return "it runs"
    if rule.keep is not None and place < rule.keep:
        return f"among the newest {rule.keep}"
    age_days = (now - datetime.fromisoformat(record.ended_at or record.started_at)).total_seconds() / 86400
    if rule.older_than_days is not None and age_days <= rule.older_than_days:
        return f"{age_days:.1f} days old"
    return ""


def _places(runs: list[Path]) -> dict[Path, int]:
    """Each run's place among those of its workload; the newest has 0."""
    counts: dict[Path, int] = {}
    places = {}
    for path in reversed(runs):
        places[path] = counts.get(path.parent, 0)
        counts[path.parent] = places[path] + 1
    return places


def _named_runs(root: Path) -> set[str]:
    """Ids of runs in the comparisons and baselines of a runs folder; a file that cannot be read stops the deletion."""
    found: set[str] = set()
    try:
        for folder, names, files in os.walk(root, onerror=_raise):
            names[:] = [name for name in names if name not in _STORES]
            for path in (Path(folder, name) for name in files if _NAMING.match(name)):
                if not path.is_symlink() and path.stat().st_size <= _MAX_NAMING_BYTES:
                    found |= {match.decode() for match in _RUN_ID.findall(path.read_bytes())}
    except OSError as error:
        raise NotPossibleHereError(
            f"{error.filename} cannot be read ({error.strerror}), and may name runs that are to stay. Nothing was "
            "deleted."
        ) from error
    return found


def _raise(error: OSError) -> NoReturn:
    raise error


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    """Every regular file below a folder, by its relative path, and its bytes."""
    for folder, _, files, descriptor in os.fwalk(path, follow_symlinks=False):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if stat.S_ISREG(found.st_mode):
                    yield os.path.relpath(os.path.join(folder, name), path), found.st_size


def _data_files(path: Path, sizes: dict[str, int]) -> list[str]:
    """Traces, and all that a capture saved; what a capture's result says stays. A capture's manifest comes first.

    Without its manifest a folder is no capture, so that one that is deleted in part is never taken for a whole one.
    """
    found = []
    for name in sizes:
        folder, _, file = name.rpartition("/")
        rung = folder.partition("/")[0]
        is_captured = rung.endswith("-capture") and name != f"{rung}/capture.json"
        if folder and (is_captured or _TRACE.search(file)):
            found.append(name)
    return sorted(found, key=lambda name: (os.path.basename(name) != _MANIFEST, name))


def _delete(path: Path, row: RunSize) -> RunSize:
    """Note what goes, then delete it; interrupted, the run is valid, and the next call deletes the rest."""
    sizes = dict(_sizes(path))
    names = _data_files(path, sizes)
    try:
        _note_removed(path, names)
        for name in names:
            _unlink_below(path, name)
    except OSError as error:
        raise NotPossibleHereError(
            f"{error.filename or path} cannot be deleted: {error.strerror}. What was deleted before is gone; "
            "all results are there."
        ) from error
    return row.model_copy(update={"decision": "deleted"})


def _note_removed(path: Path, names: list[str]) -> None:
    earlier: list[str] = []
    with contextlib.suppress(OSError, ValueError):
        earlier = Removed.model_validate_json((path / REMOVED_FILE).read_bytes()).files
    removed = Removed(removed_at=datetime.now(UTC).isoformat(timespec="seconds"), files=sorted({*earlier, *names}))
    write_atomically(path / REMOVED_FILE, removed.model_dump_json(indent=1))


def _unlink_below(root: Path, name: str) -> None:
    """Delete one file, entering no folder that has become a link."""
    *folders, file = name.split("/")
    with contextlib.ExitStack() as opened:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        opened.callback(os.close, descriptor)
        for folder in folders:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            opened.callback(os.close, descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file, dir_fd=descriptor)


def _others(root: Path, runs: list[Path]) -> dict[str, int]:
    """What lies in a runs folder besides runs: stores of MLflow and Prefect, comparisons."""
    of_runs = {path.relative_to(root).parts[0] for path in runs}
    found = {}
    for path in sorted(root.iterdir()):
        if path.is_symlink() or path.name in of_runs:
            continue
        found[path.name] = path.stat().st_size if path.is_file() else sum(size for _, size in _sizes(path))
    return found
