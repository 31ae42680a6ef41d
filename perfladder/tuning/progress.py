"""How far a tuning is, and about how long the rest takes."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_logger = logging.getLogger("perfladder.tuning")


@dataclass(frozen=True)
class TuneProgress:
    """One moment of a tuning.

    Attributes:
        label: What is done now.
        num_done: Candidates that are through.
        num_total: Candidates in all; 0 while calls are recorded.
        elapsed_s: Since the first candidate began.
        remaining_s: Estimate from those that are through; None before the first one.
    """

    label: str
    num_done: int
    num_total: int
    elapsed_s: float
    remaining_s: float | None


class Progress:
    """Counts candidates and tells listeners.

    Args:
        listener: Is told of each change; None: only the log is.
    """

    def __init__(self, listener: Callable[[TuneProgress], None] | None, clock: Callable[[], float] = time.monotonic):
        self._listener, self._clock = listener, clock
        self._start = clock()
        self._num_done = self._num_total = 0
        self._label = ""

    def begin(self, num_total: int) -> None:
        """The first candidate of so many begins."""
        self._start, self._num_total, self._num_done = self._clock(), num_total, 0

    def tell(self, label: str) -> None:
        """Something begins."""
        self._label = label
        _logger.info("%s", label)
        self._send()

    def advance(self, count: int) -> None:
        """So many candidates are through, or need not be tried."""
        self._num_done = min(self._num_done + count, self._num_total)
        self._send()

    def _send(self) -> None:
        if self._listener is None:
            return
        elapsed = self._clock() - self._start
        left = self._num_total - self._num_done
        remaining = elapsed / self._num_done * left if self._num_done else None
        self._listener(TuneProgress(self._label, self._num_done, self._num_total, elapsed, remaining))


@contextmanager
def shown_progress() -> Iterator[Callable[[TuneProgress], None] | None]:
    """A bar on stderr where someone is watching; None where nobody is."""
    if not sys.stderr.isatty():
        yield None
        return
    from perfladder.progress import Progress as Shown
    from perfladder.progress_display import show_bar

    with show_bar(is_silent=False) as (_, show):
        yield lambda now: show(
            Shown(label=now.label, num_done=now.num_done, num_total=now.num_total, remaining_s=now.remaining_s)
        )
