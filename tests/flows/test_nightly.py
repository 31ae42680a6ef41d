"""A night with real servers: a target that a file makes slower, over a history that only MLflow has."""

import functools
import http.server
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from processes import wait_until

from perfladder.comparing.differences import OF_THE_MACHINE
from perfladder.ladder import climb
from perfladder.nightly.config import NightlyConfig
from perfladder.nightly.model import Night
from perfladder.nightly.records import night_of, read_record, write_night
from perfladder.rundir import RunDirectory
from perfladder.tasks.nights import night_tags
from perfladder.tasks.store import TrackingStore, resolve_tracking_uri
from perfladder.workload import WorkloadFile, parse_workload

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "nightly"
NUM_NIGHTS = 12
TARGET = """
import time
from pathlib import Path

import torch


class Pipeline:
    def __init__(self, flag):
        self.encoder, self.decoder = torch.nn.Linear(8, 8), Decoder(flag)

    def __call__(self):
        return self.decoder(self.encoder(torch.ones(1, 8)))


class Decoder(torch.nn.Module):
    def __init__(self, flag):
        super().__init__()
        self.flag = Path(flag)

    def forward(self, x):
        time.sleep(0.2 if self.flag.exists() else 0.02)
        return x


def build(flag):
    return Pipeline(flag)


def build_nothing():
    raise RuntimeError("there is nothing to build")
"""


until = functools.partial(wait_until, limit_s=120, poll_s=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nightly")


@pytest.fixture(scope="module")
def variables(folder: Path, server_variables: dict[str, str]) -> dict[str, str]:
    """With a temporary folder of its own, it does not wait for other jobs of this machine."""
    return {**server_variables, "TMPDIR": str(folder)}


@pytest.fixture(scope="module")
def alerts(client: Any) -> Iterator[list[dict[str, str]]]:
    """What the webhook has received; block and automation are made by the script of the documentation."""
    received: list[dict[str, str]] = []

    class Webhook(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Webhook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    spec = importlib.util.spec_from_file_location("nightly_alert", EXAMPLE / "alert.py")
    assert spec is not None
    assert spec.loader is not None
    alert = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alert)
    for _ in range(2):
        alert.make_alert(f"http://127.0.0.1:{server.server_address[1]}/")
    assert len(client.read_automations_by_name(alert.NAME)) == 1
    yield received
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def workloads(folder: Path) -> Path:
    """Two workloads: one that a file makes slower, and one that cannot be built."""
    (folder / "planted.py").write_text(TARGET)
    made = folder / "workloads"
    made.mkdir()
    common = {"device": "cpu", "warmup_runs": 1, "measured_runs": 3, "launches": 1}
    planted = {"name": "planted", "target": "../planted.py:build", "target_args": {"flag": str(folder / "slow")}}
    (made / "planted.yaml").write_text(yaml.safe_dump({**planted, **common}))
    broken = {"name": "broken", "target": "../planted.py:build_nothing"}
    (made / "broken.yaml").write_text(yaml.safe_dump({**broken, **common}))
    return made


@pytest.fixture(scope="module")
def store_uri(folder: Path, workloads: Path) -> str:
    """A store with good nights; the machine was always busy then."""
    workload = parse_workload(yaml.safe_load((workloads / "planted.yaml").read_text()))
    outcome = climb(WorkloadFile(workload, workloads), runs_dir=folder / "elsewhere", until="stages")
    run = RunDirectory.open(Path(outcome.run_dir))
    night = night_of(run.path)
    uri = resolve_tracking_uri(None, {}, folder)
    with TrackingStore(uri, experiment="perfladder", runs_dir=folder) as store:
        for place in range(NUM_NIGHTS):
            write_night(night_of_day(night, place))
            tags = {"perfladder.workload": night.workload, **night_tags(run)}
            store.ask(lambda target, tags=tags: target.client.create_run(target.experiment_id, tags=tags))
    shutil.rmtree(folder / "elsewhere")
    return uri


def night_of_day(night: Night, place: int) -> Night:
    """What was measured, as a good night of another day, with a level up to 1 % away."""
    changes: dict[str, Any] = {"run_id": f"202601{place + 1:02d}T020000-{place:06x}", "verdict": "ok"}
    changes |= {"started_at": f"2026-01-{place + 1:02d}T02:00:00+00:00", "commit": f"{place:040x}"}
    changes |= {"launches": [value * (1 + 0.01 * (place % 3 - 1)) for value in night.launches]}
    return night.model_copy(update={**changes, "disturbances": list(OF_THE_MACHINE)})


def call(variables: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "perfladder.cli", "nightly", *arguments]
    folder = variables["TMPDIR"]
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=folder, timeout=240, check=False)


