"""Verbs about what is kept: servers, uploads to MLflow, and how much disk runs may take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfladder.cli_parts import DEFAULT_OUT, Json, Out, TrackingUri, errors_shown, show
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.progress_display import show_lines

if TYPE_CHECKING:
    from perfladder.flows.services import ServersStatus
    from perfladder.retention import GcResult
    from perfladder.tasks.uploads import SyncResult

Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="The servers' folder; by default PERFLADDER_SERVERS_DIR, or in your data folder."),
]


_UPLOAD_LIMIT_S = 600.0
"""Whoever asks for an upload waits longer for it than a measurement does."""


def add_server_verbs(app: typer.Typer) -> None:
    """Add these verbs to the command line."""
    for verb in (up, down, status, sync, gc):
        app.command()(verb)


def up(
    as_json: Json = False,
    host: Annotated[
        str | None, typer.Option("--host", help="Listen there; by default on 127.0.0.1, for this machine only.")
    ] = None,
    prefect_port: Annotated[
        int | None, typer.Option("--prefect-port", min=1, max=65535, help="By default the last one, or a free one.")
    ] = None,
    mlflow_port: Annotated[
        int | None, typer.Option("--mlflow-port", min=1, max=65535, help="By default the last one, or a free one.")
    ] = None,
    database_url: Annotated[
        str | None,
        typer.Option("--database-url", help="postgresql://USER:PASSWORD@HOST/DATABASE; by default SQLite files."),
    ] = None,
    folder: Folder = None,
) -> None:
    """Start a Prefect and an MLflow server with their pages, in the background; runs find and use them."""
    with errors_shown(as_json), show_lines() as (tell, _):
        from perfladder.flows import services
        from perfladder.flows.server_plans import UpOptions

        options = UpOptions(host=host, prefect_port=prefect_port, mlflow_port=mlflow_port, database_url=database_url)
        result = services.up(_servers_folder(folder), options, os.environ, tell)
    show(result, as_json, _render_status)


def down(as_json: Json = False, folder: Folder = None) -> None:
    """End both servers, with all that they have started."""
    with errors_shown(as_json), show_lines() as (tell, _):
        from perfladder.flows import services

        result = services.down(_servers_folder(folder), tell)
    show(result, as_json, _render_status)


def status(as_json: Json = False, folder: Folder = None) -> None:
    """Tell which servers run, and where their pages, databases and logs are."""
    with errors_shown(as_json):
        from perfladder.flows import services

        result = services.status(_servers_folder(folder))
    show(result, as_json, _render_status)


def sync(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Folders, ids, or 'latest'; by default all in --out.")
    ] = None,
    as_json: Json = False,
    out: Out = DEFAULT_OUT,
    tracking_uri: TrackingUri = None,
    again: Annotated[bool, typer.Option("--again", help="Also what is noted as uploaded already.")] = False,
    max_artifact_mib: Annotated[
        int, typer.Option("--max-artifact-mib", min=1, help="Larger files stay in the run directory only.")
    ] = 256,
) -> None:
    """Upload to MLflow what of finished runs is not there yet; giving the command again uploads nothing twice."""
    with errors_shown(as_json), show_lines() as (tell, _):
        from perfladder.find_runs import find_run
        from perfladder.retention import all_runs
        from perfladder.tasks.store import TrackingStore, resolve_tracking_uri
        from perfladder.tasks.uploads import sync_runs

        paths = [find_run(name, out) for name in runs] if runs else all_runs(out)
        store = TrackingStore(
            resolve_tracking_uri(tracking_uri, os.environ, out),
            experiment="perfladder",
            runs_dir=out,
            max_artifact_bytes=max_artifact_mib << 20,
            tell=tell,
            call_limit_s=_UPLOAD_LIMIT_S,
        )
        result = sync_runs(paths, store, again=again, tell=tell)
    show(result, as_json, _render_sync)
    raise typer.Exit(NotPossibleHereError.exit_code if result.num_failed else 0)


def gc(
    as_json: Json = False,
    out: Out = DEFAULT_OUT,
    keep: Annotated[
        int | None, typer.Option("--keep", min=0, help="Leave the newest so many runs of each workload whole.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0, help="Leave runs whole that are not older than so many days.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it, tell what would be deleted.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, whatever else is given.")] = False,
    protect: Annotated[
        list[str] | None, typer.Option("--protect", metavar="RUN", help="Keep this run whole from now on (repeatable).")
    ] = None,
    unprotect: Annotated[
        list[str] | None, typer.Option("--unprotect", metavar="RUN", help="Take that back (repeatable).")
    ] = None,
) -> None:
    """Show how much disk runs take, and delete traces and captures of old ones; results and reports always stay."""
    with errors_shown(as_json):
        from perfladder import retention
        from perfladder.find_runs import find_run

        for names, is_kept in ((protect, True), (unprotect, False)):
            for name in names or []:
                retention.mark(find_run(name, out), is_kept=is_kept)
        rule = retention.Rule(keep=keep, older_than_days=older_than)
        result = retention.collect(out, rule, is_wanted=yes and not dry_run)
    show(result, as_json, _render_gc)


def _servers_folder(asked: Path | None) -> Path:
    from perfladder.tasks.running import servers_folder

    folder = asked.absolute() if asked is not None else servers_folder(os.environ)
    if folder is None:
        raise InputError("There is no home folder for the servers' databases. Name a folder with --folder.")
    return folder


def _render_status(result: ServersStatus) -> str:
    lines = ["| server | status | pages | process | database |", "| --- | --- | --- | ---: | --- |"]
    for server in result.servers:
        detail = f" ({server.detail})" if server.detail else ""
        page = server.url if server.status != "crashed" else None
        cells = (server.name, server.status + detail, page or "-", server.process_id or "-", server.database or "-")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += ["", *(f"Log: `{server.log}`\n" for server in result.servers if server.status not in ("stopped",))]
    lines += [f"**Warning:** {warning}" for warning in result.warnings]
    return "\n".join(lines)


def _render_sync(result: SyncResult) -> str:
    counts = {status: sum(run.status == status for run in result.runs) for status in ("uploaded", "there_already")}
    lines = [
        f"{counts['uploaded']} runs uploaded to {result.tracking_uri}, {counts['there_already']} were there already, "
        f"{result.num_failed} failed."
    ]
    lines += [f"- {run.run}: {run.status}: {run.detail}" for run in result.runs if run.detail]
    return "\n".join(lines)


def _render_gc(result: GcResult) -> str:
    lines = ["| run | total MiB | traces and captures MiB | what happens |", "| --- | ---: | ---: | --- |"]
    for run in result.runs:
        cells = (run.run, f"{run.total_bytes / 2**20:.1f}", f"{run.data_bytes / 2**20:.1f}", run.decision)
        lines.append("| " + " | ".join((*cells[:3], cells[3] + (f" ({run.why})" if run.why else ""))) + " |")
    lines += [f"| _{name}_ | {size / 2**20:.1f} | | stays |" for name, size in result.other_bytes.items()]
    verb = "deleted" if result.is_done else "would be deleted; --yes deletes"
    freed = sum(run.data_bytes for run in result.runs if run.decision != "stays")
    return "\n".join([*lines, "", f"{freed / 2**20:.1f} MiB {verb}."])
