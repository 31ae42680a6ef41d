"""Run one command under the guard with a limit of time: at its end nothing that it started is left."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from perfladder.guard import guarded

_END_LIMIT_S = 20.0


def run_guarded(command: Sequence[str], *, limit_s: float, log_path: Path, folder: Path | None = None) -> int | None:
    """Run a command to its end.

    Args:
        command: The command line.
        limit_s: After so long it is ended, with all below it.
        log_path: Receives what the command prints.
        folder: Where it runs; by default here.

    Returns:
        Its exit code, 128 + the signal that ended it, or None where the limit was reached.
    """
    lifeline, writer = os.pipe()
    process = None
    try:
        try:
            with log_path.open("wb") as log:
                process = subprocess.Popen(
                    guarded(list(command), lifeline),
                    pass_fds=(lifeline,),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    # Ctrl-C reaches this process only, which then ends the command in order.
                    start_new_session=True,
                )
        finally:
            os.close(lifeline)
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        os.close(writer)
        if process is not None:
            _reap(process)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """The guard ends everything below it once its lifeline is closed."""
    try:
        process.wait(timeout=_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
