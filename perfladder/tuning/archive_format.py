"""What an archive of tuned modules must look like, found out from its directory alone: nothing is unpacked for it."""

from __future__ import annotations

import itertools
import stat
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from perfladder.errors import ArchiveError

FORMAT_VERSION: Final = 1
"""Of the manifest and of what lies beside it; readers accept every version up to this one."""

MANIFEST: Final = "manifest.json"
SUMS_ENDING: Final = "_sha256_sums.txt"
MAX_TEXT_BYTES: Final = 64 << 20
"""Of the manifest and of the sums, which are read as a whole."""

CHUNK_BYTES: Final = 1 << 20
_NEVER_IN_A_NAME: Final = frozenset(map(chr, [*range(32), 127]))
_MAX_PART_BYTES: Final = 255
_IS_ENCRYPTED: Final = 1
_HEADER_BYTES: Final = 30


def is_sums(name: str) -> bool:
    """Whether a member has the name of a file of sums."""
    return name.endswith(SUMS_ENDING) and "/" not in name


def why_unsafe(name: str) -> str | None:
    """Why a member's name cannot be used below a folder; None if it can."""
    parts = name.split("/")
    if name.startswith("/"):
        return "it is an absolute path"
    if ".." in parts:
        return "it leads out of the folder with '..'"
    if "\\" in name:
        return "it has a backslash"
    if not _NEVER_IN_A_NAME.isdisjoint(name) or not name.isprintable():
        return "it has control characters"
    if "" in parts or "." in parts:
        return "it is no plain path of a file"
    if any(len(part.encode()) > _MAX_PART_BYTES for part in parts):
        return f"a part of it is longer than {_MAX_PART_BYTES} bytes"
    return None


def file_that_is_a_folder(names: Iterable[str]) -> str | None:
    """A name that another one lies inside of."""
    known = set(names)
    parents = (parent for name in known for parent in map(str, Path(name).parents))
    return next((parent for parent in parents if parent in known), None)


def check_entries(path: Path, entries: Sequence[zipfile.ZipInfo], *, max_member_bytes: int) -> None:
    """Check the directory of a zip.

    Raises:
        ArchiveError: It is none of ours, or a member is unsafe or oversized.
    """
    # The library cuts names at a zero byte; what the file says is the other attribute.
    counts = Counter(entry.orig_filename for entry in entries)
    if MANIFEST not in counts:
        raise ArchiveError(f"{path} is a zip, but no archive of tuned modules: it has no {MANIFEST}.")
    for entry in entries:
        is_text = entry.orig_filename == MANIFEST or is_sums(entry.orig_filename)
        limit = min(max_member_bytes, MAX_TEXT_BYTES) if is_text else max_member_bytes
        if reason := _why_refused(entry, limit):
            raise ArchiveError(f"{path} is refused: its member {entry.orig_filename!r} is not accepted: {reason}.")
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ArchiveError(f"{path} is refused: it has several members of the name {twice[0]!r}.")
    if clash := file_that_is_a_folder(counts):
        raise ArchiveError(f"{path} is refused: its member {clash!r} is a file, and others lie inside it.")
    if shared := _overlapping(entries):
        raise ArchiveError(f"{path} is refused: its members {shared[0]!r} and {shared[1]!r} share their bytes.")


def _why_refused(entry: zipfile.ZipInfo, max_bytes: int) -> str | None:
    if reason := why_unsafe(entry.orig_filename):
        return reason
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind not in (0, stat.S_IFREG):
        return "it is a link" if kind == stat.S_IFLNK else "it is no plain file"
    if entry.flag_bits & _IS_ENCRYPTED:
        return "it is encrypted"
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return f"its compression (method {entry.compress_type}) is not deflate"
    if entry.file_size > max_bytes:
        return f"it has {entry.file_size} bytes, and {max_bytes} are allowed"
    return None


def _overlapping(entries: Sequence[zipfile.ZipInfo]) -> tuple[str, str] | None:
    """Two members that are stored at the same place: so a small file could stand for any number of bytes."""
    ordered = sorted(entries, key=lambda entry: entry.header_offset)
    for one, other in itertools.pairwise(ordered):
        if one.header_offset + _HEADER_BYTES + one.compress_size > other.header_offset:
            return one.orig_filename, other.orig_filename
    return None
