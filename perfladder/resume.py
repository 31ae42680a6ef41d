"""Going on with an unfinished run: which of its results still hold, and why the others are measured again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from pydantic import JsonValue

from perfladder import __version__
from perfladder.checksums import Checksums
from perfladder.content_key import ContentKey, measured_fields, sums_now, weight_files
from perfladder.environment import Environment
from perfladder.errors import InputError
from perfladder.rundir import KEY_FILE, RunDirectory, RungEntry, read_model
from perfladder.rungs.base import RungResult
from perfladder.text import clause
from perfladder.workload import WorkloadFile

_KEPT_STATUSES = ("done", "not_applicable")
"""What is failed is measured again, and what was skipped is decided again."""

_TOLD_BYTES = 1 << 30


class Kind(Protocol):
    """What is asked of a rung of the ladder here."""

    @property
    def name(self) -> str:
        """The rung."""

    @property
    def result_type(self) -> type[RungResult]:
        """The class of its result."""


class Holding(NamedTuple):
    """Results that still hold, and why the first one that does not has to be measured again; None if all hold."""

    results: dict[str, RungResult]
    reason: str | None


class Keys:
    """The content keys of one run's rungs.

    Args:
        run: The run.
        file: Its workload.
        environment: Where it runs now.
        sums: Reads sums of files.
        tell: Shows one line, where there is much to read.
        settings: What else a result rests on, by the name of its rung.
    """

    def __init__(
        self,
        run: RunDirectory,
        file: WorkloadFile,
        environment: Environment,
        sums: Checksums,
        tell: Callable[[str], None] = lambda _: None,
        settings: Mapping[str, JsonValue] | None = None,
    ) -> None:
        self._run, self._sums = run, sums
        self._settings = settings or {}
        self._workload = measured_fields(file.workload)
        self._environment = environment.model_dump(mode="json")
        weights = weight_files(file.workload, file.base_dir)
        num_bytes = sum(os.path.getsize(path) for path in weights if os.path.exists(path))
        if num_bytes >= _TOLD_BYTES:
            tell(f"reading the sums of {len(weights)} weight files, {num_bytes / 2**30:.1f} GiB")
        self._files = sums_now(weights, sums)

    def add_sources(self, files: Mapping[str, str]) -> None:
        """Source files that the target has loaded, as they were then."""
        self._files = {**files, **self._files}

    def key_of(self, rung: str) -> ContentKey:
        """What a result of this rung rests on now."""
        return self._key(rung, self._before(rung), self._files)

    def holding(self, rungs: Iterable[Kind]) -> Holding:
        """The run's results that still hold; after one that does not, none does."""
        results: dict[str, RungResult] = {}
        entries = {entry.name: entry for entry in self._run.record.rungs}
        for rung in rungs:
            entry = entries.get(rung.name)
            if entry is None:
                return Holding(results, None)
            if entry.status == "skipped":
                continue
            found = self._result_of(entry, rung.result_type)
            if isinstance(found, str):
                return Holding(results, f"{rung.name} is measured again, and what follows it: {found}.")
            results[rung.name] = found
        return Holding(results, None)

    def _result_of(self, entry: RungEntry, kind: type[RungResult]) -> RungResult | str:
        """The result, or why it does not hold."""
        folder = self._run.path / entry.folder
        if entry.status not in _KEPT_STATUSES:
            return f"it {entry.status}"
        if entry.content_key is None:
            return "it was kept without what it rests on"
        try:
            key = read_model(folder / KEY_FILE, ContentKey)
            result = read_model(folder / f"{entry.name}.json", kind)
        except InputError as error:
            return clause(error)
        if key.digest != entry.content_key:
            return f"{folder / KEY_FILE} is not the one that was written with it"
        missing = [name for name in result.artifacts.values() if not (folder / name).exists()]
        if missing:
            return f"{folder / missing[0]} is gone"
        # What was loaded on the way then need not be loaded yet now: the files themselves are looked at.
        files = {**sums_now([path for path in key.files if path not in self._files], self._sums), **self._files}
        return key.difference(self._key(entry.name, self._before(entry.name), files)) or result

    def _before(self, rung: str) -> Sequence[RungEntry]:
        names = [entry.name for entry in self._run.record.rungs]
        return self._run.record.rungs[: names.index(rung)] if rung in names else self._run.record.rungs

    def _key(self, rung: str, before: Sequence[RungEntry], files: dict[str, str]) -> ContentKey:
        """The configuration of a rung follows from the workload, its defaults and the results before it."""
        paths = {entry.name: self._path_of(entry) for entry in before if entry.status == "done"}
        settings: dict[str, JsonValue] = {"settings": self._settings[rung]} if rung in self._settings else {}
        return ContentKey(
            perfladder_version=__version__,
            workload=self._workload,
            environment=self._environment,
            configuration={
                "rung": rung,
                **settings,
                "rests_on": {name: self._sums.of(path) for name, path in paths.items()},
            },
            files=files,
        )

    def _path_of(self, entry: RungEntry) -> Path:
        return self._run.path / entry.folder / f"{entry.name}.json"
