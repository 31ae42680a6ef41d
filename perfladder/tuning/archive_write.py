"""Writing the file that tuned modules are saved in, so that a crash leaves the old one or the whole new one."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import check_free_disk, flush_to_disk, write_atomically
from perfladder.tuning.archive_format import (
    CHUNK_BYTES,
    FORMAT_VERSION,
    MANIFEST,
    MAX_TEXT_BYTES,
    SUMS_ENDING,
    file_that_is_a_folder,
    is_sums,
    why_unsafe,
)


def write_archive(path: Path, members: Mapping[str, bytes | Path], manifest: bytes | BaseModel) -> Path:
    """Write an archive; at `path` is the old one or the whole new one, whenever this process ends.

    Args:
        path: The archive's file; its folder is made.
        members: Contents, or the files that hold them, by name inside: a relative path with `/`.
        manifest: A JSON object with `format_version`.

    Returns:
        The file of sums beside the archive.

    Raises:
        InputError: A name, a file or the path cannot be used.
        NotPossibleHereError: The disk is full or the folder cannot be written.
    """
    text = manifest if isinstance(manifest, bytes) else manifest.model_dump_json(indent=1).encode()
    assert json.loads(text)["format_version"] == FORMAT_VERSION, "the manifest must tell this format's version"
    sums_name = f"{path.stem}{SUMS_ENDING}"
    if len(text) > MAX_TEXT_BYTES:
        raise InputError(f"manifest: it would have {len(text) >> 20} MiB; at most {MAX_TEXT_BYTES >> 20} fit.")
    _check_members(members)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise InputError(f"{path} is a folder; give the name of a file, such as {path / 'tuned.ait'}.")
        _remove_stale(path)
        check_free_disk(path.parent, len(text) + sum(map(_size_of, members.values())))
        sums = _write_zip(path, {MANIFEST: text, **members}, sums_name)
        beside = path.with_name(sums_name)
        write_atomically(beside, sums)
    except OSError as error:
        raise NotPossibleHereError(f"The archive {path} cannot be written: {error}.") from error
    return beside


def _check_members(members: Mapping[str, bytes | Path]) -> None:
    for name, content in members.items():
        reason = why_unsafe(name)
        if reason is None and (name == MANIFEST or is_sums(name)):
            reason = "the archive has a file of its own there"
        if reason is not None:
            raise InputError(f"members: {name!r} cannot be the name of a member: {reason}.")
        if isinstance(content, Path) and not os.path.isfile(content):
            raise InputError(f"members: {name!r} is to hold {content}, and there is no such file.")
    if clash := file_that_is_a_folder(members):
        raise InputError(f"members: {clash!r} is a member, and others are to lie inside it.")


def _size_of(content: bytes | Path) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def _write_zip(path: Path, members: Mapping[str, bytes | Path], sums_name: str) -> str:
    """Write beside the target and rename; returns the sums."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with temporary.open("x+b") as file:
            # Held as long as this process lives: another one can tell that this file is not stale.
            with contextlib.suppress(OSError):  # some network file systems have no locks, and nothing is removed there
                fcntl.flock(file, fcntl.LOCK_EX)
            with zipfile.ZipFile(file, "w") as archive:
                sums = "".join(f"{_add(archive, name, content)}  {name}\n" for name, content in members.items())
                _add(archive, sums_name, sums.encode())
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_to_disk(path.parent)
    return sums


def _add(archive: zipfile.ZipFile, name: str, content: bytes | Path) -> str:
    """Add one member; returns its SHA-256."""
    num_bytes = _size_of(content)
    digest, written = hashlib.sha256(), 0
    # Opened by name, a member has no date: the same content gives the same file.
    with archive.open(name, "w", force_zip64=num_bytes > zipfile.ZIP64_LIMIT // 2) as target:
        for chunk in _chunks(content):
            digest.update(chunk)
            target.write(chunk)
            written += len(chunk)
    if written != num_bytes:
        raise InputError(f"members: {name!r} changed while it was saved: it had {num_bytes} bytes, then {written}.")
    return digest.hexdigest()


def _chunks(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        yield content
        return
    with content.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _remove_stale(path: Path) -> None:
    """Remove what writers that were killed have left, and nothing of one that still writes."""
    for stale in path.parent.glob(f".{_without_wildcards(path.name)}.*-*.part"):
        process_id = stale.name.removesuffix(".part").rpartition(".")[2].partition("-")[0]
        if process_id.isdigit() and not Path(f"/proc/{process_id}").exists():
            # A number says nothing about a process of another container, but its lock does.
            with contextlib.suppress(OSError), stale.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stale.unlink()


def _without_wildcards(name: str) -> str:
    return "".join(f"[{character}]" if character in "[]*?" else character for character in name)
