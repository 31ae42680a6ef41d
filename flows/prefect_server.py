"""The Prefect server of a run: the user's own one, or a local one that starts and ends with those who use it.

Prefect's own temporary server is not used: it outlives a caller that is killed, and frees no concurrency slots.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import urlsplit

import perfladder.guard
from perfladder.errors import NotPossibleHereError

START_LIMIT_S = 120.0
_KEEPER = Path(__file__).with_name("server_keeper.py")
_KEEPER_LIMIT_S = 20.0
_LOCK_LIMIT_S = 30.0
_POLL_S = 0.1
_LOG_TAIL_LINES = 15

_OFFLINE = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
    "DO_NOT_TRACK": "true",
}
"""Nothing is sent anywhere."""

_NOT_NEEDED = (
    "PREFECT_SERVER_SERVICES_SCHEDULER_ENABLED",
    "PREFECT_SERVER_SERVICES_LATE_RUNS_ENABLED",
    "PREFECT_SERVER_SERVICES_FOREMAN_ENABLED",
    "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_ENABLED",
    "PREFECT_SERVER_SERVICES_PAUSE_EXPIRATIONS_ENABLED",
    "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED",
    "PREFECT_SERVER_UI_ENABLED",
    "PREFECT_SERVER_EVENTS_STREAM_OUT_ENABLED",
    "PREFECT_SERVER_LOGS_STREAM_OUT_ENABLED",
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START",
)
"""Switched off: they serve deployments, automations and browsers. What records flow, task and artifact stays on."""


class Server(Protocol):
    """Where a run's flow is recorded."""

    def begin(self) -> None:
        """Start it, without waiting."""

    def wait(self) -> str:
        """The address of its API, once it answers."""

    def close(self) -> None:
        """Leave it."""


def server_variables(state: Path, variables: Mapping[str, str]) -> dict[str, str]:
    """The server's environment: none of the user's Prefect settings, for these belong to the user's own server."""
    kept = {name: value for name, value in variables.items() if not name.startswith("PREFECT_")}
    return kept | _OFFLINE | dict.fromkeys(_NOT_NEEDED, "false") | {"PREFECT_HOME": str(state)}


