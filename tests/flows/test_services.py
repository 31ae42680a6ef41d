"""`up`, `down` and `status`, with stand-ins that start at once, and once with the real servers."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import printed
from processes import is_alive, wait_until

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.flows import services
from perfladder.flows.databases import postgres_urls
from perfladder.flows.prefect_server import PrefectServer, RunningServer, find_server
from perfladder.flows.server_plans import UpOptions, is_loopback, plan_of, variables_of
from perfladder.guard import descendants
from perfladder.rundir import RunDirectory
from perfladder.tasks.running import is_kept, read_address
from perfladder.tasks.store import resolve_tracking_uri

MakeServer = Callable[[str], str]
BeginFlow = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose servers are ended afterwards."""
    path = tmp_path / "servers"
    yield path
    services.down(path)


def up(folder: Path, python: str, limit_s: float = 30, **options: Any) -> services.ServersStatus:
    return services.up(folder, UpOptions(**options), os.environ, limit_s=limit_s, python=python)


def statuses(found: services.ServersStatus) -> list[str]:
    return [server.status for server in found.servers]


def test_nothing_runs_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert statuses(services.status(tmp_path / "none")) == ["stopped", "stopped"]
    assert statuses(services.down(tmp_path / "none")) == ["stopped", "stopped"]
    assert not (tmp_path / "none").exists()


def test_the_commands_tell_the_state_and_the_folder_and_start_nothing(tmp_path: Path) -> None:
    for verb in ("status", "down"):
        command = [sys.executable, "-m", "perfladder.cli", verb, "--json"]
        variables = {**os.environ, "PERFLADDER_SERVERS_DIR": str(tmp_path / "mine")}
        done = subprocess.run(command, env=variables, capture_output=True, check=True, timeout=60)
        told = printed(verb, done.stdout)
        assert told["folder"] == str(tmp_path / "mine")
        assert [server["status"] for server in told["servers"]] == ["stopped", "stopped"]
    assert not (tmp_path / "mine").exists()


@pytest.mark.slow
def test_servers_stay_after_the_command_and_end_with_down(folder: Path, fake_server: MakeServer) -> None:
    script = (
        "import os, sys; from pathlib import Path; from perfladder.flows import services\n"
        "from perfladder.flows.server_plans import UpOptions\n"
        "services.up(Path(sys.argv[1]), UpOptions(), os.environ, python=sys.argv[2])\n"
    )
    subprocess.run([sys.executable, "-c", script, str(folder), fake_server("answers")], check=True, timeout=60)
    found = services.status(folder)
    assert statuses(found) == ["running", "running"]
    pids = [server.process_id for server in found.servers] + [server.keeper_process_id for server in found.servers]
    assert all(map(is_alive, pids))
    assert {server.bind_host for server in found.servers} == {"127.0.0.1"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert statuses(services.down(folder)) == ["stopped", "stopped"]
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_up_again_leaves_what_runs_and_refuses_other_options(folder: Path, fake_server: MakeServer) -> None:
    first = up(folder, fake_server("answers"))
    assert up(folder, fake_server("ends")) == first
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match=r"--mlflow-port \d+: the mlflow server runs already.*perfladder down"):
            up(folder, fake_server("answers"), mlflow_port=other.getsockname()[1])
    services.down(folder)
    assert [server.port for server in up(folder, fake_server("answers")).servers] == [
        server.port for server in first.servers
    ]


@pytest.mark.slow
def test_a_crashed_server_is_recognised_and_replaced(folder: Path, fake_server: MakeServer) -> None:
    prefect, mlflow = up(folder, fake_server("answers")).servers
    variables = {"PERFLADDER_SERVERS_DIR": str(folder)}
    assert resolve_tracking_uri(None, variables, folder) == mlflow.api_url
    assert isinstance(find_server(folder, variables), RunningServer)
    # The server of one, the keeper of the other; that one's server ends with it.
    os.kill(int(mlflow.process_id or 0), signal.SIGKILL)
    os.kill(int(prefect.keeper_process_id or 0), signal.SIGKILL)
    wait_until(lambda: not is_kept(folder / "mlflow") and not is_alive(prefect.process_id), limit_s=30)
    assert statuses(services.status(folder)) == ["crashed", "crashed"]
    assert resolve_tracking_uri(None, variables, folder) == f"sqlite:///{folder}/mlflow.db"
    assert isinstance(find_server(folder, variables), PrefectServer)
    again = up(folder, fake_server("answers"))
    assert statuses(again) == ["running", "running"]
    assert again.servers[1].process_id != mlflow.process_id


