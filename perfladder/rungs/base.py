"""What all rungs share: the base of their results, and the context they run in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from pydantic import Field

from perfladder.models import SCHEMA_VERSION, Model, ResultWarning
from perfladder.rungs.cost import CostEstimate
from perfladder.session import Caller
from perfladder.target import LoadedInfo
from perfladder.workload import Fingerprints, Workload, WorkloadFile

Status = Literal["done", "failed", "not_applicable", "skipped"]


class RungResult(Model):
    """What a rung saw; the ladder fills in when, where and on which work."""

    schema_version: int = SCHEMA_VERSION
    rung: str
    status: Status = "done"
    reason: str | None = None
    error_type: str | None = None
    started_at: str | None = None
    duration_s: float | None = None
    perfladder_version: str | None = None
    device: str | None = None
    environment_fingerprint: str | None = None
    fingerprints: Fingerprints | None = None
    estimate: CostEstimate | None = Field(default=None, description="What it was thought to cost before it began.")
    warnings: list[ResultWarning] = []
    artifacts: dict[str, str] = {}


R = TypeVar("R", bound=RungResult)


class Launch(Caller, Protocol):
    """A process in which nothing has run yet."""

    def load(self) -> LoadedInfo:
        """Load the target there; a process that has died is started again."""
        ...


@dataclass(frozen=True)
class RungContext:
    """What a rung may use. State is passed, not found.

    Attributes:
        file: The workload, and where its relative paths start.
        info: What the broad session found when it loaded the target.
        broad: The session that holds the loaded target.
        replay: A session of its own for the stage alone; nothing else has run in it.
        results: What the rungs before this one saw, by rung name.
        folder: Where this rung's files go; it exists.
        tell: Shows one line of progress.
        cache_folder: Where facts about this machine are kept from run to run; None keeps nothing.
        open_fresh: Opens a further process, with environment variables set over the usual ones; it ends with the block.
        free_device: Ends both sessions, so that nothing of the ladder is on the device; a later call starts them again.
    """

    file: WorkloadFile
    info: LoadedInfo
    broad: Caller
    replay: Caller
    results: Mapping[str, RungResult]
    folder: Path
    tell: Callable[[str], None] = lambda _: None
    cache_folder: Path | None = None
    open_fresh: Callable[[Mapping[str, str]], AbstractContextManager[Launch]] | None = None
    free_device: Callable[[], None] = lambda: None

    @property
    def workload(self) -> Workload:
        """The workload under measurement."""
        return self.file.workload

    def result(self, kind: type[R]) -> R | None:
        """The finished result of that class, if there is one."""
        return next((r for r in self.results.values() if isinstance(r, kind) and r.status == "done"), None)
