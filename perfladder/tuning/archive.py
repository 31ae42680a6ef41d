"""The file that tuned modules are saved in: a zip with a manifest and SHA-256 sums, of which nothing is ever run.

<stem>.ait                      the zip: manifest.json, the members, <stem>_sha256_sums.txt
<stem>_sha256_sums.txt          the same sums once more beside it, as `sha256sum -c` reads them in the unpacked folder

Sums tell that the file is whole, not who made it: what its members are used for must be safe with any content.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import secrets
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from perfladder.errors import ArchiveError, InputError, NotPossibleHereError
from perfladder.files import check_free_disk, private_folder
from perfladder.tuning.archive_format import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    MANIFEST,
    MAX_TEXT_BYTES,
    SUMS_ENDING,
    check_entries,
    is_sums,
)
from perfladder.tuning.archive_write import write_archive as write_archive

_MAX_MEMBER_BYTES: Final = 1 << 40
_FIRST_BYTES: Final = b"PK\x03\x04"

# What the library raises on files that are damaged, or made to be.
_ZIP_ERRORS: Final = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    IndexError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)


class Archive:
    """An archive that was checked as a whole; a context manager.

    Attributes:
        sums: SHA-256 of every member but the file of sums.
    """

    def __init__(self, path: Path, file: IO[bytes], archive: zipfile.ZipFile, sums: dict[str, str]) -> None:
        self.path, self.sums = path, sums
        self._file, self._zip = file, archive

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._zip.close()
        self._file.close()

    @functools.cached_property
    def manifest(self) -> bytes:
        """The manifest: a JSON object."""
        return self.read(MANIFEST, MAX_TEXT_BYTES)

    @property
    def names(self) -> tuple[str, ...]:
        """The members, without the manifest and the sums."""
        return tuple(name for name in self.sums if name != MANIFEST)

    def num_bytes(self, name: str) -> int:
        """The size of a member.

        Raises:
            ArchiveError: There is no such member.
        """
        if name not in self.sums:
            raise ArchiveError(f"{self.path} has no member {name!r}; it has {', '.join(self.names) or 'none'}.")
        return self._zip.getinfo(name).file_size

    def read(self, name: str, max_bytes: int) -> bytes:
        """The content of a member.

        Raises:
            ArchiveError: There is no such member, it is larger, or the file has changed since it was opened.
        """
        if (num_bytes := self.num_bytes(name)) > max_bytes:
            raise ArchiveError(
                f"{self.path}: {name} is refused: it has {num_bytes} bytes, and {max_bytes} are allowed."
            )
        return b"".join(self._checked_chunks(name))

    def extract(self, name: str, folder: Path) -> Path:
        """Write a member into a folder that only this user may enter, under its name; returns its path.

        Raises:
            ArchiveError: There is no such member, or the file has changed since it was opened.
            InputError: The folder, or what lies in it, is in the way.
            NotPossibleHereError: The folder is not private, or its disk is full.
        """
        num_bytes = self.num_bytes(name)
        root = private_folder(folder).resolve()
        target = root / name
        check_free_disk(root, num_bytes)
        try:
            below = [parent for parent in target.parents if parent.is_relative_to(root) and parent != root]
            if target.is_dir() or any(parent.is_symlink() for parent in below):
                raise InputError(f"{target} is a folder, or lies behind a link in {root}: choose an empty folder.")
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = target.with_name(f".{secrets.token_hex(8)}.part")
            try:
                with temporary.open("xb") as file:
                    for chunk in self._checked_chunks(name):
                        file.write(chunk)
                os.replace(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise NotPossibleHereError(f"{target} cannot be written: {error}.") from error
        return target

    def check(self, name: str) -> None:
        """Read a member, and compare its sum.

        Raises:
            ArchiveError: It is another one.
        """
        for _ in self._checked_chunks(name):
            pass

    def _checked_chunks(self, name: str) -> Iterator[bytes]:
        """A member's bytes; checked at each reading, since the file may have been changed after it was opened."""
        digest = hashlib.sha256()
        for chunk in _read_member(self.path, self._zip, name):
            digest.update(chunk)
            yield chunk
        if digest.hexdigest() != self.sums[name]:
            raise ArchiveError(f"{self.path} is damaged: the SHA-256 sum of its member {name!r} is another one.")


