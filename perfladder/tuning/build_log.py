"""What builds said, as `build.log` in a build's folder: for each a header, then what it printed."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from perfladder.files import write_atomically

if TYPE_CHECKING:
    from perfladder.backend.base import Backend, BuildRequest

_logger = logging.getLogger("perfladder.tuning")

LOG_FILE: Final = "build.log"
MAX_BYTES: Final = 1 << 20
"""Of the file; of more the first and the last half are kept."""

_FIRST_LINE: Final = "# What the builds of this folder printed; a new trial begins it anew."
_HERE: Final = "this process, of which the log has warnings and log records of the building thread only"
_CHILD: Final = "a process of its own, of which the log has all that it printed"

Tell = Callable[[str], object]
_tell: ContextVar[Tell | None] = ContextVar("perfladder_build_log", default=None)


def tell(line: str) -> None:
    """Put a line into the log of the build that this thread makes, where there is one."""
    if (teller := _tell.get()) is not None:
        teller(line)


@contextlib.contextmanager
def told_by(teller: Tell) -> Iterator[None]:
    """Give `tell` somebody to tell, inside the block."""
    token = _tell.set(teller)
    try:
        yield
    finally:
        _tell.reset(token)


class BuildLog:
    """The log of one build.

    Args:
        backend: What builds.
        request: What it is asked to build, and where the log goes.
        in_child: Whether in a process of its own.
    """

    def __init__(self, backend: Backend, request: BuildRequest, *, in_child: bool) -> None:
        self._backend, self._request, self._in_child = backend, request, in_child
        self._started_at, self._start = datetime.now(UTC), time.monotonic()

    def write(self, output: IO[bytes], outcome: str) -> None:
        """Write the file anew after a trial, else add to it; where that fails only the log is lost.

        Args:
            output: What was printed.
            outcome: How the build ended.
        """
        path = self._request.folder / LOG_FILE
        try:
            before = _text_of(path)
            is_ours = before.startswith(_FIRST_LINE)
            parts = [before.rstrip("\n") if is_ours and not self._in_child else _FIRST_LINE, "", *self._header(outcome)]
            parts += ["", head_and_tail(output, MAX_BYTES).rstrip("\n") or "(it printed nothing)"]
            if before and not is_ours:
                parts += ["", f"The backend's own {LOG_FILE}:", "", before.rstrip("\n")]
            write_atomically(path, _cut("\n".join(parts) + "\n"))
        except OSError as error:
            _logger.warning("The log %s cannot be written: %s", path, error)

    def _header(self, outcome: str) -> list[str]:
        from perfladder.tuning.cache import versions

        backend = self._backend
        facts = {
            "build in": _CHILD if self._in_child else _HERE,
            "backend": f"{backend.name}, {backend!r}",
            "options": json.dumps(backend.config.model_dump(mode="json")),
            "device": str(self._request.device),
            "versions": ", ".join(f"{name} {version}" for name, version in versions(backend.libraries).items()),
            "started_at": self._started_at.isoformat(timespec="seconds"),
            "duration_s": f"{time.monotonic() - self._start:.3f}",
            "outcome": outcome,
        }
        return [f"{name}: {value}" for name, value in facts.items()]


@contextlib.contextmanager
def logged_here(backend: Backend, request: BuildRequest) -> Iterator[None]:
    """Log a build in this process.

    Other threads print here too, so that file descriptors stay as they are: warnings and log records of this thread
    are collected, and shown as they would be without.
    """
    log = BuildLog(backend, request, in_child=False)
    outcome = "built"
    with tempfile.SpooledTemporaryFile(max_size=MAX_BYTES) as output:
        try:
            with collected(lambda line: output.write(f"{line}\n".encode(errors="replace"))):
                yield
        except BaseException as error:
            outcome = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            log.write(output, outcome)


@contextlib.contextmanager
def collected(teller: Tell) -> Iterator[None]:
    """Tell of warnings and log records of this thread inside the block; they are shown as well."""
    thread, show, is_over = threading.get_ident(), warnings.showwarning, False

    def shown(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
        # A build of another thread that ends later puts this function back.
        if threading.get_ident() == thread and not is_over:
            teller(warnings.formatwarning(message, category, filename, lineno).rstrip("\n"))
        show(message, category, filename, lineno, *rest, **more)

    handler = RecordTeller(teller, thread)
    # Those of torch keep their records from the root.
    loggers = [logging.root, *(one for one in _loggers() if not one.propagate)]
    for logger in loggers:
        logger.addHandler(handler)
    warnings.showwarning = shown
    try:
        with told_by(teller):
            yield
    finally:
        is_over = True
        if warnings.showwarning is shown:
            warnings.showwarning = show
        for logger in loggers:
            logger.removeHandler(handler)


class RecordTeller(logging.Handler):
    """Tells of the log records of a thread."""

    def __init__(self, teller: Tell, thread: int) -> None:
        super().__init__()
        self._teller, self._thread = teller, thread
        self.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Tell of one."""
        if record.thread == self._thread:
            self._teller(self.format(record))


def _loggers() -> list[logging.Logger]:
    return [one for one in list(logging.root.manager.loggerDict.values()) if isinstance(one, logging.Logger)]


def head_and_tail(file: IO[bytes], max_bytes: int) -> str:
    """A file's text; of a longer one the first and the last half of so many bytes, and how much is left out."""
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    if num_bytes <= max_bytes:
        return file.read().decode(errors="replace")
    half = max_bytes // 2
    head = file.read(half).decode(errors="replace")
    file.seek(num_bytes - half)
    return f"{head}\n[{num_bytes - 2 * half} bytes are left out]\n{file.read().decode(errors='replace')}"


def _cut(text: str) -> str:
    return head_and_tail(io.BytesIO(text.encode(errors="replace")), MAX_BYTES)


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return head_and_tail(file, MAX_BYTES)
    except FileNotFoundError:
        return ""
