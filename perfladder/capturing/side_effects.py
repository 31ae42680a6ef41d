"""What a stage does to the outside while it is called: files that it writes, processes, connections."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_EVENTS = {
    "socket.connect": "opens a connection",
    "socket.sendto": "sends to a socket",
    "subprocess.Popen": "starts a process",
    "os.system": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.exec": "becomes another program",
    "os.remove": "removes a file",
    "os.rename": "renames a file",
    "os.rmdir": "removes a folder",
    "os.truncate": "cuts a file",
    "shutil.rmtree": "removes a folder",
}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CACHES = ("__pycache__", "torchinductor", ".triton", "triton", ".nv", "torch_extensions", "perfladder")
"""Folders in which compilers keep what they have made: that changes nothing that anybody sees."""
_MAX_SEEN = 20


class _Watch:
    """Python's audit hooks stay for the life of a process, so there is one, which looks only while it is asked to."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, None]] = {}
        self.is_installed = False

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        seen = self.seen.get(threading.get_ident()) if self.seen else None
        if seen is None or len(seen) >= _MAX_SEEN:
            return
        if event == "open":
            if what := _written(*arguments):
                seen[what] = None
        elif event in _EVENTS:
            first = arguments[0] if arguments else ""
            where = f" ({os.fsdecode(first)})" if isinstance(first, (str, bytes, os.PathLike)) and first else ""
            if not _is_cache(str(first)):
                seen[f"{_EVENTS[event]}{where}"] = None


_watch = _Watch()


@contextlib.contextmanager
def side_effects() -> Iterator[dict[str, None]]:
    """What this thread does to the outside in the block, each once; what other threads do is not seen."""
    if not _watch.is_installed:
        _watch.is_installed = True
        sys.addaudithook(_watch.hook)
    thread, found = threading.get_ident(), dict[str, None]()
    before = _watch.seen.get(thread)
    _watch.seen[thread] = found
    try:
        yield found
    finally:
        if before is None:
            del _watch.seen[thread]
        else:
            before.update(found)
            _watch.seen[thread] = before


def _written(path: Any, mode: Any = None, flags: Any = 0, *_: Any) -> str | None:
    """The file that an `open` is about to write, told from its mode or flags."""
    is_write = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool((flags or 0) & _WRITES)
    if not is_write or not isinstance(path, (str, bytes, os.PathLike)):
        return None
    name = os.fsdecode(path)
    return None if name.startswith("/dev/") or _is_cache(name) else f"writes a file ({name})"


def _is_cache(name: str) -> bool:
    return any(part.startswith(cache) for part in Path(name).parts for cache in _CACHES)
