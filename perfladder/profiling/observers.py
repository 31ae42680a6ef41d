"""What is done at each call of a site: a labelled span in the trace, or the peak of the device's memory."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from perfladder import _torch_private
from perfladder.instrument import Observer, Site
from perfladder.profiling.discover import UNTUNED
from perfladder.trace.labels import MARK_KIND, encode_label


class Annotator(Observer):
    """Opens a labelled span in the trace for each call.

    Args:
        labels: Kind and name of the label for a site's path; by default an untuned module of that path.
        stages: Paths of further stages, which are labelled as if user code had marked them.

    Attributes:
        num_calls: Calls of each site, marks and stages apart, on the thread that made this object.
        num_foreign_calls: Calls of each site on other threads.
    """

    def __init__(self, labels: Mapping[str, tuple[str, str]] | None = None, stages: Collection[str] = ()) -> None:
        self._open_span = _torch_private.open_span
        self._stages = frozenset(stages)
        self._labels = {path: encode_label(kind, name) for path, (kind, name) in (labels or {}).items()}
        self._marks: dict[str, str] = {}
        self._thread = threading.get_ident()
        self.num_calls: dict[str, int] = {}
        self.num_foreign_calls: dict[str, int] = {}

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[Any]:
        """Open the call's span."""
        path = site.path
        if site.is_mark or path in self._stages:
            return self._opened(self._marks.setdefault(path, encode_label(MARK_KIND, path)))
        counts = self.num_calls if threading.get_ident() == self._thread else self.num_foreign_calls
        counts[path] = counts.get(path, 0) + 1
        label = self._labels.get(path)
        if label is None:
            label = self._labels[path] = encode_label(UNTUNED, path)
        return self._opened(label)

    def _opened(self, label: str) -> AbstractContextManager[Any]:
        span = self._open_span(label)
        span.__enter__()
        return span

    def leave(self, site: Site, token: AbstractContextManager[Any], result: Any) -> None:
        """Close the span."""
        token.__exit__(None, None, None)


class MemoryMeter(Protocol):
    """What the allocator of a device tells, in bytes."""

    def read(self) -> tuple[int, int]:
        """Return what is allocated now, and the most since `reset`."""

    def reset(self) -> None:
        """Begin a new peak."""


class AcceleratorMemory:
    """The allocator of torch's current accelerator device. Its peak statistics are reset, which nobody can undo."""

    def read(self) -> tuple[int, int]:
        """Return what is allocated now, and the most since `reset`."""
        return _torch_private.allocator_bytes()

    def reset(self) -> None:
        """Begin a new peak."""
        import torch

        torch.accelerator.reset_peak_memory_stats()


@dataclass(frozen=True)
class Peak:
    """The most memory allocated during any call of a site, and the most that a call added to what was there."""

    peak_bytes: int
    increase_bytes: int


@dataclass
class _OpenCall:
    start_bytes: int
    peak_bytes: int = 0

    def reach(self, peak_bytes: int) -> None:
        """Note a peak that was seen during the call."""
        self.peak_bytes = max(self.peak_bytes, peak_bytes)


class MemoryObserver(Observer):
    """Finds the peak of each site's calls, right also where calls nest: an inner peak counts for the outer call too.

    Calls on other threads than the one that made this object are left out, since one device has one counter.

    Attributes:
        peaks: By the site's path.
    """

    def __init__(self, meter: MemoryMeter) -> None:
        self._meter = meter
        self._thread = threading.get_ident()
        self._open: list[_OpenCall] = []
        self.peaks: dict[str, Peak] = {}

    def enter(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _OpenCall | None:
        """Keep what the outer call has reached, and begin anew for this one."""
        if threading.get_ident() != self._thread:
            return None
        allocated_bytes, peak_bytes = self._meter.read()
        if self._open:
            self._open[-1].reach(peak_bytes)
        self._meter.reset()
        call = _OpenCall(allocated_bytes)
        self._open.append(call)
        return call

    def leave(self, site: Site, token: _OpenCall | None, result: Any) -> None:
        """Note this call's peak and hand it to the outer call."""
        if token is None or not self._open:
            return
        token.reach(self._meter.read()[1])
        self._open.pop()
        if self._open:
            self._open[-1].reach(token.peak_bytes)
        known = self.peaks.get(site.path, Peak(0, 0))
        self.peaks[site.path] = Peak(
            peak_bytes=max(known.peak_bytes, token.peak_bytes),
            increase_bytes=max(known.increase_bytes, token.peak_bytes - token.start_bytes),
        )
