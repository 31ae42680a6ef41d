"""The verb that shows a run's report again: in the terminal, as JSON, or as a page for the browser."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from perfladder.cli_parts import DEFAULT_OUT, Json, Out, errors_shown, print_markdown

Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write it as one page that opens offline, to FILE.")
]


def add_report_verbs(app: typer.Typer) -> None:
    """Add these verbs to the command line."""
    app.command()(report)


def report(
    run_dir: Annotated[
        str, typer.Argument(metavar="RUN", help="A run's folder, its id, 'latest', a workload or a commit.")
    ],
    as_json: Json = False,
    html: Html = None,
    is_opened: Annotated[
        bool, typer.Option("--open", help="Show the page in the browser; without a display, tell where it is.")
    ] = False,
    out: Out = DEFAULT_OUT,
) -> None:
    """Show the report of a run again; it is made anew from the run's files."""
    with errors_shown(as_json):
        from perfladder.find_runs import find_run
        from perfladder.report import build_report, render_html, render_markdown
        from perfladder.report.html import write_page

        document = build_report(find_run(run_dir, out))
        path = html or (Path(document.run_dir) / "report.html" if is_opened else None)
        if path is not None:
            write_page(render_html(document, Path(document.run_dir), beside=path), path)
        if as_json:
            print(document.model_dump_json(indent=1))
        elif path is None:
            print_markdown(render_markdown(document))
    if path is not None:
        show_page(path, is_opened=is_opened, as_json=as_json)


def show_page(path: Path, *, is_opened: bool, as_json: bool) -> None:
    """Tell where a page is, and open it if that is asked for and there is a display."""
    print(f"Report: {path}", file=sys.stderr if as_json else sys.stdout)
    if is_opened and _has_display(os.environ):
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def _has_display(variables: Mapping[str, str]) -> bool:
    """Whether a browser could show something: not in a terminal over SSH, say, or in a container."""
    return any(variables.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
