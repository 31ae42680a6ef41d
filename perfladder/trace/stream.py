"""Opens a trace file, plain or gzip, and gives its text block by block, also where compressed data is damaged."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final

from perfladder.errors import TraceError

_COMPRESSED_BYTES: Final = 1 << 18
_GZIP_WINDOW: Final = 31  # zlib's code for a gzip header and the largest window


class TextStream:
    """The uncompressed text of a file.

    Attributes:
        is_damaged: The compressed data ended early or was invalid; what came before it was given.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path)
        magic = self._file.read(6)
        self._file.seek(0)
        self._inflater = zlib.decompressobj(_GZIP_WINDOW) if magic.startswith(b"\x1f\x8b") else None
        self._pending = b""
        self.is_damaged = False
        if magic.startswith((b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00", b"BZh", b"\x04\x22\x4d\x18")):
            self._file.close()
            raise TraceError(
                f"Cannot read {path} as a trace: it is compressed, but not with gzip. Decompress it first."
            )

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes of text, none only at the end.

        Raises:
            TraceError: The disk failed.
        """
        try:
            return self._file.read(size) if self._inflater is None else self._inflate(size)
        except OSError as error:
            raise TraceError(f"Reading {self._path} failed: {error}. Check the disk or copy the file anew.") from error

    def _inflate(self, size: int) -> bytes:
        parts: list[bytes] = []
        missing = size
        while missing > 0 and not self.is_damaged:
            assert self._inflater is not None
            data = self._pending or self._file.read(_COMPRESSED_BYTES)
            if self._inflater.eof:  # several gzip members may follow each other, and padding the last
                data = data.lstrip(b"\x00")
                if not data:
                    break
                self._inflater = zlib.decompressobj(_GZIP_WINDOW)
            try:
                part = self._inflater.decompress(data, missing)
            except zlib.error:
                self.is_damaged = True
                break
            self._pending = self._inflater.unconsumed_tail or self._inflater.unused_data
            if not data and not part:
                self.is_damaged = not self._inflater.eof
                break
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def _open(path: Path) -> BinaryIO:
    if path.is_dir():
        raise TraceError(f"Cannot read {path} as a trace: it is a folder. Name the trace file in it.")
    if not path.exists():
        raise TraceError(f"Cannot read {path} as a trace: there is no such file. Check the path.")
    if not path.is_file():
        raise TraceError(f"Cannot read {path} as a trace: it is no regular file. Copy its content to a file first.")
    try:
        return path.open("rb")
    except OSError as error:
        raise TraceError(f"Cannot read {path} as a trace: {error.strerror}. Check its permissions.") from error
