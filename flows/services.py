"""`perfladder up`, `down` and `status`: a Prefect and an MLflow server with their pages, kept in the background."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

from pydantic import Field

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.files import private_folder
from perfladder.flows.databases import PostgresUrls, create_schemas, postgres_urls
from perfladder.flows.keeper import Keeper, Plan, is_healthy, join, log_file, log_tail, start, take_lock
from perfladder.flows.prefect_server import START_LIMIT_S
from perfladder.flows.server_plans import UpOptions, is_loopback, page_of, plan_of, variables_of
from perfladder.models import SCHEMA_VERSION, Model
from perfladder.tasks.running import Address, ServerName, is_kept, is_of_this_machine, read_address

NAMES: tuple[ServerName, ...] = get_args(ServerName)
_UP_LOCK_LIMIT_S = 2 * START_LIMIT_S
_POLL_S = 0.1

Tell = Callable[[str], None]


class ServerStatus(Model):
    """One of the two servers."""

    name: ServerName
    status: Literal["running", "not_answering", "stopped", "crashed", "elsewhere"]
    url: str | None = Field(default=None, description="Its pages.")
    api_url: str | None = Field(default=None, description="What clients are given.")
    bind_host: str | None = None
    port: int | None = None
    process_id: int | None = None
    keeper_process_id: int | None = None
    host_name: str | None = None
    started_at: str | None = None
    database: str | None = None
    log: str
    detail: str = ""


class ServersStatus(Model):
    """Both servers, and their folder."""

    schema_version: int = SCHEMA_VERSION
    folder: str
    servers: list[ServerStatus]
    warnings: list[str] = []


def up(
    folder: Path,
    options: UpOptions,
    variables: Mapping[str, str],
    tell: Tell = lambda _: None,
    *,
    limit_s: float = START_LIMIT_S,
    python: str = sys.executable,
) -> ServersStatus:
    """Start both servers, or those that do not run, and wait until they answer. What runs already is left as it is.

    Args:
        folder: Their folder; made, for its owner only.
        options: Where they listen and what they store in.
        variables: Environment variables that the servers' own are made from.
        tell: Shows one line.
        limit_s: How long they may take to answer.
        python: The interpreter that has Prefect and MLflow.

    Raises:
        InputError: A port that is taken, a host or database that is none; or a server runs that is not as asked.
        NotPossibleHereError: One does not start; what this call has started is ended.
    """
    _check_packages()
    private_folder(folder)
    urls = postgres_urls(options.database_url) if options.database_url else None
    with _locked(folder):
        missing = [name for name in NAMES if not _runs_as_asked(folder / name, name, options, urls)]
        if missing and urls is not None and options.database_url is not None:
            create_schemas(options.database_url)
        plans = {name: plan_of(name, folder / name, options, urls, python) for name in missing}
        started: dict[ServerName, Keeper] = {}
        try:
            for name, plan in plans.items():
                tell(f"{name}: starting")
                started[name] = _start(name, folder / name, plan, variables, urls)
            for name in NAMES:
                _await(name, folder / name, started.get(name), limit_s)
                tell(f"{name}: {page_of(_address(folder / name))}")
        except BaseException:
            for keeper in started.values():
                keeper.end()
            raise
        finally:
            for keeper in started.values():
                keeper.forget()
    return status(folder)


def down(folder: Path, tell: Tell = lambda _: None) -> ServersStatus:
    """End both servers with all that they have started, and forget those that have crashed.

    Raises:
        NotPossibleHereError: One does not end, or runs on another machine.
    """
    if not folder.is_dir():
        return status(folder)
    with _locked(folder):
        keepers = {name: keeper for name in NAMES if (keeper := _keeper_to_end(folder / name)) is not None}
        try:
            for keeper in keepers.values():
                keeper.end(limit_s=0)
            for name, keeper in keepers.items():
                if not keeper.end():
                    raise NotPossibleHereError(f"The {name} server does not end.{log_tail(folder / name)}")
                tell(f"{name}: ended")
        finally:
            for keeper in keepers.values():
                keeper.forget()
        for name in NAMES:
            if not is_kept(folder / name):
                (folder / name / "server.json").unlink(missing_ok=True)
    return status(folder)


def status(folder: Path) -> ServersStatus:
    """What runs; starts and changes nothing."""
    servers = [_status(name, folder / name) for name in NAMES]
    hosts = {server.bind_host for server in servers if server.bind_host and server.status == "running"}
    warnings = [_open_warning(host) for host in sorted(hosts) if not is_loopback(host)]
    return ServersStatus(folder=str(folder), servers=servers, warnings=warnings)


def _status(name: ServerName, state: Path) -> ServerStatus:
    address, log = read_address(state), str(log_file(state))
    if address is None:
        return ServerStatus(name=name, status="stopped", log=log)
    known = ServerStatus(
        name=name,
        status="running",
        url=page_of(address),
        api_url=address.url,
        bind_host=address.bind_host,
        port=address.port,
        process_id=address.server_pid,
        keeper_process_id=address.keeper_pid,
        host_name=address.host_name,
        started_at=address.started_at,
        database=address.database,
        log=log,
    )
    if not is_of_this_machine(address):
        detail = f"started on {address.host_name}, which shares this folder"
        return known.model_copy(update={"status": "elsewhere", "detail": detail})
    if not is_kept(state):
        detail = "it has ended without being asked to; `perfladder up` starts it again"
        gone = {"status": "crashed", "process_id": None, "keeper_process_id": None, "detail": detail}
        return known.model_copy(update=gone)
    if not is_healthy(address.url):
        return known.model_copy(update={"status": "not_answering", "detail": "it is starting, or hangs: see its log"})
    return known


def _check_packages() -> None:
    missing = [name for name in NAMES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotPossibleHereError(
            f"{' and '.join(missing)} not installed. Install with: pip install 'perfladder[all]'."
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One `up` or `down` at a time."""
    try:
        lock = take_lock(folder / "up.lock", fcntl.LOCK_EX, _UP_LOCK_LIMIT_S)
    except OSError as error:
        raise NotPossibleHereError(f"The folder {folder} cannot be locked: {error}.") from error
    try:
        yield
    finally:
        os.close(lock)


