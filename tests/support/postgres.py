"""A PostgreSQL cluster of a test's own: on the loopback, in a folder of its own, gone with its process."""

import ctypes
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_USER, _PASSWORD, _DATABASE = "perfladder", "a secret/of:its@own", "runs"


def binaries() -> Path | None:
    """The folder of PostgreSQL's programs: Debian's newest, else those on the PATH; None without any."""
    found = [path.parent for path in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda path: int(path.parent.name))
    on_path = shutil.which("initdb")
    return Path(os.path.realpath(on_path)).parent if on_path else None


@contextmanager
def cluster(programs: Path) -> Iterator[str]:
    """The address of an empty database."""
    from urllib.parse import quote

    folder, account = Path(tempfile.mkdtemp(prefix="perfladder-postgres-")), _account()
    try:
        secret = folder / "password"
        secret.write_text(_PASSWORD)
        if account:
            for path in (folder, secret):
                os.chown(path, account["user"], account["group"])
        data, port = folder / "data", _free_port()
        command = [programs / "initdb", "-D", data, "-U", _USER, "-A", "scram-sha-256", f"--pwfile={secret}"]
        _run([*command, "-E", "UTF8", "--locale=C", "--no-sync"], account)
        options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        settings = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        with (folder / "server.log").open("wb") as log:
            server = subprocess.Popen(
                [programs / "postgres", "-D", data, "-p", str(port), *settings],
                stdout=log,
                stderr=log,
                cwd=folder,
                preexec_fn=_end_with_parent,
                **account,
            )
        try:
            ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
            deadline = time.monotonic() + 60
            while subprocess.run(ready, check=False).returncode:
                assert server.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < deadline, (folder / "server.log").read_text()
                time.sleep(0.1)
            where = ["-h", "127.0.0.1", "-p", str(port), "-U", _USER]
            _run([programs / "createdb", *where, _DATABASE], {}, {"PGPASSWORD": _PASSWORD})
            yield f"postgresql://{_USER}:{quote(_PASSWORD, safe='')}@127.0.0.1:{port}/{_DATABASE}"
        finally:
            server.send_signal(signal.SIGINT)  # "fast": connections are ended, not waited for
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _account() -> dict[str, Any]:
    """Whom it runs as: PostgreSQL refuses the superuser."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise AssertionError("there is neither a user 'postgres' nor 'nobody'")


def _run(command: list[Any], account: dict[str, Any], variables: dict[str, str] | None = None) -> None:
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd="/", env=environment, timeout=120, check=False, **account
    )
    assert done.returncode == 0, done.stderr


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT, 0, 0, 0)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
