"""One measuring function in a process of its own, alone on its device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perfladder.device_lock import device_lock
from perfladder.progress import Progress
from perfladder.session import Request, Result, Session
from perfladder.target import LoadRequest, load
from perfladder.workload import WorkloadFile


def measure_alone(
    file: WorkloadFile,
    measure: Callable[[Any, Request], Result],
    request: Request,
    *,
    tell: Callable[[str], None],
    what: str,
    only: str | None = None,
    log_path: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Result:
    """Load the workload in a fresh process and measure there, alone on its device.

    Args:
        file: The workload.
        measure: A rung's measuring function.
        request: For it.
        tell: Receives lines of progress.
        what: What the measuring is called there.
        only: The stage to load alone.
        log_path: Receives what the process prints; None: a file that is gone afterwards.
        on_progress: Receives what the measuring function tells.
    """
    timeout_s = file.workload.timeout_s
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(Session(file, log_path=log_path, environment=None))
        tell("loading the target" if only is None else "loading the stage")
        info = session.call(load, LoadRequest(only=only), timeout_s=timeout_s)
        for name in info.lock_names:
            stack.enter_context(device_lock(name, what=f"{what} {file.workload.name}", tell=tell))
        tell(what)
        return session.call(measure, request, timeout_s=timeout_s, on_progress=on_progress)