def open_archive(path: Path, *, max_member_bytes: int = _MAX_MEMBER_BYTES, sums: Path | None = None) -> Archive:
    """Open an archive and read it once, to check it as a whole before any member is used.

    Args:
        path: The archive, or a link to it.
        max_member_bytes: A member that is said to be larger is refused; more than is said is never read.
        sums: A file of sums from a place that is trusted; the archive's own must be the same.

    Raises:
        ArchiveError: It is refused, with the reason.
    """
    if not os.path.isfile(path):
        raise ArchiveError(f"{path} is no archive: there is no such file.")
    try:
        trusted = None if sums is None else sums.read_bytes()
    except OSError as error:
        raise ArchiveError(f"The sums {sums} cannot be read: {error.strerror}.") from error
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("rb"))
        except OSError as error:
            raise ArchiveError(f"{path} cannot be read: {error.strerror}.") from error
        archive = stack.enter_context(_open_zip(path, file))
        check_entries(path, archive.infolist(), max_member_bytes=max_member_bytes)
        _refuse_newer(path, _read_text(path, archive, MANIFEST))
        found = Archive(path, file, archive, _read_sums(path, archive, trusted))
        for name in found.sums:
            found.check(name)
        stack.pop_all()
        return found


def _open_zip(path: Path, file: IO[bytes]) -> zipfile.ZipFile:
    is_zip = file.read(len(_FIRST_BYTES)) == _FIRST_BYTES
    try:
        return zipfile.ZipFile(file)
    except _ZIP_ERRORS as error:
        what = f"is damaged or cut off ({error})" if is_zip else "is no archive: it is not a zip"
        raise ArchiveError(f"{path} {what}.") from None


def _read_member(path: Path, archive: zipfile.ZipFile, name: str) -> Iterator[bytes]:
    """A member's bytes, never more than its entry says."""
    num_bytes = 0
    try:
        with archive.open(name) as member:
            while chunk := member.read(CHUNK_BYTES):
                num_bytes += len(chunk)
                yield chunk
    except _ZIP_ERRORS as error:
        raise ArchiveError(f"{path} is damaged in its member {name!r}: {error}.") from None
    if num_bytes != (expected := archive.getinfo(name).file_size):
        raise ArchiveError(f"{path} is damaged: its member {name!r} has {num_bytes} bytes, and {expected} are due.")


def _read_text(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    return b"".join(_read_member(path, archive, name))


def _refuse_newer(path: Path, manifest: bytes) -> None:
    """A newer format may have other members and sums, so its version is looked at before they are."""
    try:
        document = json.loads(manifest)
    except (ValueError, RecursionError):
        document = None
    version = document.get("format_version") if isinstance(document, dict) else None
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ArchiveError(f"{path} is damaged or none of ours: its {MANIFEST} tells no format_version.")
    if version > FORMAT_VERSION:
        raise ArchiveError(
            f"{path} has format version {version}: a newer perfladder wrote it, and this one reads up to "
            f"{FORMAT_VERSION}. Update perfladder to read it."
        )


def _read_sums(path: Path, archive: zipfile.ZipFile, trusted: bytes | None) -> dict[str, str]:
    """Sums by member, of which each has one."""
    names = archive.namelist()
    own = [name for name in names if is_sums(name)]
    if len(own) != 1:
        raise ArchiveError(f"{path} is refused: it has {len(own) or 'no'} files of sums (*{SUMS_ENDING}); one is due.")
    text = _read_text(path, archive, own[0])
    if trusted is not None and text != trusted:
        raise ArchiveError(f"{path} is refused: its sums are not those of the given file. It is another archive.")
    sums: dict[str, str] = {}
    for line in text.decode(errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if name in sums or not re.fullmatch("[0-9a-f]{64}", digest):
            raise ArchiveError(f"{path} is damaged: its sums have the line {line[:100]!r}.")
        sums[name] = digest
    if without := sorted(set(names) - set(own) - set(sums)):
        raise ArchiveError(f"{path} is refused: its member {without[0]!r} is not among the sums.")
    if absent := sorted(set(sums) - set(names)):
        raise ArchiveError(f"{path} is refused: there is a sum for {absent[0]!r}, and no such member.")
    return sums
