"""Processes that run flows, and what they leave behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from perfladder.flows.keeper import is_healthy
from perfladder.guard import guarded

_HERE = Path(__file__).parent
_MARKER = "PERFLADDER_TEST_MARKER"


class Flow:
    """One driver process; every process below it carries a marker in its environment."""

    def __init__(self, config: dict[str, Any], hooks: dict[str, Any], log: Path, variables: dict[str, str]) -> None:
        self.marker = uuid.uuid4().hex
        self.log = log
        command = [sys.executable, str(_HERE / "driver.py"), json.dumps(config), json.dumps(hooks)]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))
        }
        # With a temporary folder of their own, flows take turns with each other, not with other jobs of this machine.
        environment |= {"HOME": str(log.parent), "TMPDIR": str(log.parent.parent), "OMP_NUM_THREADS": "1"}
        environment |= {_MARKER: self.marker, **variables}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment, cwd=log.parent
            )

    def answer(self, timeout_s: float = 240) -> dict[str, Any]:
        """Wait for the end; no process may be left then."""
        out, _ = self.process.communicate(timeout=timeout_s)
        assert self.living() == [], self.log.read_text()
        lines = out.strip().splitlines()
        assert lines, self.log.read_text()
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        """Wait until the progress shows a text."""
        try:
            _until(lambda: text in self.log.read_text(), timeout_s, lambda: self.log.read_text())
        except AssertionError:
            self.process.kill()
            raise

    def end(self, number: signal.Signals) -> None:
        """Signal the driver, and wait until it and all below it have gone."""
        self.process.send_signal(number)
        self.process.communicate(timeout=60)
        _until(lambda: not self.living(), 30, lambda: str(self.living()))

    def living(self) -> list[str]:
        """Command lines of the live processes with this flow's marker."""
        found = []
        for folder in Path("/proc").iterdir():
            try:
                if folder.name.isdigit() and f"{_MARKER}={self.marker}".encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found


def _until(is_true: Callable[[], bool], timeout_s: float, explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


@pytest.fixture(scope="session")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One runs folder for all flows that do not mind: its server and store are made once."""
    return tmp_path_factory.mktemp("shared") / "runs"


@pytest.fixture(scope="session")
def toy() -> dict[str, Any]:
    """A workload that takes a second."""
    return {"name": "toy", "target": "toy.py:build", "warmup_runs": 1, "measured_runs": 3}


@pytest.fixture(scope="session")
def begin_flow(tmp_path_factory: pytest.TempPathFactory, runs_dir: Path) -> Iterator[Callable[..., Flow]]:
    """Start a flow of a workload; what is still running at the end is killed."""
    flows: list[Flow] = []

    def begin(workload: dict[str, Any] | str, *, hooks: Any = None, variables: Any = None, **config: Any) -> Flow:
        what = {} if "baseline" in config else {"workload": workload, "base_dir": str(_HERE)}
        config = {**what, "runs_dir": str(runs_dir), **config}
        log = tmp_path_factory.mktemp("flow") / "stderr.log"
        flows.append(Flow(config, hooks or {}, log, variables or {}))
        return flows[-1]

    yield begin
    for flow in flows:
        if flow.process.poll() is None:
            flow.process.kill()
            flow.process.communicate()


@pytest.fixture(scope="session")
def server_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a whole Prefect server's users; unlike the local server of a run, it serves workers."""
    folder = tmp_path_factory.mktemp("shared-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    added = {"DO_NOT_TRACK": "true", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    added |= {"PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    variables = {**kept, **added, "PREFECT_HOME": str(folder / "home"), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "prefect", "server", "start", "--port", port]
    # Under a guard: an interrupted test run tears nothing down.
    watched, lifeline = os.pipe()
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            guarded(command, watched), env=variables, stdout=log, stderr=log, cwd=folder, pass_fds=(watched,)
        )
    os.close(watched)
    try:
        url = f"http://127.0.0.1:{port}/api"
        _until(lambda: is_healthy(url), 120, lambda: (folder / "server.log").read_text())
        yield {**variables, "PREFECT_API_URL": url}
    finally:
        os.close(lifeline)
        server.wait(30)


@pytest.fixture(scope="module")
def client(server_variables: dict[str, str]) -> Iterator[Any]:
    """Prefect's own client of that server."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    url = server_variables["PREFECT_API_URL"]
    with temporary_settings({PREFECT_API_URL: url}), get_client(sync_client=True) as found:
        yield found


@pytest.fixture
def fake_server(tmp_path: Path) -> Callable[[str], str]:
    """An executable that stands for the interpreter with Prefect: it `answers`, `hangs` or `ends`."""

    def make(kind: str) -> str:
        path = tmp_path / f"{kind}.py"
        path.write_text(f"#!{sys.executable}\n" + (_HERE / "fake_server.py").read_text())
        path.chmod(0o755)
        return str(path)

    return make
