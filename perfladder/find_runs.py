"""Find run directories by what a user calls them: a folder, an id, `latest`, a workload's name, a commit."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from perfladder.errors import InputError

_logger = logging.getLogger("perfladder.find_runs")

_COMMIT = re.compile(r"[0-9a-f]{4,40}")


def find_runs(name: str, runs_dir: Path) -> list[Path]:
    """Find several runs, their names separated by commas, or one.

    Raises:
        InputError: As `find_run`.
    """
    if "," not in name or (Path(name) / "run.json").is_file():
        return [find_run(name, runs_dir)]
    return [find_run(part.strip(), runs_dir) for part in name.split(",") if part.strip()]


def find_run(name: str, runs_dir: Path, *, workload_name: str = "*", needs_results: bool = True) -> Path:
    """Find a run by its folder or its id, or the newest of a workload, of a commit (its beginning), or of all.

    Args:
        name: Which one.
        runs_dir: Where run directories are.
        workload_name: Look among the runs of this workload only.
        needs_results: Of several, take the newest in which a rung was finished, and tell of newer ones in the log; if
            none was finished in any, the newest of all.

    Raises:
        InputError: There is none.
    """
    if (Path(name) / "run.json").is_file():
        return Path(name)
    runs = [
        path.parent for path in sorted(runs_dir.glob(f"{workload_name}/*/run.json"), key=lambda path: path.parent.name)
    ]
    matching = runs if name == "latest" else [path for path in runs if path.name == name]
    matching = matching or [path for path in runs if path.parent.name == name]
    if not matching and _COMMIT.fullmatch(name):
        matching = [path for path in runs if (_commit_of(path) or "").startswith(name)]
    if matching:
        return _newest_with_results(matching) if needs_results else matching[-1]
    where = runs_dir if workload_name == "*" else runs_dir / workload_name
    known = ", ".join(f"{path}" for path in runs[-3:]) or f"none below {where}"
    if Path(name).is_dir():
        raise InputError(f"The folder {name} is no run: it has no run.json. Newest runs: {known}.")
    raise InputError(
        f"There is no run {name!r}. Give its folder, its id, 'latest', a workload's name or a commit. "
        f"Newest runs: {known}."
    )


def _newest_with_results(runs: Sequence[Path]) -> Path:
    """The last of these runs in which a rung was finished, or the last of all."""
    newest = runs[-1]
    found = next((run for run in reversed(runs) if _has_results(run)), newest)
    if found != newest:
        _logger.warning(
            "The newest run, %s, has no finished rung, so %s is taken; `perfladder report %s` tells why.",
            newest.name,
            found.name,
            newest,
        )
    return found


def _has_results(run: Path) -> bool:
    try:
        return any(rung["status"] == "done" for rung in json.loads((run / "run.json").read_bytes())["rungs"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _commit_of(run: Path) -> str | None:
    """The commit of a run's workload; None for one that never loaded, or outside a repository."""
    try:
        commit = json.loads((run / "environment.json").read_bytes())["git"]["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return commit if isinstance(commit, str) else None
