"""`perfladder nightly`: one night now, on a schedule, or the table of the nights there were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfladder.cli_parts import DEFAULT_OUT, Json, Out, TrackingUri, errors_shown, require_installed, show
from perfladder.errors import InputError
from perfladder.progress_display import Lines, show_lines

if TYPE_CHECKING:
    from perfladder.nightly.config import NightlyConfig
    from perfladder.nightly.trend import Trends


def add_nightly_verb(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(nightly)


def nightly(
    workloads: Annotated[
        Path | None, typer.Option("--workloads", metavar="DIR", help="Folder of workload files, or one such file.")
    ] = None,
    as_json: Json = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Run directories only: no Prefect server, no MLflow store.")
    ] = False,
    cron: Annotated[
        str | None, typer.Option("--cron", metavar="SCHEDULE", help="Every night, as in '0 2 * * *', until Ctrl-C.")
    ] = None,
    timezone: Annotated[
        str, typer.Option("--timezone", help="With --cron: of its hours, such as Europe/Berlin.")
    ] = "UTC",
    name: Annotated[str, typer.Option("--name", help="With --cron: what the deployment is called.")] = "perfladder",
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="With --history: write the nights as one page.")
    ] = None,
    history: Annotated[bool, typer.Option("--history", help="Measure nothing; show the nights there were.")] = False,
    accept: Annotated[
        str | None, typer.Option("--accept", metavar="RUN", help="Take the level of this night for good, and end.")
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option("--baseline", metavar="RUN", help="Compare with this run, not the last good nights (repeatable)."),
    ] = None,
    last_good: Annotated[
        int | None, typer.Option("--last-good", metavar="N", help="Good nights that the baseline comes from (30).")
    ] = None,
    min_effect: Annotated[
        float | None, typer.Option("--min-effect", help="Relative change below which none counts (0.01).")
    ] = None,
    nights_to_confirm: Annotated[
        int | None, typer.Option("--nights-to-confirm", help="Nights that must show it before an alarm (1).")
    ] = None,
    launches: Annotated[
        int | None, typer.Option("--launches", help="Processes each is timed in, where the file does not say it (5).")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="Last rung to climb (kernels).")] = None,
    second_after_s: Annotated[
        float | None, typer.Option("--second-after-s", help="Pause before a second measurement (60).")
    ] = None,
    no_second: Annotated[
        bool, typer.Option("--no-second", help="Measure nothing twice; suspicions then stay suspicions.")
    ] = False,
    out: Out = DEFAULT_OUT,
    tracking_uri: TrackingUri = None,
) -> None:
    """Profile every workload of a folder, and tell which have become slower than in earlier nights, since when, where.

    The exit code is 1 if there is a regression.
    """
    with errors_shown(as_json), show_lines() as lines:
        _require_one_mode(cron, history, accept)
        if html is not None and not history:
            raise InputError("--html goes with --history; a night writes nightly.html into the runs folder by itself.")
        if accept is not None:
            _accept(accept, out, lines)
            return
        if history:
            found = _history(workloads, out, tracking_uri, lines)
            if html is not None:
                from perfladder.nightly.page import write_trends_page

                write_trends_page(found, html)
                lines.tell(f"Page: {html}")
        else:
            rules = {"last_good": last_good, "min_effect": min_effect, "nights_to_confirm": nights_to_confirm}
            given = {"launches": launches, "until": until, "second_after_s": second_after_s}
            config = _config(
                workloads,
                rules={name: value for name, value in rules.items() if value is not None},
                baseline=baseline or [],
                takes_second=not no_second,
                runs_dir=str(out.resolve()),
                tracking_uri=tracking_uri,
                **{name: value for name, value in given.items() if value is not None},
            )
            if cron is not None:
                _serve(config, cron, timezone, name, plain, lines)
                return
            outcome = _run(config, plain, lines)
    if history:
        from perfladder.nightly.views import render_history

        show(found, as_json, lambda trends: render_history(trends.trends))
        return
    from perfladder.nightly.views import render_outcome

    show(outcome, as_json, render_outcome)
    raise typer.Exit(outcome.exit_code)


def _require_one_mode(cron: str | None, history: bool, accept: str | None) -> None:
    given = {"--cron": cron is not None, "--history": history, "--accept": accept is not None}
    named = [name for name, is_given in given.items() if is_given]
    if len(named) > 1:
        raise InputError(f"{' and '.join(named)} do not go together. Give one of them.")


def _config(workloads: Path | None, **fields: Any) -> NightlyConfig:
    from pydantic import ValidationError

    from perfladder.models import input_error
    from perfladder.nightly.config import NightlyConfig

    if workloads is None:
        raise InputError("nightly: say what to profile: --workloads DIR, a folder with one file for each workload.")
    try:
        return NightlyConfig.model_validate({"workloads": str(workloads.resolve()), **fields})
    except ValidationError as error:
        raise input_error(error, NightlyConfig, "nightly") from None


def _run(config: NightlyConfig, plain: bool, lines: Lines) -> Any:
    if plain:
        from perfladder.nightly.plain import run_plain_night

        return run_plain_night(config, lines.tell)
    require_installed("prefect", "mlflow", otherwise="add --plain to go without")
    from perfladder.flows.run import run_nightly

    return run_nightly(config, lines.tell)


def _serve(config: NightlyConfig, cron: str, timezone: str, name: str, plain: bool, lines: Lines) -> None:
    if plain:
        raise InputError("--cron needs a Prefect server, and --plain uses none. Let cron itself call --plain.")
    require_installed("prefect", "mlflow", otherwise="let cron itself call perfladder nightly --plain")
    from perfladder.flows.serve_nightly import serve_nightly

    serve_nightly(config, cron, timezone=timezone, name=name, tell=lines.tell)


def _accept(name: str, out: Path, lines: Lines) -> None:
    from perfladder.find_runs import find_run
    from perfladder.nightly.records import accept

    night = accept(find_run(name, out))
    lines.tell(f"{night.workload}: the level since {night.run_id} is taken for good. `perfladder sync` tells MLflow.")


def _history(workloads: Path | None, out: Path, tracking_uri: str | None, lines: Lines) -> Trends:
    from perfladder.nightly.records import in_order, read_history, workloads_with_nights
    from perfladder.nightly.trend import trends_of
    from perfladder.nightly.watch import workload_files
    from perfladder.workload import load_workload

    nights = {name: read_history(out, name, lines.tell) for name in workloads_with_nights(out)}
    if tracking_uri is not None:
        for name, stored in _stored(tracking_uri, out, lines).items():
            nights[name] = in_order([*stored, *nights.get(name, [])])
    if workloads is not None:
        named = {load_workload(str(path)).workload.name for path in workload_files(workloads)}
        nights = {name: found for name, found in nights.items() if name in named}
    return trends_of(out, nights)


def _stored(tracking_uri: str, out: Path, lines: Lines) -> dict[str, Any]:
    require_installed("mlflow", otherwise="leave --tracking-uri out")
    from perfladder.errors import NotPossibleHereError
    from perfladder.nightly.config import NightlyConfig
    from perfladder.tasks.nights import nights_in_store, workloads_in_store
    from perfladder.tasks.store import StoreError, TrackingStore, resolve_tracking_uri

    uri, limit = resolve_tracking_uri(tracking_uri, os.environ, out), NightlyConfig(workloads=".").history_nights
    try:
        with TrackingStore(uri, experiment="perfladder", runs_dir=out, tell=lines.tell) as store:
            return store.ask(
                lambda target: {name: nights_in_store(target, name, limit) for name in workloads_in_store(target)}
            )
    except StoreError as error:
        raise NotPossibleHereError(
            f"--history: {error} Leave --tracking-uri out for the runs folder's nights."
        ) from error
