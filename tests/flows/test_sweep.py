"""The flow that climbs many workloads, with real servers and processes; Ray and Dask where they are installed."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import MARK, marked, wait_until

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.flows import sweep_plan
from perfladder.flows.config import SweepConfig
from perfladder.flows.run import run_sweep
from perfladder.flows.sweep_plan import check_runner, member_variables
from perfladder.rundir import RunDirectory
from perfladder.variations import SweepResult

HERE = Path(__file__).parent
SERVER = "http://server/api"
BeginFlow = Callable[..., Any]


def config(**fields: Any) -> SweepConfig:
    return SweepConfig.model_validate({"workloads": ["diffusion"], **fields})


@pytest.mark.parametrize(
    ("fields", "server", "message"),
    [
        ({"address": "tcp://host:8786"}, SERVER, "address: 'threads' are of this process"),
        ({"gpus_per_member": 1}, None, "gpus_per_member: only ray reserves GPUs"),
        ({"runner": "dask", "address": "tcp://host:8786"}, None, r"PREFECT_API_URL"),
    ],
)
def test_options_that_do_not_fit_are_explained(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], server: str | None, message: str
) -> None:
    monkeypatch.setattr(sweep_plan.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(InputError, match=message):
        check_runner(config(**fields), server)


@pytest.mark.parametrize("runner", ["ray", "dask"])
def test_a_runner_that_is_not_installed_is_one_message(monkeypatch: pytest.MonkeyPatch, runner: str) -> None:
    monkeypatch.setattr(sweep_plan.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotPossibleHereError, match=rf"prefect-{runner}, .* pip install 'perfladder\[{runner}\]'"):
        run_sweep(config(runner=runner))


def test_wrong_input_starts_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="measured_rns: unknown field"):
        run_sweep(config(vary={"measured_rns": [1]}, runs_dir=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


def test_members_have_the_flows_threads_whatever_a_cluster_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    found = member_variables(SERVER)
    assert (found["OMP_NUM_THREADS"], found["MKL_NUM_THREADS"]) == ("3", None)
    assert found["PREFECT_API_URL"] == SERVER
    assert "PREFECT_API_URL" not in member_variables(None)


class Sweep:
    """The command in a process of its own, whose processes carry a mark."""

    def __init__(self, folder: Path, runs_dir: Path, *arguments: str) -> None:
        self.mark, self.runs_dir = str(folder), runs_dir
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        own = {MARK: self.mark, "HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        own["RAY_TMPDIR"] = "/tmp"  # Paths of sockets are short.
        command = [sys.executable, "-P", "-m", "perfladder.cli", "sweep", *arguments, "--json", "--out", str(runs_dir)]
        self.log = folder / "stderr.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env={**kept, **own}, cwd=folder
            )

    def result(self) -> SweepResult:
        out, _ = self.process.communicate(timeout=280)
        assert self.process.returncode in (0, 5), self.log.read_text() + out
        wait_until(lambda: marked(self.mark) == [], 30)
        return SweepResult.model_validate_json(out)


def write(folder: Path, name: str, **fields: Any) -> str:
    path = folder / f"{name}.yaml"
    target = fields.pop("target", "toy.py:build")
    whole = {"name": name, "target": f"{HERE}/{target}", "warmup_runs": 1, "measured_runs": 3, **fields}
    path.write_text(json.dumps(whole))
    return str(path)


@pytest.mark.slow
def test_members_are_climbs_of_their_own_and_one_that_fails_costs_its_row(tmp_path: Path, runs_dir: Path) -> None:
    from mlflow import MlflowClient

    broken = write(tmp_path, "broken", target="toy.py:build_nothing")
    ranks = write(tmp_path, "two-ranks", target="toy_ranks.py:build", nproc=2)
    run = Sweep(tmp_path, runs_dir, broken, ranks, "--until", "regions", "--at-once", "2")
    result = run.result()
    assert [(one.number, one.label, one.status, one.exit_code) for one in result.members] == [
        (1, "broken", "failed", 3),
        (2, "two-ranks", "done", 0),
    ], run.log.read_text()
    assert run.process.returncode == 5
    failed, done = result.members
    assert "the toy cannot be built" in str(failed.error)
    assert failed.metric is None
    assert done.metric is not None

    folder = Path(result.folder)
    assert {path.name for path in folder.iterdir()} == {"sweep.json", "sweep.md", "member-1.log", "member-2.log"}
    assert SweepResult.model_validate_json((folder / "sweep.json").read_text()) == result
    table = (folder / "sweep.md").read_text()
    assert f"| 2 | two-ranks | done | latency_p50 {done.metric.value:.4g} ms |" in table
    assert "[two-ranks] stages (rung 1)" in run.log.read_text()

    record = RunDirectory.open(Path(str(done.run_dir))).record
    assert {entry.name: entry.status for entry in record.rungs} == {
        "stages": "done",
        "capture": "not_applicable",
        "regions": "done",
    }
    client = MlflowClient(tracking_uri=record.mlflow_tracking_uri)
    nested = client.search_runs(
        [client.get_run(record.mlflow_run_id).info.experiment_id],
        f"tags.mlflow.parentRunId = '{record.mlflow_run_id}'",
    )
    by_rung = {one.data.tags["perfladder.rung"]: one for one in nested}
    stages = by_rung["stages"].data.metrics
    assert stages["rank/1/stage/work/self_ms_p50"] > stages["rank/0/stage/work/self_ms_p50"] > 0
    assert stages["rank/1/lag_ms"] > 0
    assert by_rung["regions"].data.metrics["rank/0/profiled_ms"] > 0
    files = {info.path for info in client.list_artifacts(by_rung["regions"].info.run_id)}
    assert {"regions.rank0.trace.json", "regions.rank1.trace.json"} <= files


@pytest.mark.slow
def test_a_sweep_that_is_terminated_leaves_no_member(tmp_path: Path, runs_dir: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    held = write(tmp_path, "held", target_args={"hold": str(hold)})
    run = Sweep(tmp_path, runs_dir, held, "--until", "stages")
    wait_until(lambda: "stages (rung 1)" in run.log.read_text(), 120)
    run.process.send_signal(signal.SIGTERM)
    run.process.communicate(timeout=60)
    wait_until(lambda: marked(run.mark) == [], 60)
    (path,) = (runs_dir / "held").iterdir()
    assert RunDirectory.open(path).record.status == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["ray", "dask"])
def test_a_cluster_climbs_the_members(tmp_path: Path, runs_dir: Path, runner: str) -> None:
    pytest.importorskip(f"prefect_{runner}", reason=f"pip install 'perfladder[{runner}]'")
    toy = write(tmp_path, f"by-{runner}")
    options = ["--until", "stages", "--vary", "measured_runs=[3, 4]", "--at-once", "2", "--runner", runner]
    result = Sweep(tmp_path, runs_dir, toy, *options).result()
    assert [(one.status, one.changes) for one in result.members] == [
        ("done", {"measured_runs": 3}),
        ("done", {"measured_runs": 4}),
    ]
    assert len({one.run_dir for one in result.members}) == 2
