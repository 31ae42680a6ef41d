"""Verbs about what is kept: servers, uploads to MLflow, and how much disk runs may take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfladder.cli_parts import Json, errors_shown, show
from perfladder.errors import InputError
from perfladder.progress_display import show_lines

if TYPE_CHECKING:
    from perfladder.flows.services import ServersStatus

Folder = Annotated[
    Path | None,
    typer.Option("--folder", help="The servers' folder; by default PERFLADDER_SERVERS_DIR, or in your data folder."),
]


def add_server_verbs(app: typer.Typer) -> None:
    """Add these verbs to the command line."""
    for verb in (up, down, status):
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
