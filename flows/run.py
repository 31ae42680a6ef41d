"""The command line's way to run the flow: what takes long begins first, and nothing is measured before all is ready."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfladder.comparing.model import RunComparison
from perfladder.flows.begin import begin, begin_tuning
from perfladder.flows.config import CompareRunsConfig, ProfilePipelineConfig, SweepConfig, TunePipelineConfig
from perfladder.flows.prefect_server import AnyServer, PrefectServer, UsersServer, find_server, users_url
from perfladder.flows.sweep_plan import check_runner, members_of
from perfladder.ladder import ClimbOutcome
from perfladder.progress import Progress
from perfladder.rungs.cost import Ask
from perfladder.tasks.variables import variables_set
from perfladder.tuning.proof_model import ProofOutcome
from perfladder.variations import SweepResult

if TYPE_CHECKING:
    from perfladder.nightly.config import NightlyConfig
    from perfladder.nightly.outcome import NightlyOutcome

_DRAIN_LIMIT_S = 10.0


def run_profile_pipeline(
    config: ProfilePipelineConfig,
    tell: Callable[[str], None] = lambda _: None,
    *,
    ask: Ask | None = None,
    step: bool = False,
) -> ClimbOutcome:
    """Run the flow with the Prefect server that the user's settings name, that is up, or that starts with it.

    Args:
        config: What to profile.
        tell: Shows one line of progress.
        ask: Asks the user at a terminal about a rung over budget; None: it is skipped.
        step: Whether to ask before every rung but the first.

    Raises:
        PerfladderError: Nothing could be measured: a wrong workload, a target that does not load, no server.
    """
    with (
        begin(config, tell, ask=ask, step=step) as begun,
        find_server(Path(config.runs_dir), os.environ) as server,
        variables_set(_client_variables(server, os.environ)),
    ):
        # Importing Prefect takes a second or more: after the children and the server have started.
        from perfladder.flows.profile_pipeline import climb_begun

        begun.ladder.wait_until_loaded()
        begun.store.wait()
        is_shared = isinstance(server, UsersServer)
        with _prefect_at(server.wait(), server):
            return climb_begun(config.model_copy(update={"tracking_uri": None}), begun, is_shared=is_shared)


def run_tune_pipeline(
    config: TunePipelineConfig,
    tell: Callable[[str], None] = lambda _: None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> ProofOutcome:
    """Run the flow that tunes with proof, with the Prefect server that there is or one that starts with it.

    Args:
        config: What to tune.
        tell: Shows one line of progress.
        on_progress: Receives how far a step is.

    Raises:
        PerfladderError: There is nothing to prove: a wrong workload, a tuning that failed, no server.
    """
    with (
        begin_tuning(config, tell, on_progress) as begun,
        find_server(Path(config.runs_dir), os.environ) as server,
        variables_set(_client_variables(server, os.environ)),
    ):
        from perfladder.flows.tune_pipeline import prove_begun

        begun.store.wait()
        is_shared = isinstance(server, UsersServer)
        with _prefect_at(server.wait(), server):
            return prove_begun(config.model_copy(update={"tracking_uri": None}), begun, is_shared=is_shared)


def run_compare_runs(config: CompareRunsConfig) -> RunComparison:
    """Run the flow that compares finished runs, with a local Prefect server or the one that the user's settings name.

    Raises:
        PerfladderError: A run is not found, the sides do not do the same work, or there is no server.
    """
    with (
        find_server(Path(config.runs_dir), os.environ) as server,
        variables_set(_client_variables(server, os.environ)),
    ):
        from perfladder.flows.compare_runs import compare_runs

        with _prefect_at(server.wait(), server):
            return compare_runs(config)


def run_sweep(config: SweepConfig, tell: Callable[[str], None] = lambda _: None) -> SweepResult:
    """Run the flow that climbs many workloads; its members use the same Prefect server.

    Raises:
        PerfladderError: A workload or a field that is none, a runner that is not installed, no server.
    """
    check_runner(config, users_url(os.environ))
    members_of(config)
    with (
        find_server(Path(config.runs_dir), os.environ) as server,
        variables_set(_client_variables(server, os.environ)),
    ):
        from perfladder.flows.sweep import sweep_telling

        with _prefect_at(server.wait(), server):
            return sweep_telling(config, tell)


def run_nightly(config: NightlyConfig, tell: Callable[[str], None] = lambda _: None) -> NightlyOutcome:
    """Run one night now, with the Prefect server that the user's settings name, that is up, or that starts with it.

    Raises:
        PerfladderError: There is nothing to profile, a baseline is not found, or there is no server.
    """
    from perfladder.nightly.watch import require_own_names, workload_files

    # What is wrong with the folder is told before a server is started for it.
    require_own_names(workload_files(Path(config.workloads)))
    with (
        find_server(Path(config.runs_dir), os.environ) as server,
        variables_set(_client_variables(server, os.environ)),
    ):
        from perfladder.flows.nightly import nightly_now

        with _prefect_at(server.wait(), server):
            return nightly_now(config, tell, is_shared=isinstance(server, UsersServer))


def _client_variables(server: AnyServer, variables: Mapping[str, str]) -> dict[str, str]:
    """What Prefect reads when it is imported; whatever the user has set stays."""
    wanted = {}
    if not variables.get("PREFECT_LOGGING_LEVEL"):
        wanted["PREFECT_LOGGING_LEVEL"] = "WARNING"
        # What fails is told by the ladder, and as this run's own error; Prefect need not show it again, with its stack.
        wanted |= {f"PREFECT_LOGGING_LOGGERS_PREFECT_{kind}_RUNS_LEVEL": "CRITICAL" for kind in ("FLOW", "TASK")}
    if not isinstance(server, UsersServer):
        wanted |= {"PREFECT_HOME": str(server.state), "DO_NOT_TRACK": "true"}
    missing = {name: value for name, value in wanted.items() if not variables.get(name)}
    for name in ("NO_PROXY", "no_proxy"):
        missing[name] = ",".join(filter(None, [variables.get(name), "127.0.0.1"]))
    return missing


@contextmanager
def _prefect_at(url: str, server: AnyServer) -> Iterator[None]:
    """Prefect's settings with this server; at the end, what is still on its way is sent."""
    from prefect import settings

    wanted: dict[Any, Any] = {settings.PREFECT_API_URL: url}
    if not isinstance(server, UsersServer):
        # Nobody listens to heartbeats there, and their thread is waited for, up to a second. A local server that has
        # died costs each call a minute with the usual five retries, 14 s with three; a busy SQLite needs more than one.
        wanted |= {settings.PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, settings.PREFECT_CLIENT_MAX_RETRIES: 3}
    if isinstance(server, PrefectServer):
        # It has no pages, and ends with the run.
        wanted[settings.PREFECT_UI_URL] = "none"
    with settings.temporary_settings(wanted):
        try:
            yield
        finally:
            # In a thread of its own: in a notebook, this one has a running event loop.
            thread = threading.Thread(target=_drain, daemon=True)
            thread.start()
            thread.join(3 * _DRAIN_LIMIT_S)


def _drain() -> None:
    """Send what is on its way, within a limit.

    What then still waits for a server that has died is given up: the interpreter would wait for it at its end, for
    minutes. Prefect has no public way to do so.
    """
    from prefect._internal.concurrency.threads import get_global_loop
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    EventsWorker.drain_all(timeout=_DRAIN_LIMIT_S)
    APILogWorker.drain_all(timeout=_DRAIN_LIMIT_S)
    if (loop := get_global_loop()._loop) is not None:
        loop.call_soon_threadsafe(_cancel_services, loop)


def _cancel_services(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        if getattr(task.get_coro(), "__qualname__", "").endswith("QueueServiceBase._run"):
            task.cancel()
