"""The verb that climbs many workloads, or one in many variations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from perfladder.cli_parts import DEFAULT_OUT, Json, Out, TrackingUri, errors_shown, require_installed, show
from perfladder.errors import InputError
from perfladder.progress_display import show_lines

if TYPE_CHECKING:
    from pydantic import JsonValue


def add_sweep_verb(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(sweep)


def sweep(
    workloads: Annotated[list[str], typer.Argument(metavar="WORKLOAD...", help="Workload files, or built-in names.")],
    as_json: Json = False,
    out: Out = DEFAULT_OUT,
    vary: Annotated[
        list[str] | None,
        typer.Option("--vary", metavar="FIELD=[...]", help="Values of a workload field; several: all combinations."),
    ] = None,
    runner: Annotated[str, typer.Option("--runner", help="What starts the climbs: threads, ray or dask.")] = "threads",
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, help="Climbs at once; one device is measured on in turn all the same.")
    ] = 1,
    address: Annotated[
        str | None, typer.Option("--address", help="Of a Ray or Dask cluster; by default a local one.")
    ] = None,
    gpus_per_member: Annotated[
        int, typer.Option("--gpus-per-member", min=0, help="GPUs that Ray reserves for each climb.")
    ] = 0,
    until: Annotated[str, typer.Option("--until", help="Last rung to climb, as in run.")] = "kernels",
    tracking_uri: TrackingUri = None,
) -> None:
    """Climb the ladder on many workloads, or on one in many variations, each in a process of its own."""
    with errors_shown(as_json), show_lines() as (tell, _):
        require_installed("prefect", "mlflow", otherwise="call `perfladder run --plain` for each workload")
        from pydantic import ValidationError

        from perfladder.flows.config import SweepConfig
        from perfladder.flows.run import run_sweep
        from perfladder.ladder import rung_named
        from perfladder.models import input_error
        from perfladder.variations import render_sweep

        rung_named(until)
        fields = {
            "workloads": workloads,
            "vary": dict(_values(text) for text in vary or []),
            "runner": runner,
            "at_once": at_once,
            "address": address,
            "gpus_per_member": gpus_per_member,
            "runs_dir": str(out.resolve()),
            "until": until,
            "tracking_uri": tracking_uri,
        }
        try:
            config = SweepConfig.model_validate(fields)
        except ValidationError as error:
            raise input_error(error, SweepConfig, "The sweep") from error
        result = run_sweep(config, tell)
    show(result, as_json, render_sweep)
    raise typer.Exit(result.exit_code)


def _values(text: str) -> tuple[str, list[JsonValue]]:
    from perfladder.changes import parse_change

    path, values = parse_change(text, option="--vary")
    if not isinstance(values, list):
        raise InputError(f"--vary {text!r}: expected a list of values, such as measured_runs=[10, 20].")
    return path, values
