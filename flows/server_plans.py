"""How the servers that are kept are started: commands, addresses, and variables."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from pathlib import Path

from pydantic import Field

from perfladder.errors import InputError
from perfladder.flows.databases import PostgresUrls
from perfladder.flows.keeper import Plan, free_port
from perfladder.flows.prefect_server import server_command, server_variables
from perfladder.models import Model
from perfladder.tasks.running import Address, ServerName, read_address

LOOPBACK = "127.0.0.1"
_ALL_INTERFACES = {"0.0.0.0": LOOPBACK, "::": "::1"}
"""What listens everywhere, and how this machine itself reaches it."""


class UpOptions(Model):
    """How the servers are started; None: as they run already, else the default."""

    host: str | None = Field(default=None, description="What they listen on; by default the loopback only.")
    prefect_port: int | None = Field(default=None, ge=1, le=65535)
    mlflow_port: int | None = Field(default=None, ge=1, le=65535)
    database_url: str | None = Field(default=None, description="PostgreSQL for both; by default SQLite files.")

    def port(self, name: ServerName) -> int | None:
        """The port that was asked for."""
        return self.prefect_port if name == "prefect" else self.mlflow_port


def plan_of(name: ServerName, state: Path, options: UpOptions, urls: PostgresUrls | None, python: str) -> Plan:
    """The command and the address of a server.

    Raises:
        InputError: A port that is taken, or a host that is none.
    """
    host = options.host or LOOPBACK
    port = _port(name, state, host, options.port(name))
    local = _ALL_INTERFACES.get(host, host)
    base = f"http://{_bracketed(local)}:{port}"
    address = {
        "url": f"{base}/api" if name == "prefect" else base,
        "bind_host": host,
        "port": port,
        "database": urls.shown if urls else str(state / f"{name}.db"),
    }
    if name == "prefect":
        return Plan(server_command(python, host, port), address)
    # Of one worker there is one writer; its access log would grow by a line for each request.
    command = [python, "-P", "-m", "mlflow", "server", "--workers", "1", "--uvicorn-opts", "--log-level=warning"]
    command += ["--artifacts-destination", (state / "artifacts").as_uri(), "--host", host, "--port", str(port)]
    return Plan(command, address)


def _port(name: ServerName, state: Path, host: str, asked: int | None) -> int:
    """The one that was asked for, else the last one, so that bookmarks stay right, else a free one."""
    last = read_address(state)
    with contextlib.suppress(OSError, ValueError):
        if asked is None:
            return free_port(host, last.port if last else int((state / "port").read_text()))
    try:
        return free_port(host, asked or 0)
    except socket.gaierror as error:
        raise InputError(f"--host {host}: there is no such address: {error.strerror}.") from error
    except OSError as error:
        what = f"--{name}-port {asked}" if asked else f"--host {host}"
        raise InputError(f"{what} cannot be listened on: {error.strerror}. Choose another, or leave it out.") from error


def variables_of(
    name: ServerName, state: Path, plan: Plan, variables: Mapping[str, str], urls: PostgresUrls | None
) -> dict[str, str]:
    """The environment of a server."""
    make = _prefect_variables if name == "prefect" else _mlflow_variables
    return make(state, plan, variables, urls)


def _prefect_variables(
    state: Path, plan: Plan, variables: Mapping[str, str], urls: PostgresUrls | None
) -> dict[str, str]:
    made = server_variables(state, variables, with_pages=True)
    host, port = plan.address["bind_host"], plan.address["port"]
    # What its pages tell browsers to ask.
    made["PREFECT_SERVER_UI_API_URL"] = f"http://{_bracketed(_reachable_name(host))}:{port}/api"
    made["PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT"] = "false"
    if urls is not None:
        made["PREFECT_SERVER_DATABASE_CONNECTION_URL"] = urls.prefect
        made["PREFECT_SERVER_DATABASE_SQLALCHEMY_CONNECT_ARGS_SEARCH_PATH"] = "prefect, public"
    return made


def _mlflow_variables(
    state: Path, plan: Plan, variables: Mapping[str, str], urls: PostgresUrls | None
) -> dict[str, str]:
    """None of the user's MLflow settings but those of a server's security.

    The address of the store is no argument: it may hold a password, and everybody sees arguments.
    """
    made = {
        name: value
        for name, value in variables.items()
        if not name.startswith("MLFLOW_") or name.startswith("MLFLOW_SERVER_")
    }
    path = str(state / "mlflow.db").replace("%", "%25").replace("?", "%3F")
    made |= {
        "MLFLOW_BACKEND_STORE_URI": urls.mlflow if urls else f"sqlite:///{path}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        # Jobs are for the evaluation of language models: processes that nobody here asks for.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }
    host, port = plan.address["bind_host"], plan.address["port"]
    if not is_loopback(host):
        names = dict.fromkeys(map(_bracketed, _names_of(host)))
        hosts = ["localhost", "localhost:*", "127.0.0.1", "127.0.0.1:*", *(f"{name}:{port}" for name in names)]
        made.setdefault("MLFLOW_SERVER_ALLOWED_HOSTS", ",".join(hosts))
        made.setdefault("MLFLOW_SERVER_CORS_ALLOWED_ORIGINS", ",".join(f"http://{name}:{port}" for name in names))
    return made


def page_of(address: Address) -> str:
    """What to give a browser."""
    return f"http://{_bracketed(_reachable_name(address.bind_host))}:{address.port}"


def _names_of(host: str) -> list[str]:
    """What browsers elsewhere may call this machine."""
    names = [_reachable_name(host), socket.getfqdn()]
    if host not in _ALL_INTERFACES:
        return names
    import psutil

    found = [address.address for addresses in psutil.net_if_addrs().values() for address in addresses]
    return names + [name for name in found if _is_address(name)]


def _is_address(text: str) -> bool:
    """Whether it is one of IP; hardware addresses are not, and those of one link have no meaning elsewhere."""
    with contextlib.suppress(ValueError):
        return not ipaddress.ip_address(text).is_link_local
    return False


def _reachable_name(host: str) -> str:
    return socket.gethostname() if host in _ALL_INTERFACES else host


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
