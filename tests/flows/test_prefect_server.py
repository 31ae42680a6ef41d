"""The local server's life, with a stand-in for Prefect that starts at once."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import is_alive, wait_until

from perfladder.errors import NotPossibleHereError
from perfladder.flows.prefect_server import PrefectServer, UsersServer, find_server, server_variables

MakeServer = Callable[[str], str]


def server(runs_dir: Path, python: str, **options: Any) -> PrefectServer:
    return PrefectServer(runs_dir, variables=os.environ, python=python, **options)


def pids(state: Path) -> list[int]:
    address = json.loads((state / "server.json").read_text())
    return [address["keeper_pid"], address["server_pid"]]


def wait_until_gone(found: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, found)), limit_s=20)


def test_the_server_gets_none_of_the_users_prefect_settings() -> None:
    variables = server_variables(
        Path("/state"), {"PREFECT_API_URL": "http://there", "PREFECT_API_KEY": "k", "PATH": "/bin"}
    )
    assert "PREFECT_API_URL" not in variables
    assert "PREFECT_API_KEY" not in variables
    assert variables["PATH"] == "/bin"
    assert variables["PREFECT_HOME"] == "/state"
    assert variables["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


def test_the_users_server_is_used(tmp_path: Path) -> None:
    found = find_server(tmp_path, {"PREFECT_API_URL": "http://there/api", "HOME": str(tmp_path)})
    assert isinstance(found, UsersServer)
    assert found.url == "http://there/api"


def test_an_empty_address_is_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(find_server(tmp_path, {"PREFECT_API_URL": " ", "PREFECT_HOME": str(tmp_path)}), PrefectServer)


@pytest.mark.slow
def test_the_profile_names_a_server(tmp_path: Path) -> None:
    (tmp_path / "profiles.toml").write_text('active = "mine"\n[profiles.mine]\nPREFECT_API_URL = "http://mine/api"\n')
    script = "import os; from perfladder.flows.prefect_server import *; print(find_server(Path('r'), os.environ).url)"
    environment = {
        "PATH": os.environ["PATH"],
        "PREFECT_HOME": str(tmp_path),
        "PREFECT_API_URL": "",
        "HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "http://mine/api"


@pytest.mark.slow
def test_the_last_user_ends_the_server(tmp_path: Path, fake_server: MakeServer) -> None:
    with server(tmp_path, fake_server("answers")) as first:
        url = first.wait()
        found = pids(first.state)
        with server(tmp_path, fake_server("answers")) as second:
            assert second.wait() == url
        assert all(map(is_alive, found))
    assert not any(map(is_alive, found))
    assert not (first.state / "server.json").exists()


@pytest.mark.slow
def test_the_first_user_may_leave_first(tmp_path: Path, fake_server: MakeServer) -> None:
    first, second = server(tmp_path, fake_server("answers")), server(tmp_path, fake_server("answers"))
    first.begin()
    second.begin()
    url = first.wait()
    found = pids(first.state)
    first.close()
    assert second.wait() == url
    second.close()
    assert not any(map(is_alive, found))


@pytest.mark.slow
def test_users_come_and_go_and_each_finds_a_server_that_answers(tmp_path: Path, fake_server: MakeServer) -> None:
    script = (
        "import sys, os\n"
        "from pathlib import Path\n"
        "from perfladder.flows.prefect_server import PrefectServer, is_healthy\n"
        "for _ in range(5):\n"
        "    with PrefectServer(Path(sys.argv[1]), variables=os.environ, python=sys.argv[2]) as server:\n"
        "        assert is_healthy(server.wait())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path), fake_server("answers")]
    users = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    results = [(user.communicate(timeout=120)[1], user.returncode) for user in users]
    assert [code for _, code in results] == [0] * 4, results
    assert not (tmp_path / ".perfladder/prefect/server.json").exists()


@pytest.mark.slow
def test_a_killed_user_leaves_no_server(tmp_path: Path, fake_server: MakeServer) -> None:
    script = (
        "import sys, os, time; from pathlib import Path; from perfladder.flows.prefect_server import *\n"
        "with PrefectServer(Path(sys.argv[1]), variables=os.environ, python=sys.argv[2]) as server:\n"
        "    server.wait(); print('ready', flush=True); time.sleep(600)\n"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), fake_server("answers")], stdout=subprocess.PIPE
    )
    assert user.stdout is not None
    assert user.stdout.readline() == b"ready\n"
    found = pids(tmp_path / ".perfladder/prefect")
    user.send_signal(signal.SIGKILL)
    user.communicate()
    wait_until_gone(found)
    with server(tmp_path, fake_server("answers")) as next_one:
        assert next_one.wait()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_keeper_or_server_is_replaced_for_the_next_user(
    tmp_path: Path, fake_server: MakeServer, victim: int
) -> None:
    with server(tmp_path, fake_server("answers")) as first:
        first.wait()
        found = pids(first.state)
        os.kill(found[victim], signal.SIGKILL)
        wait_until_gone(found)
        with pytest.raises(NotPossibleHereError, match="has ended"):
            first.wait()
        with server(tmp_path, fake_server("answers")) as second:
            assert second.wait()


@pytest.mark.slow
def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path, fake_server: MakeServer) -> None:
    with pytest.raises(NotPossibleHereError, match=r"has ended(?s:.*)port taken, or what else(?s:.*)--plain"):  # noqa: SIM117
        with server(tmp_path, fake_server("ends")) as one:
            one.wait()


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path, fake_server: MakeServer) -> None:
    one = server(tmp_path, fake_server("hangs"), limit_s=0.5)
    one.begin()
    found = pids(one.state)
    with pytest.raises(NotPossibleHereError, match=r"does not answer after 0\.5 s"):
        one.wait()
    one.close()
    assert not any(map(is_alive, found))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotPossibleHereError, match=r"cannot be started in .*file"):
        server(tmp_path / "file", sys.executable).begin()