@pytest.mark.slow
def test_a_state_file_that_names_anothers_process_is_not_believed(folder: Path, fake_server: MakeServer) -> None:
    up(folder, fake_server("answers"))
    address = json.loads((folder / "mlflow/server.json").read_text())
    services.down(folder)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        address |= {"keeper_pid": bystander.pid, "server_pid": bystander.pid}
        (folder / "mlflow/server.json").write_text(json.dumps(address))
        assert statuses(services.status(folder)) == ["stopped", "crashed"]
        assert statuses(services.down(folder)) == ["stopped", "stopped"]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "what"), [("ends", "has ended"), ("hangs", r"does not answer after 1 s")])
def test_a_server_that_does_not_start_shows_its_log_and_leaves_nothing(
    folder: Path, fake_server: MakeServer, kind: str, what: str
) -> None:
    before = descendants(os.getpid())  # other tests' servers
    with pytest.raises(NotPossibleHereError, match=rf"prefect server {what}\.(?s:.*)Its log"):
        up(folder, fake_server(kind), limit_s=1)
    assert [is_kept(folder / name) for name in services.NAMES] == [False, False]
    assert set(descendants(os.getpid())) <= set(before)


def test_a_port_that_is_taken_is_named(folder: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(InputError, match=rf"--prefect-port {port} cannot be listened on: Address already in use"):
            up(folder, sys.executable, prefect_port=port)


def test_an_address_that_is_not_of_this_machine_is_named(folder: Path) -> None:
    with pytest.raises(InputError, match=r"--host 192\.0\.2\.1 cannot be listened on"):
        up(folder, sys.executable, host="192.0.2.1")


@pytest.mark.slow
def test_servers_for_other_machines_come_with_a_warning(folder: Path, fake_server: MakeServer) -> None:
    found = up(folder, fake_server("answers"), host="0.0.0.0")
    assert "listen on 0.0.0.0, and ask nobody for a password" in found.warnings[0]
    assert found.servers[1].url == f"http://{socket.gethostname()}:{found.servers[1].port}"
    assert found.servers[1].api_url == f"http://127.0.0.1:{found.servers[1].port}"


def test_servers_of_another_machine_are_left_alone(folder: Path) -> None:
    (folder / "mlflow").mkdir(parents=True)
    folder.chmod(0o700)
    address = {"url": "http://127.0.0.1:1", "keeper_pid": 1, "server_pid": 1, "host_name": "elsewhere"}
    (folder / "mlflow/server.json").write_text(json.dumps(address))
    assert statuses(services.status(folder)) == ["stopped", "elsewhere"]
    with pytest.raises(NotPossibleHereError, match="was started on elsewhere"):
        up(folder, sys.executable)


def test_mlflow_answers_this_machines_names_and_no_others(tmp_path: Path) -> None:
    plan = plan_of("mlflow", tmp_path, UpOptions(host="0.0.0.0"), None, "python")
    port = plan.address["port"]
    variables = variables_of("mlflow", tmp_path, plan, {}, None)
    assert {"localhost", f"{socket.gethostname()}:{port}", f"127.0.0.1:{port}"} <= set(
        variables["MLFLOW_SERVER_ALLOWED_HOSTS"].split(",")
    )
    assert f"http://{socket.gethostname()}:{port}" in variables["MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"].split(",")
    mine = {"MLFLOW_SERVER_ALLOWED_HOSTS": "perf.example"}
    assert variables_of("mlflow", tmp_path, plan, mine, None)["MLFLOW_SERVER_ALLOWED_HOSTS"] == "perf.example"
    local = plan_of("mlflow", tmp_path, UpOptions(), None, "python")
    assert "MLFLOW_SERVER_ALLOWED_HOSTS" not in variables_of("mlflow", tmp_path, local, {}, None)


def test_loopback_is_told_from_other_addresses() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "10.0.0.1")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_no_password_is_in_a_command_or_a_state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "psycopg2")
    urls = postgres_urls("postgresql://user:secret@db.example:5433/perf")
    for name in services.NAMES:
        plan = plan_of(name, tmp_path, UpOptions(), urls, "python")
        assert "secret" not in json.dumps(plan._asdict())
        assert plan.address["database"] == "postgresql://db.example:5433/perf"
        variables = variables_of(name, tmp_path, plan, {"PREFECT_API_KEY": "k", "MLFLOW_TRACKING_URI": "u"}, urls)
        assert any("user:secret@db.example:5433/perf" in value for value in variables.values())
        assert {"prefect": "PREFECT_API_KEY", "mlflow": "MLFLOW_TRACKING_URI"}[name] not in variables


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://h/d", "of the kind 'mysql'; expected postgresql://"),
        ("postgresql://h", "names no host or no database"),
        ("postgresql://h/d?sslmode=require", "PGSSLMODE"),
    ],
)
def test_a_database_address_that_will_not_do_is_explained(folder: Path, url: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        up(folder, sys.executable, database_url=url)
    assert not (folder / "prefect").exists()


@pytest.mark.slow
def test_a_run_finds_the_real_servers_and_what_mlflow_missed_is_uploaded_later(
    folder: Path, begin_flow: BeginFlow, toy: dict[str, Any], tmp_path: Path
) -> None:
    prefect, mlflow = services.up(folder, UpOptions(), os.environ).servers
    trees = [descendants(int(server.keeper_process_id or 0)) for server in (prefect, mlflow)]
    runs, variables = tmp_path / "runs", {"PERFLADDER_SERVERS_DIR": str(folder)}
    hasty = {**variables, "MLFLOW_HTTP_REQUEST_TIMEOUT": "1", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    for pid in trees[1]:
        os.kill(pid, signal.SIGSTOP)
    try:
        flow = begin_flow(toy, variables=hasty, runs_dir=str(runs), until="stages").process
        answer = json.loads(flow.communicate(timeout=200)[0].strip().splitlines()[-1])
    finally:
        for pid in trees[1]:
            os.kill(pid, signal.SIGCONT)
    assert (answer["status"], answer["exit_code"]) == ("done", 0), answer
    run = RunDirectory.open(Path(answer["run_dir"]))
    assert run.record.prefect_flow_run_id is not None
    assert (run.record.mlflow_run_id, run.record.mlflow_tracking_uri) == (None, mlflow.api_url)
    assert f"MLflow ({mlflow.api_url})" in (run.record.mlflow_error or "")
    assert (run.path / "report.md").is_file()
    assert {path.name for path in runs.iterdir()} == {"toy"}

    command = [sys.executable, "-P", "-m", "perfladder.cli", "sync", "--json", "--out", str(runs)]
    for expected in ("uploaded", "there_already"):
        done = subprocess.run(command, env=os.environ | variables, stdout=-1, check=True, timeout=100)
        (row,) = printed("sync", done.stdout)["runs"]
        assert row["status"] == expected
    record = RunDirectory.open(run.path).record
    assert (record.mlflow_error, record.mlflow_run_id) == (None, row["mlflow_run_id"])
    assert (record.mlflow_run_url or "").startswith(f"{mlflow.url}/#/experiments/")
    assert (record.prefect_flow_run_url or "") == f"{prefect.url}/flow-runs/flow-run/{record.prefect_flow_run_id}"

    services.down(folder)
    assert not any(is_alive(pid) for tree in trees for pid in tree)
    assert read_address(folder / "mlflow") is None
