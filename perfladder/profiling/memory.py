"""Watches how the process grows while a profiler is on, which keeps every event in memory until it stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

_LIMIT_BYTES = 4 << 30
_MB = 1e6


@dataclass
class MemoryWatch:
    """How much the process has grown since the window's start, and whether one more run fits.

    Attributes:
        limit_bytes: How much it may grow.
        read_bytes: Tells what the process holds now.
        grown: What it had grown by, each time that `note` was called.
    """

    limit_bytes: int
    read_bytes: Callable[[], int]
    grown: list[int] = field(default_factory=list)
    _start_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._start_bytes = self.read_bytes()

    @classmethod
    def of_this_process(cls, limit_bytes: int | None = None) -> MemoryWatch:
        """Watch this process; without a limit it may take half of the free memory, and 4 GiB at most."""
        limit = min(_LIMIT_BYTES, psutil.virtual_memory().available // 2) if limit_bytes is None else limit_bytes
        process = psutil.Process()
        return cls(limit, lambda: int(process.memory_info().rss))

    def note(self) -> None:
        """Take down the growth, after each run."""
        self.grown.append(self.read_bytes() - self._start_bytes)

    def has_room(self, share: float = 1.0) -> bool:
        """Whether a run like the last one still fits into that share of the limit."""
        last = self.grown[-1] - (self.grown[-2] if len(self.grown) > 1 else 0)
        return self.grown[-1] + max(last, 0) <= self.limit_bytes * share

    def __str__(self) -> str:
        grown, limit = max(self.grown, default=0) / _MB, self.limit_bytes / _MB
        return f"memory grew by {grown:,.0f} MB while the profiler was on, and the limit is {limit:,.0f} MB"
