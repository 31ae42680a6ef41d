"""Keep one server, until nobody uses it or somebody says so, and end it with all below it.

Started as a script by its path, with the standard library only, as

    python -I -S server_keeper.py GUARD_FILE STATE_FOLDER PLAN_JSON

The plan has the server's `command`, whether it is kept only `while_used`, and what else goes into its `address`. Users
hold a shared lock on `users.lock`, which the kernel releases when they die, also by SIGKILL. The keeper holds
`keeper.lock` for as long as it lives and writes the server's address to `server.json`. It ends, with the server and all
below it, by SIGTERM, when the server ends, or, kept while used, when it gets `users.lock` exclusively. It is a child
subreaper, so that nothing the server starts can leave it. The address of a server that ended unasked, and is kept for
longer than one run, stays: it tells that there was one.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

_POLL_S = 0.5
_LOCK_TRIES = 250
_GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def main(arguments: Sequence[str]) -> int:
    """Run the server until its end, or that of its use."""
    guard_file, folder, plan_json = arguments
    os.setsid()
    guard, state, plan = _load(guard_file), Path(folder), json.loads(plan_json)
    keeper_lock = _hold_keeper_lock(state)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _end)
    is_unasked = False
    try:
        server = _start_server(plan["command"], state)
        _write_address(state, {**plan["address"], "server_pid": server.pid})
        try:
            is_unasked = _wait_for_the_end(server, state if plan["while_used"] else None)
        finally:
            _stop(server)
    finally:
        guard.kill_descendants()
        (state / "ready").unlink(missing_ok=True)
        if plan["while_used"] or not is_unasked:
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


def _start_server(command: list[str], state: Path) -> subprocess.Popen[bytes]:
    """Start the server; it works in the state folder, where no settings file of the user's project is found."""
    prctl = ctypes.CDLL(None).prctl
    return subprocess.Popen(
        command,
        cwd=state,
        # The keeper may be killed itself; the server then still ends.
        preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )


def _write_address(state: Path, address: dict[str, Any]) -> None:
    own = {
        "keeper_pid": os.getpid(),
        "host_name": socket.gethostname(),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    part = state / "server.json.part"
    part.write_text(json.dumps({**address, **own}))
    os.replace(part, state / "server.json")


def _wait_for_the_end(server: subprocess.Popen[bytes], used: Path | None) -> bool:
    """Return True when the server has ended, False when nobody uses it; that lock then stays held to the very end."""
    users = os.open(used / "users.lock", os.O_RDWR | os.O_CREAT, 0o600) if used is not None else None
    poller = select.poll()
    poller.register(os.pidfd_open(server.pid), select.POLLIN)
    while not poller.poll(_POLL_S * 1000 if users is not None else None):
        try:
            if users is not None:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
        except BlockingIOError:
            continue
    return True


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
