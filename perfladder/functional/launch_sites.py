"""Where the program launches Triton kernels of its own: a span around each launch that names the source line.

Triton keeps a list of hooks that it calls before and after each launch; these are added to it and taken off again. What
Inductor generated has no line of the program's, and gets no span.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final

from perfladder.trace.labels import LAUNCH_KIND, encode_label
from perfladder.trace.record import open_span

_MACHINERY: Final = ("triton", "torch", "perfladder.functional")
_GENERATED: Final = ("torch._inductor",)
_SHOWN_PARTS: Final = 2


@contextmanager
def mark_launch_sites() -> Iterator[bool]:
    """Put a span around each launch of a Triton kernel inside the block, on any thread.

    Yields:
        Whether launches can be seen: not if the program has not imported Triton, or if it has no list of launch hooks.
    """
    chains = _find_hook_lists()
    if chains is None:
        yield False
        return
    marks = _Marks()
    hooks = list(zip(chains, (marks.enter, marks.leave), strict=True))
    for chain, hook in hooks:
        chain.add(hook)
    try:
        yield True
    finally:
        for chain, hook in hooks:
            chain.remove(hook)
        marks.leave()


def _find_hook_lists() -> tuple[Any, Any] | None:
    """Return Triton's lists of hooks before and after a launch."""
    knobs = sys.modules.get("triton.knobs")  # whoever launches a Triton kernel has imported it
    runtime = getattr(knobs, "runtime", None)
    enter, leave = (getattr(runtime, f"launch_{when}_hook", None) for when in ("enter", "exit"))
    if all(callable(getattr(chain, name, None)) for chain in (enter, leave) for name in ("add", "remove")):
        return enter, leave
    return None


class _Marks:
    """The two hooks. They never raise: an error in a hook would be the launch's."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._labels: dict[tuple[CodeType, int], str] = {}

    def enter(self, *_: object) -> None:
        """Open the span of a launch, if a line of the program makes it."""
        self.leave()  # a launch that failed has left its span open
        frame = find_launching_frame(sys._getframe(1))
        if frame is None:
            return
        key = frame.f_code, frame.f_lineno or 0
        if key not in self._labels:
            self._labels[key] = encode_label(LAUNCH_KIND, describe_site(*key))
        self._local.close = open_span(self._labels[key])

    def leave(self, *_: object) -> None:
        """Close it."""
        close = self._local.__dict__.pop("close", None)
        if close is not None:
            close()


def find_launching_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame that belongs neither to Triton nor to torch; None if Inductor's code launches."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if _is_in(module, _GENERATED):
            return None
        if not _is_in(module, _MACHINERY):
            return frame
        frame = frame.f_back
    return None


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def describe_site(code: CodeType, line: int) -> str:
    """Return file, line and function, e.g. `models/net.py:42 (Net.forward)`; the file as Python's path leads to it."""
    return f"{_short(code.co_filename)}:{line} ({code.co_qualname})"


def _short(filename: str) -> str:
    """Leave out the folder from which modules are imported, or all but the last folder if there is none."""
    path = os.path.abspath(filename)
    roots = [os.path.join(os.path.abspath(root), "") for root in sys.path]
    around = [root for root in roots if path.startswith(root)]
    if around:
        return path[len(max(around, key=len)) :]
    return os.sep.join(path.split(os.sep)[-_SHOWN_PARTS:])


def name_launch(kernel: str, site: str) -> str:
    """Return what a launch is called among calls, e.g. `add_kernel (models/net.py:42)`."""
    return f"{kernel} ({site.rpartition(' (')[0]})"
