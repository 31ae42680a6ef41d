"""Files that a crash leaves whole, folders that others cannot change, and where caches lie."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from perfladder.errors import InputError, NotPossibleHereError

_SPARE_BYTES = 16 << 20


def write_atomically(path: Path, text: str) -> None:
    """Write text under a temporary name, flush it to disk, and rename; the folder is flushed too.

    What is there and no file, such as `/dev/null` or a pipe, is written to and stays what it is.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("w", encoding="utf-8") as device:
            device.write(text)
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Flush a file, or a folder's entries, that is already written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_empty_folder(path: Path) -> None:
    """Make the folder now, so that one that cannot be written to is found before anything runs.

    Raises:
        InputError: It cannot be made or written to, or it holds something.
    """
    try:
        is_there = path.exists() and not (path.is_dir() and not any(path.iterdir()))
        if not is_there:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".probe"
            probe.touch()
            probe.unlink()
    except OSError as error:
        raise InputError(f"folder: {path} cannot be written to: {error.strerror}. Name another one.") from error
    if is_there:
        raise InputError(f"folder: {path} is there already. Name one that is not, or is empty.")


def check_free_disk(folder: Path, num_bytes: int) -> None:
    """Find out before writing whether a folder's disk has room.

    Raises:
        NotPossibleHereError: It has not.
    """
    free_bytes, needed_bytes = shutil.disk_usage(folder).free, num_bytes + _SPARE_BYTES
    if free_bytes < needed_bytes:
        raise NotPossibleHereError(
            f"{folder} has {free_bytes >> 20} MiB free, and up to {needed_bytes >> 20} MiB are needed. Free some, or "
            "choose another folder."
        )


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder(variables: Mapping[str, str]) -> Path | None:
    """The user's cache folder by the XDG base directory specification; None for a user without a home.

    Args:
        variables: The process's environment variables.
    """
    if base := variables.get("XDG_CACHE_HOME"):
        return Path(base) / "perfladder"
    home = variables.get("HOME")
    return Path(home) / ".cache" / "perfladder" if home else None


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner may enter, or check that one which is there can be trusted.

    What lies in it is later loaded or run, so nobody else may put anything there.

    Raises:
        InputError: Something else has that name.
        NotPossibleHereError: It belongs to another user, every user may write to it, or it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        # The folder, and the link where the path is one: its owner can point it elsewhere.
        found, itself = path.stat(), path.lstat()
    except (FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{error.filename} is no folder, and a folder is needed there. Choose another path.") from None
    except OSError as error:
        raise NotPossibleHereError(
            f"The folder {path} cannot be made: {error.strerror}. Choose one that you may write to."
        ) from error
    user = os.geteuid()
    if found.st_uid != user or itself.st_uid not in (user, 0):
        owner = found.st_uid if found.st_uid != user else itself.st_uid
        raise NotPossibleHereError(
            f"The folder {path} belongs to another user (uid {owner}, and this process runs as {user}), who could "
            "put files there. Choose a folder of your own."
        )
    if found.st_mode & stat.S_IWOTH:
        raise NotPossibleHereError(
            f"Every user may write to the folder {path}, and what lies in it is loaded later. Take the permission "
            f"away (chmod o-w {path}), or choose another folder."
        )
    return path
