"""The steps of a sweep: climb each member in a process of its own, save what they found, publish it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed

from perfladder.ladder import ClimbOutcome, load_results
from perfladder.rundir import RunDirectory
from perfladder.rungs.stages import StagesResult
from perfladder.tasks.artifacts import key_of
from perfladder.tasks.steps import skill_task
from perfladder.variations import Member, MemberResult, SweepResult, render_sweep, sweep_rows, write_sweep

_END_LIMIT_S = 30.0
_TAIL_LINES = 15
_STEP = "3. Climb"
_PLAIN: dict[str, Any] = {"cache_policy": NO_CACHE, "retries": 0, "persist_result": False}
_UPLOADING: dict[str, Any] = {"cache_policy": NO_CACHE, "retries": 1, "retry_delay_seconds": 1, "persist_result": False}

Tell = Callable[[str], None]


class MemberProcesses:
    """The processes of a sweep's members, all of which end when it does.

    A member ends, and says so in its run's record, when its stdin closes: also where the process that holds the other
    end is killed.
    """

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self._running: set[subprocess.Popen[str]] = set()
        self._is_over = False
        self._lock = threading.Lock()

    def run(self, label: str, request: str, variables: Mapping[str, str], log: Path) -> dict[str, Any]:
        """Run one member to its end; returns what it answers."""
        command = [sys.executable, "-P", "-m", "perfladder.flows.member"]
        process = self._start(command, dict(variables))
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            # One that has died at once cannot read; its log then says why.
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(request + "\n")
                process.stdin.flush()
            with log.open("w", encoding="utf-8") as file:
                for line in process.stderr:
                    file.write(line)
                    self.tell(f"[{label}] {line.rstrip()}")
            answer = process.stdout.read()
            process.wait()
        finally:
            _end(process)
            self._running.discard(process)
        lines = answer.strip().splitlines()
        if lines:
            found: dict[str, Any] = json.loads(lines[-1])
            return found
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
        return {"error": f"Its process ended with {process.returncode}. Its last lines:\n{tail}", "exit_code": 3}

    def end(self) -> None:
        """End all that run, and start no more."""
        with self._lock:
            self._is_over = True
            running = list(self._running)
        for process in running:
            _close(process)
        for process in running:
            _end(process)

    def _start(self, command: list[str], variables: dict[str, str]) -> subprocess.Popen[str]:
        with self._lock:
            if self._is_over:
                raise RuntimeError("the sweep is over")
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=variables,
                # Ctrl-C at a terminal is the sweep's, which ends its members.
                start_new_session=True,
            )
            self._running.add(process)
        return process


def _close(process: subprocess.Popen[str]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _end(process: subprocess.Popen[str]) -> None:
    _close(process)
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def member_name(member: Member) -> str:
    """The name of a member's task run."""
    return f"{member.number}-{member.label}"


@skill_task(_STEP, **_PLAIN)
def climb_member_task(
    member: Member,
    request: str,
    folder: Path,
    variables: dict[str, str | None],
    processes: MemberProcesses | None = None,
) -> State[MemberResult]:
    """Climb one member in a process of its own, which holds the device while it measures.

    Args:
        member: Which one.
        request: What its process is told, as JSON.
        folder: Takes its log.
        variables: Environment variables that it has whatever this process has; None: it does not have that one.
        processes: Where the flow can end it; None: where the flow is another process.
    """
    own = processes or MemberProcesses(get_run_logger().info)
    environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        answer = own.run(member.label, request, environment, folder / f"member-{member.number}.log")
    finally:
        if processes is None:
            own.end()
    result = member_result(member, answer)
    if result.status == "done":
        return Completed(message=f"{_STEP} of SKILL.md: {result.run_dir}", data=result)
    return Failed(message=result.error, data=result)


def member_result(member: Member, answer: Mapping[str, Any]) -> MemberResult:
    """What a member's process has answered, with the metric from its run's folder."""
    known = {
        "number": member.number,
        "label": member.label,
        "source": member.source,
        "changes": member.changes,
        "host_name": socket.gethostname(),
    }
    if "error" in answer:
        status = "interrupted" if answer["exit_code"] in (130, 143) else "failed"
        return MemberResult(**known, status=status, exit_code=answer["exit_code"], error=answer["error"])
    outcome = ClimbOutcome.model_validate(answer)
    run = RunDirectory.open(Path(outcome.run_dir))
    stages = load_results(run).get("stages")
    return MemberResult(
        **known,
        status="done" if outcome.status == "done" else "failed",
        exit_code=outcome.exit_code,
        run_dir=outcome.run_dir,
        metric=stages.metric if isinstance(stages, StagesResult) else None,
        findings=outcome.findings,
        error=run.record.error,
    )


@skill_task("7. Report", name="save-sweep", task_run_name="save-sweep", **_PLAIN)
def save_sweep(result: SweepResult, folder: Path) -> None:
    """Write the sweep's files before anyone else hears of it."""
    write_sweep(result, folder)


def publish_sweep(result: SweepResult) -> None:
    """Publish as a task; without it, the folder still has everything."""
    publish_sweep_task(result, return_state=True)


@skill_task("7. Report", name="publish", task_run_name="publish", **_UPLOADING)
def publish_sweep_task(result: SweepResult) -> None:
    """Create the artifacts `sweep-<folder>` and `sweep-table-<folder>`."""
    name, where = Path(result.folder).name, f"In {result.folder}"
    create_markdown_artifact(render_sweep(result), key=key_of("sweep", name), description=where)
    create_table_artifact(sweep_rows(result), key=key_of("sweep-table", name), description=where)
