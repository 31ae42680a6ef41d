"""A Prefect server and MLflow on PostgreSQL, with workers of two pools that contend for one device."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import postgres
import pytest
from processes import wait_until

from perfladder.errors import NotPossibleHereError
from perfladder.flows import services
from perfladder.flows.databases import postgres_urls
from perfladder.flows.server_plans import UpOptions
from perfladder.guard import descendants
from perfladder.rundir import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
POOLS = ("h100", "a100")


until = functools.partial(wait_until, limit_s=240, poll_s=0.2)


@pytest.fixture(scope="module")
def database_url() -> Iterator[str]:
    programs = postgres.binaries()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    try:
        postgres_urls("postgresql://user@host/database")
    except NotPossibleHereError as error:
        pytest.skip(str(error))
    with postgres.cluster(programs) as url:
        yield url


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("many-machines")


@pytest.fixture(scope="module")
def servers(folder: Path, database_url: str) -> Iterator[services.ServersStatus]:
    found = services.up(folder / "servers", UpOptions(database_url=database_url), os.environ)
    yield found
    services.down(folder / "servers")


@pytest.fixture(scope="module")
def variables(folder: Path, servers: services.ServersStatus) -> dict[str, str]:
    """The environment of a machine that works for these servers."""
    prefect, mlflow = servers.servers
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    return kept | {
        "PREFECT_API_URL": str(prefect.api_url),
        "MLFLOW_TRACKING_URI": str(mlflow.api_url),
        "PREFECT_HOME": str(folder / "home"),
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "true",
        "PERFLADDER_HOME": str(folder),
        "TMPDIR": str(folder),
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def client(variables: dict[str, str]) -> Iterator[Any]:
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: variables["PREFECT_API_URL"]}), get_client(sync_client=True) as found:
        yield found


@pytest.fixture(scope="module")
def workers(folder: Path, variables: dict[str, str], client: Any) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One process worker a pool, which it makes; then what docs/examples/work-pools deploys."""
    command = [sys.executable, "-P", "-m", "prefect"]
    started = []
    try:
        for pool in POOLS:
            start = [*command, "worker", "start", "--pool", pool, "--type", "process", "--limit", "1"]
            with (folder / f"{pool}.log").open("w") as log:
                started.append(subprocess.Popen(start, env=variables, stdout=log, stderr=log, cwd=folder))
        until(lambda: {pool.name for pool in client.read_work_pools()} >= set(POOLS))
        file = str(ROOT / "docs/examples/work-pools/prefect.yaml")
        deploy = [*command, "--no-prompt", "deploy", "--all", "--prefect-file", file]
        done = subprocess.run(deploy, env=variables, capture_output=True, text=True, cwd=folder, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield started
    finally:
        end(started)


def end(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.send_signal(signal.SIGTERM)
    for worker in workers:
        worker.wait(60)


def deploy_from_python(home: str) -> Any:
    """Deploy the flow into the second pool as the documentation does; returns the deployment's id."""
    from prefect.deployments.runner import EntrypointType

    from perfladder.flows.profile_pipeline import profile_pipeline

    return profile_pipeline.deploy(
        name="python",
        work_pool_name="a100",
        entrypoint_type=EntrypointType.MODULE_PATH,
        job_variables={"working_dir": home},
        build=False,
        push=False,
        print_next_steps=False,
    )


def query(url: str, sql: str) -> Any:
    import asyncpg

    async def ask() -> Any:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return asyncio.run(ask())


def run_dirs(folder: Path, name: str) -> list[Path]:
    return sorted((folder / "runs" / name).glob("*"))


def span_of_measuring(run_dir: Path) -> tuple[float, float]:
    spans = []
    for entry in RunDirectory.open(run_dir).record.rungs:
        result = json.loads((run_dir / entry.folder / f"{entry.name}.json").read_text())
        start = datetime.fromisoformat(result["started_at"]).timestamp()
        spans.append((start, start + result["duration_s"]))
    return min(start for start, _ in spans), max(end for _, end in spans)


def messages(client: Any, flow_run: Any) -> str:
    from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId

    logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run.id])))
    return "\n".join(log.message for log in logs)


def test_workers_of_two_pools_measure_on_one_device_in_turn(
    folder: Path,
    database_url: str,
    variables: dict[str, str],
    servers: services.ServersStatus,
    client: Any,
    workers: list[subprocess.Popen[bytes]],
    toy: dict[str, Any],
) -> None:
    hold = folder / "hold"
    hold.touch()
    deployments = {one.name: one for one in client.read_deployments() if one.entrypoint.endswith("profile_pipeline")}
    assert set(deployments) == set(POOLS)
    deployments["a100"] = client.read_deployment(deploy_from_python(variables["PERFLADDER_HOME"]))

    def start(pool: str, **fields: Any) -> Any:
        workload = {**toy, "name": pool, **fields}
        config = {"workload": workload, "base_dir": str(Path(__file__).parent), "until": "stages"}
        return client.create_flow_run_from_deployment(deployments[pool].id, parameters={"config": config})

    def logs() -> str:
        return "".join((folder / f"{pool}.log").read_text() for pool in POOLS)

    first = start("h100", target_args={"hold": str(hold)})
    try:
        until(lambda: [limit.active_slots for limit in client.read_global_concurrency_limits(10, 0)] == [1])
        second = start("a100")
        until(lambda: "Waiting for the concurrency limit perfladder-cpu-" in messages(client, second))
        assert not list((folder / "runs" / "a100").glob("*/1-stages/stages.json"))
        hold.unlink()
        until(lambda: all(client.read_flow_run(run.id).state.is_final() for run in (first, second)))
    except AssertionError as error:
        raise AssertionError(logs()) from error
    assert [client.read_flow_run(run.id).state_name for run in (first, second)] == ["Completed"] * 2, logs()
    paths = [path for pool in POOLS for path in run_dirs(folder, pool)]
    assert len(paths) == 2
    (_, end), (begin, _) = map(span_of_measuring, paths)
    assert end <= begin
    assert [limit.active_slots for limit in client.read_global_concurrency_limits(10, 0)] == [0]

    records = [RunDirectory.open(path).record for path in paths]
    assert [record.mlflow_tracking_uri for record in records] == [variables["MLFLOW_TRACKING_URI"]] * 2
    assert query(database_url, "SELECT count(*) FROM prefect.flow_run") == 2
    tags = "SELECT count(DISTINCT value) FROM mlflow.tags WHERE key = 'perfladder.run_id'"
    assert query(database_url, tags) == 2


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_the_server_takes_the_pools_of_the_documentation(client: Any, kind: str) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate

    template = json.loads((ROOT / f"docs/examples/work-pools/{kind}.json").read_text())
    made = client.create_work_pool(WorkPoolCreate(name=f"{kind}-h100", type=kind, base_job_template=template))
    assert made.base_job_template == template


def test_down_ends_all_that_uses_the_database(
    folder: Path, database_url: str, servers: services.ServersStatus, workers: list[subprocess.Popen[bytes]]
) -> None:
    assert {server.database for server in servers.servers} == {"postgresql://" + database_url.rpartition("@")[2]}
    assert "secret" not in servers.model_dump_json()
    pids = [pid for one in servers.servers for pid in descendants(int(one.keeper_process_id or 0))]
    assert len(pids) >= 2
    end(workers)
    services.down(folder / "servers")
    until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], limit_s=20)
    others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    until(lambda: query(database_url, others) == 0, limit_s=20)
