"""SHA-256 sums of files; those of large ones are kept, so that weights are not read whole in every run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from perfladder.files import sha256_of, write_atomically

_LARGE_BYTES = 64 << 20
_FILE = "checksums.json"
_MAX_KEPT = 1000


class Checksums:
    """Sums of files. A large file whose path, inode, size and time of change are known is not read again.

    Args:
        folder: Where the sums of large files are kept; None keeps nothing.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def of(self, path: Path) -> str | None:
        """The file's sum; None if it is gone or cannot be read."""
        try:
            found = path.stat()
            if self._folder is None or found.st_size < _LARGE_BYTES:
                return sha256_of(path)
            state = f"{found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"
            kept = self._read().get(str(path))
            if kept is not None and kept[0] == state:
                return kept[1]
            sha256 = sha256_of(path)
        except OSError:
            return None
        self._keep(str(path), state, sha256)
        return sha256

    def _read(self) -> dict[str, tuple[str, str]]:
        assert self._folder is not None
        try:
            document = json.loads((self._folder / _FILE).read_bytes())
            return {str(path): (str(state), str(sha256)) for path, (state, sha256) in document.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _keep(self, path: str, state: str, sha256: str) -> None:
        """A cache: where it cannot be written, the file is read again next time."""
        assert self._folder is not None
        kept = self._read()
        kept.pop(path, None)
        newest = dict([*kept.items(), (path, (state, sha256))][-_MAX_KEPT:])
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / _FILE, json.dumps(newest))
