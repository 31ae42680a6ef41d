"""The servers that `perfladder up` keeps: where their state lies, and whether they live. Reads only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from perfladder.files import data_folder
from perfladder.models import Model
from perfladder.rundir import read_model

ServerName = Literal["prefect", "mlflow"]

FOLDER_VARIABLE = "PERFLADDER_SERVERS_DIR"


class Address(Model):
    """`server.json` of a state folder, as its keeper has written it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    url: str
    keeper_pid: int
    server_pid: int
    host_name: str = ""
    started_at: str = ""
    bind_host: str = "127.0.0.1"
    port: int = 0
    database: str | None = None


def servers_folder(variables: Mapping[str, str]) -> Path | None:
    """The folder of this user's servers: PERFLADDER_SERVERS_DIR, else in the data folder; None without a home."""
    if named := variables.get(FOLDER_VARIABLE, "").strip():
        return Path(named).absolute()
    base = data_folder(variables)
    return base / "servers" if base is not None else None


def is_kept(state: Path) -> bool:
    """Whether a keeper lives: it holds its lock, which the kernel releases, from before it writes the address."""
    try:
        lock = os.open(state / "keeper.lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(lock)


def read_address(state: Path) -> Address | None:
    """What the last keeper wrote; None where there is nothing, or nothing that can be read."""
    from perfladder.errors import InputError

    with contextlib.suppress(InputError):
        return read_model(state / "server.json", Address)
    return None


def is_of_this_machine(address: Address) -> bool:
    """A home folder may be shared by machines; a keeper of another one serves that one's loopback."""
    return address.host_name in ("", socket.gethostname())


def running_address(name: ServerName, variables: Mapping[str, str]) -> Address | None:
    """The address of a server that lives, and has answered once; None when there is none."""
    folder = servers_folder(variables)
    if folder is None or not is_kept(folder / name) or not (folder / name / "ready").exists():
        return None
    address = read_address(folder / name)
    return address if address is not None and is_of_this_machine(address) else None
