"""The Prefect server of a run: the user's own, the one that is up, or a local one that ends with those who use it.

Prefect's own temporary server is not used: it outlives a caller that is killed, and frees no concurrency slots.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, Self

from perfladder.errors import NotPossibleHereError
from perfladder.flows.keeper import END_LIMIT_S, Keeper, Plan, free_port, is_healthy, join, log_tail, start, take_lock
from perfladder.tasks.running import Address, is_kept, read_address, running_address, servers_folder

START_LIMIT_S = 120.0
_POLL_S = 0.1

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


def server_variables(state: Path, variables: Mapping[str, str], *, with_pages: bool = False) -> dict[str, str]:
    """The server's environment: none of the user's Prefect settings, for these belong to the user's own server.

    Args:
        state: Its home.
        variables: What the environment is made from.
        with_pages: Whether it serves browsers, deployments and automations too.
    """
    kept = {name: value for name, value in variables.items() if not name.startswith("PREFECT_")}
    left_out = {} if with_pages else dict.fromkeys(_NOT_NEEDED, "false")
    return kept | _OFFLINE | left_out | {"PREFECT_HOME": str(state)}


def server_command(python: str, host: str, port: int) -> list[str]:
    """The command line of a Prefect server."""
    return [python, "-P", "-m", "prefect", "server", "start", "--host", host, "--port", str(port)]


def await_server(url: str, keeper: Keeper | None, state: Path, *, deadline_s: float, limit_s: float) -> None:
    """Wait until a server that is kept here answers.

    Raises:
        NotPossibleHereError: It ended, or did not answer in time; the message shows the end of its log.
    """
    while not is_healthy(url):
        has_ended = keeper is None or keeper.has_ended()
        if has_ended or time.monotonic() > deadline_s:
            what = "has ended" if has_ended else f"does not answer after {limit_s:g} s"
            raise NotPossibleHereError(
                f"The local Prefect server {what}.{log_tail(state)}\n"
                "Climb without a server (--plain), or name one of your own in PREFECT_API_URL."
            )
        time.sleep(_POLL_S)


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
        self._keeper: Keeper | None = None
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
            self._users = take_lock(self.state / "users.lock", fcntl.LOCK_SH)
            start_lock = take_lock(self.state / "start.lock", fcntl.LOCK_EX)
            try:
                self._keeper = join(self.state) if is_kept(self.state) else self._start()
                address = read_address(self.state)
                if address is None:
                    raise OSError(f"its keeper has ended.{log_tail(self.state)}")
                self._url = address.url
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
        await_server(self._url, self._keeper, self.state, deadline_s=self._deadline, limit_s=self.limit_s)
        return self._url

    def close(self) -> None:
        """Leave the server; the last one to leave ends it and waits for that."""
        users, self._users = self._users, None
        if users is None:
            return
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._keeper is not None:
                # Nobody can join meanwhile: that takes the lock which this process holds.
                self._keeper.end()
        except BlockingIOError:
            # Others use it; or the keeper has just seen that nobody does, and holds the lock while it ends.
            os.close(take_lock(self.state / "users.lock", fcntl.LOCK_SH))
            if self._keeper is not None:
                self._keeper.has_ended(0 if read_address(self.state) else END_LIMIT_S)
        finally:
            os.close(users)
            if self._keeper is not None:
                self._keeper.forget()
                self._keeper = None

    def _start(self) -> Keeper | None:
        port = free_port("127.0.0.1")
        command = server_command(self._python, "127.0.0.1", port)
        address = {"url": f"http://127.0.0.1:{port}/api", "port": port}
        return start(self.state, Plan(command, address, while_used=True), self._variables)


class RunningServer:
    """The server that `perfladder up` keeps; joined, never started or ended.

    Args:
        state: Its folder.
        address: What its keeper has written there.
    """

    def __init__(self, state: Path, address: Address) -> None:
        self.state = state
        self.url = address.url
        self._keeper: Keeper | None = None

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Take hold of its keeper."""
        self._keeper = join(self.state)

    def wait(self) -> str:
        """Ask it; it has answered before.

        Raises:
            NotPossibleHereError: It has ended since, or does not answer.
        """
        limit_s = 10.0
        await_server(self.url, self._keeper, self.state, deadline_s=time.monotonic() + limit_s, limit_s=limit_s)
        return self.url

    def close(self) -> None:
        """Let go of the keeper."""
        if self._keeper is not None:
            self._keeper.forget()
            self._keeper = None


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


AnyServer = PrefectServer | RunningServer | UsersServer


def find_server(runs_dir: Path, variables: Mapping[str, str]) -> AnyServer:
    """The server that the user's settings name, else the one that is up, else the local one of the runs folder."""
    if url := users_url(variables):
        return UsersServer(url)
    folder, address = servers_folder(variables), running_address("prefect", variables)
    if folder is not None and address is not None:
        return RunningServer(folder / "prefect", address)
    return PrefectServer(runs_dir, variables=variables)


def users_url(variables: Mapping[str, str]) -> str | None:
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