class PrefectServer:
    """The local server of a runs folder, shared by all who use that folder at the same time; a context manager.

    Its database lies in `<runs_dir>/.perfladder/prefect`; `PREFECT_HOME=<that> prefect server start` shows it later.

    Args:
        runs_dir: The runs folder.
        variables: Environment variables that the server's own are made from.
        limit_s: How long it may take to answer.
        python: The interpreter that has Prefect.
    """

    def __init__(
        self,
        runs_dir: Path,
        *,
        variables: Mapping[str, str],
        limit_s: float = START_LIMIT_S,
        python: str = sys.executable,
    ) -> None:
        self.state = runs_dir.resolve() / ".perfladder" / "prefect"
        self.limit_s = limit_s
        self._variables = server_variables(self.state, variables)
        self._python = python
        self._users: int | None = None
        self._child_pid: int | None = None
        self._keeper: int | None = None
        self._url = ""

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Join the running server of this folder, or start one; returns before it answers.

        Raises:
            NotPossibleHereError: The folder cannot be written or locked.
        """
        self._deadline = time.monotonic() + self.limit_s
        try:
            self.state.mkdir(parents=True, exist_ok=True)
            self._users = _lock(self.state / "users.lock", fcntl.LOCK_SH)
            start_lock = _lock(self.state / "start.lock", fcntl.LOCK_EX)
            try:
                if not self._is_kept():
                    self._start_keeper()
                address = json.loads(self._address_file.read_text())
                self._url = str(address["url"])
                with contextlib.suppress(ProcessLookupError):
                    self._keeper = os.pidfd_open(address["keeper_pid"])
            finally:
                os.close(start_lock)
        except OSError as error:
            self.close()
            raise NotPossibleHereError(
                f"The local Prefect server cannot be started in {self.state}: {error}. Choose another runs folder, or "
                "climb without a server (--plain)."
            ) from error

    def wait(self) -> str:
        """Wait until the server answers; returns the address of its API.

        Raises:
            NotPossibleHereError: It ended, or did not answer in time; the message shows the end of its log.
        """
        while not _is_healthy(self._url):
            if self._has_ended(0):
                raise self._failure("has ended")
            if time.monotonic() > self._deadline:
                raise self._failure(f"does not answer after {self.limit_s:g} s")
            time.sleep(_POLL_S)
        return self._url

    def close(self) -> None:
        """Leave the server; the last one to leave ends it and waits for that."""
        users, self._users = self._users, None
        if users is None:
            return
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._keeper is not None and not self._has_ended(0):
                # Nobody can join meanwhile: that takes the lock which this process holds.
                signal.pidfd_send_signal(self._keeper, signal.SIGTERM)
                self._has_ended(_KEEPER_LIMIT_S)
        except BlockingIOError:
            # Others use it; or the keeper has just seen that nobody does, and holds the lock while it ends.
            os.close(_lock(self.state / "users.lock", fcntl.LOCK_SH))
            self._has_ended(0 if self._address_file.exists() else _KEEPER_LIMIT_S)
        finally:
            os.close(users)
            self._forget_keeper()

    @property
    def _address_file(self) -> Path:
        return self.state / "server.json"

    @property
    def _log(self) -> Path:
        return self.state / "server.log"

    def _is_kept(self) -> bool:
        """Whether a keeper lives, anyone's: it holds its lock from before it writes the address until it ends."""
        lock = os.open(self.state / "keeper.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        else:
            return False
        finally:
            os.close(lock)

    def _start_keeper(self) -> None:
        """Start the keeper in a process that does not end with this one, and wait (some 50 ms) for the address."""
        self._address_file.unlink(missing_ok=True)
        arguments = [sys.executable, "-I", "-S", str(_KEEPER), perfladder.guard.__file__, str(self.state), self._python]
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(self._log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        # Not subprocess: a Popen object would have to outlive this one when others go on using the server.
        self._child_pid = os.posix_spawn(sys.executable, arguments, self._variables, file_actions=files)
        deadline = time.monotonic() + _KEEPER_LIMIT_S
        while not self._address_file.exists():
            if self._reap() or time.monotonic() > deadline:
                raise OSError(f"its keeper did not start.{self._log_tail()}")
            time.sleep(0.01)

    def _has_ended(self, limit_s: float) -> bool:
        """Wait for the end of the keeper that was joined, which is the end of its server too."""
        if self._keeper is None:
            return True
        poller = select.poll()
        poller.register(self._keeper, select.POLLIN)
        has_ended = bool(poller.poll(limit_s * 1000))
        if has_ended:
            self._reap()
        return has_ended

    def _reap(self) -> bool:
        """Collect the exit of a keeper that is a child of this process; returns whether it has ended."""
        if self._child_pid is None:
            return False
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self._child_pid, os.WNOHANG)[0] == 0:
                return False
        self._child_pid = None
        return True

    def _forget_keeper(self) -> None:
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            os.close(keeper)

    def _failure(self, what: str) -> NotPossibleHereError:
        return NotPossibleHereError(
            f"The local Prefect server {what}.{self._log_tail()}\n"
            "Climb without a server (--plain), or name one of your own in PREFECT_API_URL."
        )

    def _log_tail(self) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        lines = [line for line in text.splitlines() if line.strip()][-_LOG_TAIL_LINES:]
        return f" Its log ({self._log}) ends with:\n" + "\n".join(f"  {line}" for line in lines or ["(nothing)"])


class UsersServer:
    """The server that the user's Prefect settings name; never started or ended by perfladder."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def begin(self) -> None:
        """Nothing to start."""

    def wait(self) -> str:
        """Ask it once, by Prefect's own client, which knows the user's keys and certificates.

        Raises:
            NotPossibleHereError: It cannot be reached.
        """
        import httpx
        from prefect.client.orchestration import get_client

        with get_client(sync_client=True, httpx_settings={"timeout": 10.0}) as client:
            error = client.api_healthcheck()
        if error is not None and not isinstance(error, httpx.HTTPStatusError):
            raise NotPossibleHereError(
                f"The Prefect server {self.url}, which your Prefect settings name, does not answer: {error!r}. "
                "Start it, unset PREFECT_API_URL to use a local one, or climb without a server (--plain)."
            )
        return self.url

    def close(self) -> None:
        """Nothing to end."""


def find_server(runs_dir: Path, variables: Mapping[str, str]) -> PrefectServer | UsersServer:
    """The server that the user's settings name, else the local one of the runs folder."""
    url = _users_url(variables)
    return UsersServer(url) if url else PrefectServer(runs_dir, variables=variables)


def _users_url(variables: Mapping[str, str]) -> str | None:
    """An empty PREFECT_API_URL counts as unset. Prefect's settings cost a second: only where a file may hold some."""
    if url := variables.get("PREFECT_API_URL", "").strip():
        return url
    if not os.environ.get("PREFECT_API_URL", "").strip():
        # Set but empty, Prefect loses all task runs.
        os.environ.pop("PREFECT_API_URL", None)
    home = Path(variables.get("PREFECT_HOME") or Path.home() / ".prefect")
    files = [Path(variables.get("PREFECT_PROFILES_PATH") or home / "profiles.toml"), Path("prefect.toml"), Path(".env")]
    if not any(file.is_file() for file in files) and not _names_prefect(Path("pyproject.toml")):
        return None
    from prefect.settings import get_current_settings

    return get_current_settings().api.url


def _names_prefect(project: Path) -> bool:
    with contextlib.suppress(OSError):
        return b"[tool.prefect" in project.read_bytes()
    return False


def _lock(path: Path, kind: int) -> int:
    """Take a file lock that the kernel releases when this process ends.

    Raises:
        OSError: It was not to be had within the limit.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + _LOCK_LIMIT_S
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


def _is_healthy(url: str) -> bool:
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
