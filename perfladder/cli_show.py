"""Verbs that read a run: one table of it."""

from __future__ import annotations

from typing import Annotated

import typer

from perfladder.cli_parts import DEFAULT_OUT, Json, Out, errors_shown, show


def add_show_verbs(app: typer.Typer) -> None:
    """Add these verbs to the command line."""
    app.command(name="show")(show_run)


def show_run(
    run: Annotated[str, typer.Argument(help="A run directory, a run id, or 'latest'.")],
    table: Annotated[str | None, typer.Argument(help="What to show; leave it out for a list.")] = None,
    top: Annotated[int | None, typer.Option("--top", min=1, help="At most so many rows.")] = None,
    sort: Annotated[str | None, typer.Option("--sort", help="Column to order by, the largest first.")] = None,
    contains: Annotated[str | None, typer.Option("--contains", help="Only rows with this text.")] = None,
    all_columns: Annotated[bool, typer.Option("--all-columns", help="Every column, not the usual ones only.")] = False,
    as_json: Json = False,
    out: Out = DEFAULT_OUT,
) -> None:
    """Show one table of a run: findings, stages, regions, modules, kernels, operators, waits, copies and others."""
    with errors_shown(as_json):
        from perfladder.find_runs import find_run
        from perfladder.report.tables import list_tables, render_table, show_table

        found = find_run(run, out)
        shown = (
            list_tables(found)
            if table is None
            else show_table(found, table, top=top, sort=sort, contains=contains, all_columns=all_columns)
        )
    show(shown, as_json, render_table)
