"""A finished run directory, written by hand, and a store to upload it to."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from perfladder.ladder import rung_named
from perfladder.rundir import RunDirectory
from perfladder.rungs.base import RungResult
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.stages import MetricValue, ScenarioTiming, StagesResult, StageTiming
from perfladder.stats import Interval, Samples, summarize
from perfladder.tasks.store import Target, TrackingStore, resolve_tracking_uri
from perfladder.workload import parse_workload

STARTED_AT = "2026-01-02T03:04:05.678+00:00"
SHARES = {"half": Interval(low=0.4, high=0.6)}


def stage(name: str) -> StageTiming:
    samples = Samples(launches=[[4.0, 5.0, 6.0]])
    return StageTiming(
        name=name,
        owner_type="torch.nn.Linear",
        calls_per_run=2.0,
        total_ms=samples,
        self_ms=samples,
        call_ms=summarize(samples.values),
        share=0.5,
        share_interval=SHARES["half"],
    )


@pytest.fixture
def stages_result() -> StagesResult:
    """Two stages of 5 ms in a run of 10 ms; one has a name that MLflow refuses."""
    scenario = ScenarioTiming(
        name="default",
        wall_ms=Samples(launches=[[9.0, 10.0, 11.0]]),
        outside_ms=Samples(launches=[[1.0, 1.0, 1.0]]),
        outside_share=0.1,
        outside_share_interval=SHARES["half"],
        stages=[stage("unet"), stage("down(0)")],
    )
    interval = Interval(low=9.0, high=11.0)
    return StagesResult(
        started_at=STARTED_AT,
        duration_s=1.5,
        metric=MetricValue(name="latency_p50", value=10.0, unit="ms", interval=interval),
        first_call_ms=50.0,
        peak_host_rss_bytes=1024,
        scenarios=[scenario, scenario.model_copy(update={"name": "large", "stages": []})],
    )


@pytest.fixture
def make_run(tmp_path: Path, stages_result: StagesResult) -> Callable[..., RunDirectory]:
    """Make a run with stages and a capture; `long` becomes an input of the workload."""

    def write(run: RunDirectory, result: RungResult) -> Path:
        rung = rung_named(result.rung)
        folder = run.rung_folder(rung.number, rung.name)
        run.write_result(folder, rung.name, result, result.status, result.reason)
        return folder

    def make(**inputs: str) -> RunDirectory:
        workload = parse_workload({"name": "toy", "target": "toy:build", "inputs": {"text": "hello", **inputs}})
        run = RunDirectory.create(tmp_path / "runs", workload, source="toy.yaml", base_dir=tmp_path)
        write(run, stages_result)
        captured = write(run, CaptureResult(started_at=STARTED_AT, duration_s=0.5, num_bytes=7))
        (captured / "tensors.safetensors").write_bytes(b"a picture of a user")
        (run.path / "session.log").write_text("what the target printed")
        (run.path / "report.md").write_text("# Report")
        (run.path / "report.html").write_text("<!DOCTYPE html>")
        run.update(status="done", exit_code=0, ended_at="2026-01-02T03:05:05+00:00")
        return run

    return make


@pytest.fixture(scope="session")
def store_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One SQLite store for all tests here: making one takes seconds."""
    return resolve_tracking_uri(None, {}, tmp_path_factory.mktemp("store"))


@pytest.fixture
def target(store_uri: str, tmp_path: Path) -> Iterator[Target]:
    """The open store, with an experiment of the test's own."""
    with TrackingStore(store_uri, experiment=tmp_path.name, runs_dir=tmp_path) as store:
        store.wait()
        assert store.problem is None
        yield store._target()


@pytest.fixture(scope="session")
def loaded_info() -> str:
    """`environment.json` of a run on this machine."""
    from perfladder.target import LoadedTarget

    workload = parse_workload({"name": "toy", "target": "toy:build"})
    return LoadedTarget.of(str, workload).info({}).model_dump_json()