def test_a_planted_regression_fails_the_flow_run_and_raises_the_alarm(
    folder: Path, variables: dict[str, str], client: Any, alerts: list[dict[str, str]], workloads: Path, store_uri: str
) -> None:
    (folder / "slow").touch()
    options = ["--until", "stages", "--second-after-s", "0", "--out", str(folder / "runs"), "--json"]
    done = call(variables, "--workloads", str(workloads), "--tracking-uri", store_uri, *options)
    assert done.returncode == 1, done.stderr
    outcome = json.loads(done.stdout)
    rows = {row["workload"]: row for row in outcome["workloads"]}
    assert (rows["broken"]["status"], rows["broken"]["exit_code"]) == ("failed", 3)
    verdict = rows["planted"]["verdict"]
    assert (verdict["kind"], verdict["is_new"], verdict["num_baseline_nights"]) == ("regression", True, 10)
    assert verdict["second_value"] > 5 * verdict["baseline"]
    assert verdict["moved"][0]["name"] == "decoder"
    assert verdict["commits"]["last_good"] == f"{NUM_NIGHTS - 1:040x}"

    (flow_run,) = (run for run in client.read_flow_runs() if run.flow_id == flow_id(client))
    assert flow_run.state.type.value == "FAILED"
    for text in ("regression: planted", "decoder +", "failed: broken", "nothing to build"):
        assert text in flow_run.state.message
    published = {artifact.key: artifact.data for artifact in client.read_artifacts()}
    assert "# planted: regression" in published["night-planted"]
    assert {row["verdict"] for row in json.loads(published["nightly"])} == {"regression", "failed"}

    (alert,) = until(lambda: alerts, limit_s=30)
    assert "planted" in alert["subject"]
    assert "decoder +" in alert["body"]
    assert rows["planted"]["run_dir"] in alert["body"]
    assert_kept(store_uri, rows["planted"])


def flow_id(client: Any) -> Any:
    return client.read_flow_by_name("nightly").id


def assert_kept(store_uri: str, row: dict[str, Any]) -> None:
    """Both measurements are nights in the store, as in their folders."""
    from mlflow import MlflowClient

    store = MlflowClient(tracking_uri=store_uri)
    run = store.get_run(row["mlflow_run_id"])
    assert run.data.tags["perfladder.night.verdict"] == "regression"
    assert run.data.metrics["night/change_ratio"] > 5
    assert {"night.json", "night.md"} <= {info.path for info in store.list_artifacts(run.info.run_id)}
    first = read_record(Path(row["run_dir"])).night
    (second,) = store.search_runs([run.info.experiment_id], f"tags.`perfladder.night.second_of` = '{first.run_id}'")
    assert second.data.tags["perfladder.run_id"] == Path(row["second_run_dir"]).name


def test_the_deployments_of_the_documentation_name_the_flow_and_fit_its_parameter() -> None:
    from prefect.flows import load_flow_from_entrypoint

    from perfladder.flows.nightly import nightly

    data = yaml.safe_load((EXAMPLE / "prefect.yaml").read_text())
    assert [deployment["name"] for deployment in data["deployments"]] == ["every-night", "release-baseline"]
    for deployment in data["deployments"]:
        assert load_flow_from_entrypoint(deployment["entrypoint"]) is nightly
        NightlyConfig.model_validate(deployment["parameters"]["config"])
