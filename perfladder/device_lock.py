"""One measuring run a device and machine: a file lock that the kernel releases when its holder dies."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from perfladder.errors import NotPossibleHereError

_FOLDER = "perfladder-locks"
_TELL_EVERY_S = 30.0


@contextlib.contextmanager
def device_lock(
    device: str,
    *,
    what: str = "",
    tell: Callable[[str], None] = lambda _: None,
    folder: Path | None = None,
    tell_every_s: float = _TELL_EVERY_S,
) -> Iterator[None]:
    """Hold the machine-wide lock of a device, waiting for whoever holds it.

    Args:
        device: A name that is the same in every process: the accelerator's UUID, or `cpu`.
        what: What holds it, as the others who wait are told, such as a run's folder.
        tell: Told who is waited for, at once and again and again.
        folder: Where the lock files are; by default one place a machine, shared by its users.
        tell_every_s: How often.

    Raises:
        NotPossibleHereError: There is no place for the lock files.
    """
    folder = folder or Path(tempfile.gettempdir()) / _FOLDER
    try:
        folder.mkdir(mode=0o1777, exist_ok=True)
    except OSError as error:
        raise NotPossibleHereError(
            f"The folder of the device locks cannot be made: {error}. Set TMPDIR to one that can."
        ) from error
    with contextlib.suppress(PermissionError):
        folder.chmod(0o1777)
    path = folder / f"{device.replace('/', '_').replace(':', '_')}.lock"
    lock, holder = FileLock(path, mode=0o666), path.with_suffix(".holder")
    wait_s = 0.0
    while not lock.is_locked:
        try:
            lock.acquire(timeout=wait_s)
        except Timeout:
            tell(f"Waiting for device {device}: {_describe(holder)} is measuring on it.")
            wait_s = tell_every_s
    try:
        since = datetime.now(UTC).isoformat(timespec="seconds")
        _write(holder, json.dumps({"pid": os.getpid(), "what": what, "since": since}))
        yield
    finally:
        _write(holder, "")
        lock.release()


def _write(path: Path, text: str) -> None:
    """Write what others only read. The file stays: its folder lets nobody remove what another user has made."""
    with contextlib.suppress(OSError):
        # Not created anew where it is there: that too the kernel may refuse for another user's file.
        flags = os.O_WRONLY | os.O_TRUNC | (0 if path.exists() else os.O_CREAT)
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o666)
        try:
            with contextlib.suppress(OSError):
                os.fchmod(descriptor, 0o666)
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _describe(path: Path) -> str:
    try:
        found = json.loads(path.read_text())
        what = f" ({found['what']})" if found["what"] else ""
        return f"process {found['pid']}{what}, since {found['since']},"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
