"""Keep one Prefect server for everyone who uses a state folder, and end it after the last one has gone.

Started as a script by its path, with the standard library only, as

    python -I -S server_keeper.py GUARD_FILE STATE_FOLDER PYTHON

Users hold a shared lock on `users.lock`, which the kernel releases when they die, also by SIGKILL. The keeper holds
`keeper.lock` for as long as it lives and writes the server's address to `server.json`. It ends, with the server and all
below it, when it gets `users.lock` exclusively, when the server ends, or by SIGTERM. It is a child subreaper, so that
nothing the server starts can leave it.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

_POLL_S = 0.5
_LOCK_TRIES = 250
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> int:
    """Run the server until nobody uses it."""
    guard_file, folder, python = arguments
    os.setsid()
    guard, state = _load(guard_file), Path(folder)
    keeper_lock = _hold_keeper_lock(state)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _end)
    try:
        port = _free_port()
        server = _start_server(python, port, state)
        _write_address(state, port, server.pid)
        try:
            _wait_for_the_end(server, state)
        finally:
            _stop(server)
    finally:
        guard.kill_descendants()
        (state / "server.json").unlink(missing_ok=True)
        # Before the users' lock: who gets that one must find that no keeper is left.
        os.close(keeper_lock)
    return 0


def _load(guard_file: str) -> Any:
    """The guard's functions; isolated mode has no import path."""
    spec = importlib.util.spec_from_file_location("guard", guard_file)
    assert spec is not None
    assert spec.loader is not None
    guard = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(guard)
    return guard


def _hold_keeper_lock(state: Path) -> int:
    """Take the lock; others may hold it for a moment, to see whether a keeper lives."""
    lock = os.open(state / "keeper.lock", os.O_RDWR | os.O_CREAT, 0o600)
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return lock
    raise SystemExit("another keeper holds this folder")


def _end(*_: object) -> NoReturn:
    raise SystemExit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start_server(python: str, port: int, state: Path) -> subprocess.Popen[bytes]:
    """Start the server; it works in the state folder, where no settings file of the user's project is found."""
    prctl = ctypes.CDLL(None).prctl
    return subprocess.Popen(
        [python, "-P", "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)],
        cwd=state,
        # The keeper may be killed itself; the server then still ends.
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )


def _write_address(state: Path, port: int, server_pid: int) -> None:
    address = {"url": f"http://127.0.0.1:{port}/api", "keeper_pid": os.getpid(), "server_pid": server_pid}
    part = state / "server.json.part"
    part.write_text(json.dumps(address))
    os.replace(part, state / "server.json")


def _wait_for_the_end(server: subprocess.Popen[bytes], state: Path) -> None:
    """Return when the server has ended, or nobody uses it; the users' lock then stays held to the very end."""
    users = os.open(state / "users.lock", os.O_RDWR | os.O_CREAT, 0o600)
    poller = select.poll()
    poller.register(os.pidfd_open(server.pid), select.POLLIN)
    while not poller.poll(_POLL_S * 1000):
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return


def _stop(server: subprocess.Popen[bytes]) -> None:
    """Let the server write down what it has received."""
    server.terminate()
    try:
        server.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
