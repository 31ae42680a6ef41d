"""One measuring run a device and machine: a file lock that the kernel releases when its holder dies."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from perfladder.errors import NotPossibleHereError

_FOLDER = "perfladder-locks"


@contextlib.contextmanager
def device_lock(
    device: str, *, tell: Callable[[str], None] = lambda _: None, folder: Path | None = None
) -> Iterator[None]:
    """Hold the machine-wide lock of a device, waiting for whoever holds it.

    Args:
        device: A name that is the same in every process: the accelerator's UUID, or `cpu`.
        tell: Told once when there is someone to wait for.
        folder: Where the lock files are; by default one place a machine, shared by its users.

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
    lock = FileLock(path, mode=0o666)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        tell(f"Waiting for device {device}: {_holder(path)} is measuring on it.")
        lock.acquire()
    owner = path.with_suffix(".pid")
    try:
        with contextlib.suppress(OSError):
            owner.write_text(str(os.getpid()))
        yield
    finally:
        with contextlib.suppress(OSError):
            owner.unlink()
        lock.release()


def _holder(path: Path) -> str:
    try:
        return f"process {path.with_suffix('.pid').read_text()}"
    except OSError:
        return "another process"
