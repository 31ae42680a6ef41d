"""What all verbs of the command line share: options, and how results and errors are shown."""

from __future__ import annotations

import errno
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perfladder.errors import InputError, NotPossibleHereError, PerfladderError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from perfladder.workload import WorkloadFile

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, and nothing else there.")]
Out = Annotated[Path, typer.Option("--out", help="Folder that run directories are made in.")]
TrackingUri = Annotated[
    str | None, typer.Option("--tracking-uri", help="MLflow tracking URI; by default a SQLite store in --out.")
]
Plain = Annotated[bool, typer.Option("--plain", help="Run directory only: no Prefect server, no MLflow store.")]
Until = Annotated[
    str, typer.Option("--until", help="Last rung to climb: stages, capture, regions, harness, kernels or ncu.")
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Go on with an unfinished run of this workload: its folder, its id, or 'latest'.",
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Change a workload field, as in --set measured_runs=20 (repeatable).")
]

DEFAULT_OUT = Path("runs")


def load_file(source: str, changes: list[str] | None) -> WorkloadFile:
    """Read the workload and apply `--set field=value` to it; values are YAML, fields may be dotted."""
    if not Path("/proc/self/cwd").exists():
        raise InputError("The current folder has been deleted. Change to one that exists.")

    from perfladder.changes import with_changes
    from perfladder.workload import load_workload

    return with_changes(load_workload(source), changes or [], source=source)


def require_installed(*names: str, otherwise: str) -> None:
    """Refuse, with the command that installs it, where a package is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise NotPossibleHereError(
            f"{' and '.join(missing)} not installed. Install with: pip install 'perfladder[all]'; or {otherwise}."
        )


def print_error(kind: str, message: str, exit_code: int) -> None:
    """Print an error as JSON."""
    from perfladder.schemas import ErrorDetail, ErrorDocument

    print(ErrorDocument(error=ErrorDetail(type=kind, message=message, exit_code=exit_code)).model_dump_json())


@contextmanager
def errors_shown(as_json: bool) -> Iterator[None]:
    """Show an error of ours as one message, on stderr or as JSON, and end with its exit code."""
    try:
        yield
    except PerfladderError as error:
        if as_json:
            print_error(type(error).__name__, str(error), error.exit_code)
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        message = f"{str(error.filename)[:60]}...: {error.strerror}."
        if as_json:
            print_error("InputError", message, InputError.exit_code)
        print(f"error: {message}", file=sys.stderr)
        raise typer.Exit(InputError.exit_code) from None


def show(result: BaseModel, as_json: bool, render: Callable[[Any], str]) -> None:
    """Print a result, as JSON or for people."""
    if as_json:
        print(result.model_dump_json(indent=1))
    else:
        print_markdown(render(result))


def print_markdown(text: str) -> None:
    """Print Markdown, rendered where a terminal shows it."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(Markdown(text))
    else:
        print(text)
