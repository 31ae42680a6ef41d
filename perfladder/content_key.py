"""What a rung's result rests on. A resumed run takes a result over only where all of that is still the same."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from perfladder.checksums import Checksums
from perfladder.models import SCHEMA_VERSION, Model, digest
from perfladder.tuning.archive_names import archive_places
from perfladder.workload import Workload

_NOT_MEASURED = {"timeout_s", "budget"}
"""Fields of a workload that decide whether something is measured, and change no number."""

_GENERATED = ("torch", "triton")
"""Packages that load code which they have just generated, from files that nobody writes by hand."""

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".npz", ".npy", ".h5", ".msgpack"}
_BESIDE_WEIGHTS = {".json", ".yaml", ".yml", ".txt", ".model"}
_MAX_FILES = 10_000

_SEEN: dict[str, str] = {}
"""Sums of this process's source files, each as it was when it was first seen: later changes were not loaded."""


class ContentKey(Model):
    """Everything that a result of one rung depends on, in clear, so that a difference can be named."""

    schema_version: int = SCHEMA_VERSION
    perfladder_version: str
    workload: dict[str, JsonValue]
    environment: dict[str, JsonValue]
    configuration: dict[str, JsonValue]
    files: dict[str, str]

    @property
    def digest(self) -> str:
        """16 hexadecimal digits over everything here."""
        return digest(self.model_dump(mode="json"))

    def difference(self, now: ContentKey) -> str | None:
        """The first field or file in which the key differs from what it would be now; None where it does not."""
        if self.perfladder_version != now.perfladder_version:
            return f"perfladder is {now.perfladder_version} now, and was {self.perfladder_version}"
        for part in ("workload", "environment", "configuration"):
            if found := _differing(part, getattr(self, part), getattr(now, part)):
                return found
        for path in sorted({*self.files, *now.files}):
            if self.files.get(path) != now.files.get(path):
                return f"the file {path} {_how_it_differs(self.files.get(path), now.files.get(path))}"
        return None


class SourcesRequest(Model):
    """List the source files that this process has loaded."""


class Sources(Model):
    """Source files by path, with their SHA-256."""

    files: dict[str, str]

    @classmethod
    def of_ranks(cls, found: Sequence[Sources]) -> Sources:
        """Those of all ranks."""
        return cls(files={path: sha256 for one in found for path, sha256 in one.files.items()})


def list_sources(loaded: Any, request: SourcesRequest) -> Sources:
    """The Python files and extensions outside site-packages and the standard library that are loaded here."""
    for path in _loaded_files():
        if path not in _SEEN and (sha256 := Checksums().of(Path(path))) is not None:
            _SEEN[path] = sha256
    return Sources(files=dict(_SEEN))


def measured_fields(workload: Workload) -> dict[str, JsonValue]:
    """The workload without what changes no number."""
    return workload.model_dump(mode="json", exclude=_NOT_MEASURED)


def sums_now(paths: Sequence[str], sums: Checksums) -> dict[str, str]:
    """SHA-256 of the files as they are on disk; one that is gone is left out."""
    return {path: sha256 for path in paths if (sha256 := sums.of(Path(path))) is not None}


def weight_files(workload: Workload, base_dir: Path) -> list[str]:
    """Local files that the workload names: arguments of its factory, its model, its archive; of a folder, those in it.

    A folder is searched for weights and what lies beside them (configurations, vocabularies). One that holds very many
    files is no model, and is left out.
    """
    found: set[str] = set()
    archives = [] if workload.tuned is None else archive_places(workload.tuned.archive, field_name="tuned.archive")
    for text in _texts([workload.target_args, workload.model, [str(path) for path in archives]]):
        for folder in (base_dir, Path.cwd()):
            path = folder / text
            if _is_file(path):
                found.add(str(path.resolve()))
            elif _is_folder(path) and path.resolve() not in (base_dir.resolve(), Path.cwd()):
                found |= _weights_below(path.resolve())
    return sorted(found)


def _weights_below(folder: Path) -> set[str]:
    paths: list[str] = []
    for place, _, names in os.walk(folder):
        paths += [os.path.join(place, name) for name in names]
        if len(paths) > _MAX_FILES:
            return set()
    suffixes = _WEIGHTS | _BESIDE_WEIGHTS
    return {path for path in paths if os.path.splitext(path)[1].lower() in suffixes}


def _texts(value: object) -> Iterator[str]:
    """Every text in a JSON value that can be a path."""
    if isinstance(value, str):
        if value.strip() and "\0" not in value and len(value) < os.pathconf("/", "PC_PATH_MAX"):
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _loaded_files() -> Iterator[str]:
    libraries = [sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or name.partition(".")[0] in _GENERATED:
            continue
        path = os.path.abspath(path)
        if not path.startswith(tuple(libraries)) and not {"site-packages", "dist-packages"} & set(path.split(os.sep)):
            yield path


def _differing(where: str, before: object, now: object) -> str | None:
    if before == now:
        return None
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                return _differing(f"{where}.{name}", before.get(name), now.get(name))
    return f"{where} is {_short(now)} now, and was {_short(before)}"


def _how_it_differs(before: str | None, now: str | None) -> str:
    if now is None:
        return "is gone, or cannot be read"
    return "was not loaded then" if before is None else "has changed"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False
