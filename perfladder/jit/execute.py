"""Run an unmodified script in a process of its own, with just-in-time tuning on, and read what it tuned."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from perfladder.errors import InputError, WorkloadError
from perfladder.jit.report import JitReport
from perfladder.models import SCHEMA_VERSION, Model

_END_S = 10.0


class ExecResult(Model):
    """How a script ended, and what was tuned in it."""

    schema_version: int = SCHEMA_VERSION
    script: str
    arguments: list[str]
    has_failed: bool = Field(description="It raised, or a signal ended it.")
    script_exit_code: int = Field(description="Its own; minus the number of a signal that ended it.")
    num_tuned: int = Field(description="Modules that were served by what was chosen.")
    num_tried: int = Field(description="Candidates that were tried in this run.")
    num_reused: int = Field(description="Candidates that an earlier process had tried.")
    num_builds: int = Field(description="Builds in the script's process.")
    jit: JitReport | None = Field(description="None: it ended without telling, as by a signal or `os._exit`.")

    @property
    def exit_code(self) -> int:
        """The script's own; 3 if it failed."""
        return WorkloadError.exit_code if self.has_failed else self.script_exit_code

    def describe(self) -> str:
        """What was tuned, as a table."""
        if self.jit is None:
            return "The script ended without telling what was tuned.\n"
        counts = f"{self.num_tuned} tuned; candidates: {self.num_tried} tried, {self.num_reused} known from before"
        return f"{self.jit.describe()}{counts}.\n"


def execute_tuned(script: str, arguments: Sequence[str], *, keeps_stdout: bool) -> ExecResult:
    """Run a script to its end; its input and its errors are this process's own.

    Args:
        script: A Python file.
        arguments: Its own.
        keeps_stdout: Let it print where this process prints; otherwise it prints to stderr.

    Raises:
        InputError: There is no such file.
    """
    if not Path(script).is_file():
        raise InputError(f"{script} is no file; give the script that you would give to python.")
    with tempfile.TemporaryDirectory(prefix="perfladder-exec-") as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-P", "-m", "perfladder.jit.script", str(report), script, *arguments]
        process = subprocess.Popen(command, stdout=None if keeps_stdout else sys.stderr)
        code = _wait(process)
        jit = JitReport.model_validate_json(report.read_bytes()) if report.is_file() else None
        has_raised = report.with_suffix(".failed").is_file()
    graphs = list(jit.graphs) if jit is not None else []
    return ExecResult(
        script=script,
        arguments=list(arguments),
        has_failed=has_raised or code < 0,
        script_exit_code=code,
        num_tuned=jit.num_tuned if jit is not None else 0,
        num_tried=sum(graph.num_tried for graph in graphs),
        num_reused=sum(graph.num_reused for graph in graphs),
        num_builds=sum(graph.num_builds for graph in graphs),
        jit=jit,
    )


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Its exit code; what interrupts this process ends the script too."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal has told the script as well.
        process.wait(_END_S)
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