def _runs_as_asked(state: Path, name: ServerName, options: UpOptions, urls: PostgresUrls | None) -> bool:
    if not is_kept(state):
        address = read_address(state)
        if address is not None and not is_of_this_machine(address):
            raise NotPossibleHereError(
                f"The {name} server of {state.parent} was started on {address.host_name}. End it there, or name "
                "another folder with --folder."
            )
        return False
    address = _address(state)
    if not is_of_this_machine(address):
        raise NotPossibleHereError(f"The {name} server of {state.parent} runs on {address.host_name}: use it there.")
    wanted = {
        "--host": (options.host, address.bind_host),
        f"--{name}-port": (options.port(name), address.port),
        "--database-url": (urls.shown if urls else None, address.database),
    }
    for option, (asked, found) in wanted.items():
        if asked is not None and asked != found:
            raise InputError(
                f"{option} {asked}: the {name} server runs already, with {found}. End it first: perfladder down."
            )
    return True


def _address(state: Path) -> Address:
    address = read_address(state)
    if address is None:
        raise NotPossibleHereError(f"A server is just starting or ending in {state}. Try again in some seconds.")
    return address


def _start(
    name: ServerName, state: Path, plan: Plan, variables: Mapping[str, str], urls: PostgresUrls | None
) -> Keeper:
    state.mkdir(mode=0o700, exist_ok=True)
    try:
        keeper = start(state, plan, variables_of(name, state, plan, variables, urls))
    except OSError as error:
        raise NotPossibleHereError(f"The {name} server cannot be started: {error}") from error
    if keeper is None:
        raise NotPossibleHereError(f"The {name} server has ended.{log_tail(state)}")
    (state / "port").write_text(str(plan.address["port"]))
    return keeper


def _await(name: ServerName, state: Path, started: Keeper | None, limit_s: float) -> None:
    """Wait until a server answers, and note that it has; also one that an interrupted `up` has left."""
    keeper, url = started or join(state), _address(state).url
    deadline = time.monotonic() + limit_s
    try:
        while not is_healthy(url):
            has_ended = keeper is None or keeper.has_ended()
            if has_ended or time.monotonic() > deadline:
                what = "has ended" if has_ended else f"does not answer after {limit_s:g} s"
                raise NotPossibleHereError(f"The {name} server {what}.{log_tail(state)}")
            time.sleep(_POLL_S)
        (state / "ready").touch()
    finally:
        if keeper is not None and started is None:
            keeper.forget()


def _keeper_to_end(state: Path) -> Keeper | None:
    address = read_address(state)
    if address is not None and is_kept(state) and not is_of_this_machine(address):
        raise NotPossibleHereError(f"The server in {state} runs on {address.host_name}: end it there.")
    return join(state)


def _open_warning(host: str) -> str:
    return (
        f"The servers listen on {host}, and ask nobody for a password: whoever reaches these ports can read, change "
        "and delete all runs. Keep them behind a firewall, or take the loopback only and a tunnel (ssh -L)."
    )
