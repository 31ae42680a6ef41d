"""`perfladder nightly --cron`: keeps the flow on a schedule, on a Prefect server that stays up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from perfladder.errors import InputError, NotPossibleHereError
from perfladder.flows.prefect_server import PrefectServer, find_server
from perfladder.nightly.config import NightlyConfig
from perfladder.nightly.watch import require_own_names, workload_files
from perfladder.tasks.variables import variables_set


def serve_nightly(
    config: NightlyConfig,
    cron: str,
    *,
    timezone: str = "UTC",
    name: str = "perfladder",
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve the flow as the deployment `nightly/<name>` until this process is ended; its schedule ends with it.

    Args:
        config: What each night does.
        cron: When, as cron has it.
        timezone: What the schedule's hours are counted in, such as Europe/Berlin.
        name: Of the deployment.
        tell: Shows one line.

    Raises:
        InputError: The schedule is none, or there is nothing to profile.
        NotPossibleHereError: No Prefect server stays up.
    """
    require_own_names(workload_files(Path(config.workloads)))
    server = find_server(Path(config.runs_dir), os.environ)
    if isinstance(server, PrefectServer):
        raise NotPossibleHereError(
            "A schedule needs a Prefect server that stays up, and there is none. Start one with `perfladder up`, name "
            "yours in PREFECT_API_URL, or let cron itself call `perfladder nightly`."
        )
    with server:
        url = server.wait()
        with variables_set({"PREFECT_API_URL": url, "DO_NOT_TRACK": os.environ.get("DO_NOT_TRACK", "true")}):
            _serve(config, cron, timezone, name, url, tell)


def _serve(config: NightlyConfig, cron: str, timezone: str, name: str, url: str, tell: Callable[[str], None]) -> None:
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.schedules import Cron
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.types.entrypoint import EntrypointType
    from pydantic import ValidationError

    from perfladder.flows.nightly import nightly

    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError as error:
        raise InputError(
            f"--cron {cron!r} --timezone {timezone!r} is no schedule: {error.errors()[0]['msg']}. Expected five fields "
            "such as '0 2 * * *', and a time zone such as Europe/Berlin."
        ) from None
    tell(f"serving nightly/{name} on {url}, schedule {cron} ({timezone}); Ctrl-C ends it")
    with temporary_settings({PREFECT_API_URL: url}):
        nightly.serve(
            name=name,
            schedule=Cron(cron, timezone=timezone),
            parameters={"config": config.model_dump(mode="json")},
            limit=1,
            pause_on_shutdown=True,
            print_starting_message=False,
            entrypoint_type=EntrypointType.MODULE_PATH,
        )
