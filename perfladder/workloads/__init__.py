"""Built-in workloads: real pipelines that need no download, and the YAML file that describes each. Imports no torch."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def builtin_names() -> list[str]:
    """The names that `builtin_path` knows, sorted."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def builtin_path(name: str) -> Path | None:
    """The packaged workload file of a built-in workload, or None when there is no such name."""
    return _FOLDER / f"{name}.yaml" if name in builtin_names() else None


def is_builtin_folder(folder: Path) -> bool:
    """Whether workload files in a folder are those of the package, where nobody saves anything."""
    return folder.resolve() == _FOLDER.resolve()
