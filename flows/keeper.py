"""A server in the background and its keeper, as whoever starts, joins or ends it sees them."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import perfladder.guard
from perfladder.tasks.running import is_kept, read_address

END_LIMIT_S = 20.0
_KEEPER_FILE = Path(__file__).with_name("server_keeper.py")
_START_LIMIT_S = 20.0
_LOCK_LIMIT_S = 30.0
_LOG_TAIL_LINES = 15


class Plan(NamedTuple):
    """What a keeper is to start: the server's command, what goes into `server.json`, and for how long."""

    command: list[str]
    address: Mapping[str, Any]
    while_used: bool = False


class Keeper:
    """A keeper that was joined, held by a descriptor, which never comes to mean another process."""

    def __init__(self, descriptor: int, child_pid: int | None) -> None:
        self._descriptor: int | None = descriptor
        self._child_pid = child_pid

    def has_ended(self, limit_s: float = 0) -> bool:
        """Wait for its end, which is the end of its server too."""
        if self._descriptor is None:
            return True
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        has_ended = bool(poller.poll(limit_s * 1000))
        if has_ended and self._child_pid is not None:
            self._child_pid = None if _reap(self._child_pid) else self._child_pid
        return has_ended

    def end(self, limit_s: float = END_LIMIT_S) -> bool:
        """Ask it to end, and wait; returns whether it has."""
        if not self.has_ended():
            assert self._descriptor is not None
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)
        return self.has_ended(limit_s)

    def forget(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def join(state: Path, child_pid: int | None = None) -> Keeper | None:
    """The live keeper of a state folder; None when there is none."""
    address = read_address(state)
    if address is None:
        return None
    try:
        keeper = Keeper(os.pidfd_open(address.keeper_pid), child_pid)
    except ProcessLookupError:
        return None
    # Only now, with the process held, does the lock prove that its number still means the keeper.
    if is_kept(state):
        return keeper
    keeper.forget()
    return None


def start(state: Path, plan: Plan, variables: Mapping[str, str]) -> Keeper | None:
    """Start a keeper that does not end with this process, and wait (some 50 ms) for the address.

    Returns:
        The keeper; None when it has ended already.

    Raises:
        OSError: It did not start.
    """
    for name in ("server.json", "ready"):
        (state / name).unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.replace(log_file(state), state / "server.log.1")
    arguments = [sys.executable, "-I", "-S", str(_KEEPER_FILE), perfladder.guard.__file__, str(state)]
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log_file(state)), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    arguments.append(json.dumps(plan._asdict()))
    # Not subprocess: a Popen object would have to outlive this one when others go on using the server.
    child_pid = os.posix_spawn(sys.executable, arguments, variables, file_actions=files)
    deadline = time.monotonic() + _START_LIMIT_S
    while not (state / "server.json").exists():
        if _reap(child_pid) or time.monotonic() > deadline:
            raise OSError(f"its keeper did not start.{log_tail(state)}")
        time.sleep(0.01)
    return join(state, child_pid)


def _reap(child_pid: int) -> bool:
    """Collect the exit of a keeper that is a child of this process; returns whether it has ended."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(child_pid, os.WNOHANG)[0] != 0
    return True


def log_file(state: Path) -> Path:
    """Where a server's output goes."""
    return state / "server.log"


def log_tail(state: Path) -> str:
    """The end of a server's output, as a part of a message."""
    log = log_file(state)
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line.strip()][-_LOG_TAIL_LINES:]
    return f" Its log ({log}) ends with:\n" + "\n".join(f"  {line}" for line in lines or ["(nothing)"])


def take_lock(path: Path, kind: int, limit_s: float = _LOCK_LIMIT_S) -> int:
    """Take a file lock that the kernel releases when this process ends.

    Raises:
        OSError: It was not to be had within the limit.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:
                os.close(descriptor)
                raise
            time.sleep(0.02)
        else:
            return descriptor


def free_port(host: str, wanted: int = 0) -> int:
    """A port that can be listened on; 0 asks for any.

    Raises:
        OSError: The wanted one is taken, or there is no such host.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # As the server will: a port whose last user has just gone is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        return int(probe.getsockname()[1])


def is_healthy(url: str) -> bool:
    """Ask directly, past any proxy that the environment names."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=2)
    try:
        connection.request("GET", f"{parts.path}/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
