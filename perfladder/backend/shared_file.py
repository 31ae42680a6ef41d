"""A cache file that several processes read and add to at once."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

_logger = logging.getLogger("perfladder.tuning")
_PATIENCE_S = 30.0


class SharedFile:
    """One file of bytes; what cannot be read or written only costs the next build some time.

    Args:
        path: Where; its folder is made when something is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> bytes:
        """What it holds; empty if there is none."""
        try:
            return self.path.read_bytes()
        except OSError:
            return b""

    def update(self, merged: Callable[[bytes], bytes]) -> None:
        """Put something in its place, made of what is there by then; other processes wait meanwhile."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with FileLock(self.path.with_name(f"{self.path.name}.lock"), timeout=_PATIENCE_S):
                replace_bytes(self.path, merged(self.read()))
        except (OSError, Timeout) as error:
            _logger.warning("%s cannot be written, and later builds take longer: %s", self.path, error)


def replace_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a file under another name first, so that nobody sees a part of it."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
