"""Climb many workloads, or one in many variations, each as a climb of its own, and put what they found side by side."""

# No postponed annotations: where a worker loads the flow from this file, Prefect cannot resolve the parameters' types.

import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from perfladder.flows.config import ProfilePipelineConfig, SweepConfig
from perfladder.flows.prefect_server import users_url
from perfladder.flows.sweep_plan import check_runner, member_variables, members_of, reserving, started_runner
from perfladder.tasks.sweeping import MemberProcesses, climb_member_task, member_name, publish_sweep, save_sweep
from perfladder.variations import Member, MemberResult, SweepResult

__all__ = ["SweepConfig", "sweep", "sweep_telling"]

_OPTIONS: dict[str, Any] = {"name": "sweep", "retries": 0, "persist_result": False}


@flow(**_OPTIONS)
def sweep(config: SweepConfig) -> SweepResult:
    """Climb each member in a process of its own; one that fails costs its row only.

    Raises:
        PerfladderError: A workload or a field that is none, or a runner that is not installed.
    """
    return _sweep(config, get_run_logger().info)


def sweep_telling(config: SweepConfig, tell: Callable[[str], None]) -> SweepResult:
    """The same flow, whose progress somebody watches."""

    @flow(**_OPTIONS)
    def sweep(config: SweepConfig) -> SweepResult:
        return _sweep(config, tell)

    return sweep(config)


def _sweep(config: SweepConfig, tell: Callable[[str], None]) -> SweepResult:
    server_url = users_url(os.environ)
    check_runner(config, server_url)
    members = members_of(config)
    folder = _folder(Path(config.runs_dir))
    results = _climb(config, members, folder, member_variables(server_url), tell)
    result = SweepResult(folder=str(folder), runner=config.runner, members=results)
    save_sweep(result, folder)
    publish_sweep(result)
    return result


def _climb(
    config: SweepConfig,
    members: list[Member],
    folder: Path,
    variables: dict[str, str | None],
    tell: Callable[[str], None],
) -> list[MemberResult]:
    """Hand the members to the runner; however that ends, none of them is left."""
    # Other processes get no such object: their end closes their members' stdin.
    processes = MemberProcesses(tell) if config.runner == "threads" else None
    with started_runner(config) as runner:
        try:
            futures = []
            for member in members:
                name = member_name(member)
                step = climb_member_task.with_options(name=name, task_run_name=name)
                parameters = {
                    "member": member,
                    "request": _request(config, member),
                    "folder": folder,
                    "variables": variables,
                    "processes": processes,
                }
                with reserving(config):
                    futures.append(runner.submit(step, parameters))
            return [_result(future, tell) for future in futures]
        finally:
            if processes is not None:
                processes.end()


def _result(future: Any, tell: Callable[[str], None]) -> MemberResult:
    found = future.result(raise_on_failure=False)
    if isinstance(found, BaseException):  # Not the member's failure, which is a result, but that of its machine, say.
        raise found
    assert isinstance(found, MemberResult)
    tell(f"{found.label}: {found.status}" + (f": {found.error}" if found.error else ""))
    return found


def _request(config: SweepConfig, member: Member) -> str:
    return ProfilePipelineConfig(
        workload=member.workload,
        base_dir=member.base_dir,
        source=member.source,
        runs_dir=str(Path(config.runs_dir).resolve()),
        until=config.until,
        tracking_uri=config.tracking_uri,
        experiment=config.experiment,
        max_artifact_bytes=config.max_artifact_bytes,
    ).model_dump_json()


def _folder(runs_dir: Path) -> Path:
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
    folder = runs_dir.resolve() / "sweeps" / name
    folder.mkdir(parents=True)
    return folder
