"""The example of a server: it tunes, serves several clients at a time with right answers only, and ends."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path

import processes
import pytest

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parent.parent / "docs" / "examples" / "serving"


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    """A cache of its own, and a mark on all that is started, of which nothing is left at the end."""
    for package in ("fastapi", "uvicorn", "httpx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    mark = uuid.uuid4().hex
    root = str(EXAMPLE.parents[2])
    yield {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
        "PYTHONPATH": root,
        "OMP_NUM_THREADS": "1",
    } | {processes.MARK: mark}
    processes.wait_until(lambda: not processes.marked(mark), limit_s=10)


def run(script, *arguments, env):
    command = [sys.executable, str(EXAMPLE / script), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def archive(tmp_path_factory, variables):
    path = tmp_path_factory.mktemp("served") / "model.ait"
    done = run("tune.py", path, env=variables)
    assert done.returncode == 0, done.stderr
    assert "ONNXRuntimeBackend()" in done.stdout
    return path


JSON = {"content-type": "application/json"}


def hang_up(url):
    """Clients that leave in the middle of a request, and before they have read the answer."""
    host, port = url.removeprefix("http://").split(":")
    body = json.dumps({"inputs": [[0.0] * 64]})
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    for sent in (head + body[:10], head + body) * 10:
        with socket.create_connection((host, int(port))) as client:
            client.sendall(sent.encode())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Server:
    """The server's process, from its start to its end by SIGTERM."""

    def __init__(self, *arguments, env):
        command = [sys.executable, str(EXAMPLE / "serve.py"), *map(str, arguments)]
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()

    def __enter__(self):
        import httpx

        deadline = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline, "it did not get ready"
            try:
                assert httpx.get(f"{self.url}/health", trust_env=False).json()["status"] == "ready"
                return self
            except httpx.TransportError:
                time.sleep(0.1)

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=30)
        finally:
            self.process.kill()
            self.process.wait()


def test_it_answers_several_clients_right_and_ends(archive, variables):
    import httpx

    expected = archive.parent / "expected.json"
    with Server(archive, "--port", 0, env=variables) as server:
        done = run("load_test.py", server.url, expected, "--requests", 120, "--clients", 4, "--json", env=variables)
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["num_requests"], result["num_wrong"]) == (120, 0)
        assert 0 < result["latency_p50_ms"] <= result["latency_p95_ms"]
        assert result["requests_per_s"] > 0

        refused = [{"inputs": []}, {"inputs": [[0.0] * 63]}, {"inputs": [[0.0] * 64] * 17}, {"inputs": [["x"] * 64]}]
        for body in refused:
            assert httpx.post(f"{server.url}/predict", json=body, trust_env=False).status_code == 422
        for number in ("NaN", "Infinity", "1e39"):
            body = f'{{"inputs": [[{", ".join([number] * 64)}]]}}'
            answer = httpx.post(f"{server.url}/predict", content=body, headers=JSON, trust_env=False)
            assert answer.status_code == 422, answer.text
        hang_up(server.url)
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200

        wrong = json.loads(expected.read_text())
        wrong[1]["outputs"][0][0] += 0.1
        spoilt = archive.parent / "spoilt.json"
        spoilt.write_text(json.dumps(wrong))
        done = run("load_test.py", server.url, spoilt, "--requests", 10, "--json", env=variables)
        assert done.returncode == 1
        assert json.loads(done.stdout)["num_wrong"] == 2
        assert "request 1: it is off by up to 0.1" in done.stderr

        port = server.url.rpartition(":")[2]
        done = run("serve.py", archive, "--port", port, env=variables)
        assert done.returncode != 0
        assert "Address already in use" in done.stderr
    assert server.process.returncode in (0, -signal.SIGTERM)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health", trust_env=False)


def test_several_processes_share_a_port(archive, variables):
    with Server(archive, "--port", 0, "--share-port", env=variables) as first:
        port = first.url.rpartition(":")[2]
        with Server(archive, "--port", port, "--share-port", env=variables) as second:
            arguments = (first.url, archive.parent / "expected.json", "--requests", 60, "--clients", 6, "--json")
            done = run("load_test.py", *arguments, env=variables)
            assert json.loads(done.stdout)["num_wrong"] == 0, done.stderr
            assert first.url == second.url
        assert second.process.returncode in (0, -signal.SIGTERM)
        done = run("load_test.py", *arguments, env=variables)
        assert json.loads(done.stdout)["num_wrong"] == 0, "the other one serves on"
