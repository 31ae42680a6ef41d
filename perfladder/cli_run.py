"""Verbs that climb the ladder: on a workload, on the demo, and on a script as it is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfladder.cli_parts import (
    DEFAULT_OUT,
    Json,
    Out,
    Plain,
    Resume,
    Set,
    TrackingUri,
    Until,
    errors_shown,
    load_file,
    print_markdown,
    require_installed,
)
from perfladder.errors import InputError
from perfladder.progress_display import Lines, show_lines

if TYPE_CHECKING:
    from perfladder.ladder import ClimbOutcome
    from perfladder.workload import WorkloadFile

Function = Annotated[
    str | None,
    typer.Option(
        "--function",
        help="Of a script, the call of this function: a name or Class.method in the script, or module:name. By default "
        "the first call of a diffusers or transformers pipeline or of generate(), else the module called for longest.",
    ),
]
Nth = Annotated[int, typer.Option("--nth", min=1, help="Of a script: which of these calls.")]
ScriptArguments = Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of the script.")]


def add_run_verbs(app: typer.Typer) -> None:
    """Add these verbs to the command line."""
    app.command()(demo)
    app.command()(run)
    app.command(name="exec", context_settings={"allow_interspersed_args": False})(execute)
    app.command(context_settings={"allow_interspersed_args": False})(init)


def demo(as_json: Json = False, out: Out = DEFAULT_OUT, plain: Plain = False) -> None:
    """Profile a small diffusion pipeline, to see what perfladder does: no GPU, no download."""
    with errors_shown(as_json):
        file = load_file("diffusion", None)
    _run(file, "diffusion", as_json=as_json, out=out, plain=plain, until="kernels", tracking_uri=None)


def run(
    workload: Annotated[
        str,
        typer.Argument(help="A workload file (YAML), or a built-in, such as diffusion, embedding or streaming."),
    ],
    as_json: Json = False,
    out: Out = DEFAULT_OUT,
    plain: Plain = False,
    until: Until = "kernels",
    tracking_uri: TrackingUri = None,
    step: Annotated[bool, typer.Option("--step", help="Ask before every rung but the first.")] = False,
    resume: Resume = None,
    changes: Set = None,
) -> None:
    """Climb the ladder on a workload: stage timing, regions, isolated replay, kernels."""
    with errors_shown(as_json):
        file = load_file(workload, changes)
    _run(
        file,
        workload,
        as_json=as_json,
        out=out,
        plain=plain,
        until=until,
        tracking_uri=tracking_uri,
        step=step,
        resume=resume,
    )


def execute(
    script: Annotated[str, typer.Argument(help="A Python script, as python takes it; what follows is its own.")],
    arguments: ScriptArguments = None,
    function: Function = None,
    nth: Nth = 1,
    tune: Annotated[
        bool, typer.Option("--tune", help="Do not profile: run the script, and tune its modules while it runs.")
    ] = False,
    as_json: Json = False,
    out: Out = DEFAULT_OUT,
    plain: Plain = False,
    until: Until = "kernels",
    tracking_uri: TrackingUri = None,
    changes: Set = None,
) -> None:
    """Profile an unmodified script: it runs up to the call that matters, and the ladder is climbed on that call.

    With --tune it runs to its end, and what was tuned is listed on stderr. The exit code is then the script's own, or 3
    if it raised or a signal ended it; with --json it prints to stderr.
    """
    if tune:
        _execute_tuned(script, arguments or [], as_json=as_json)
    with errors_shown(as_json):
        from perfladder.scripts.workload import script_workload

        file = script_workload(script, arguments or [], function=function, nth=nth, changes=changes or [])
    # The script's name alone does not tell its arguments, or the call: further commands take the run's own workload.
    _run(file, "", as_json=as_json, out=out, plain=plain, until=until, tracking_uri=tracking_uri)


def init(
    target: Annotated[
        str, typer.Argument(help="file.py:factory or module:factory, which returns the object to profile; or a script.")
    ],
    arguments: ScriptArguments = None,
    function: Function = None,
    nth: Nth = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; by default NAME.yaml, here.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    as_json: Json = False,
    changes: Set = None,
) -> None:
    """Write a workload file for your pipeline: it is loaded and called once, to see what it takes and goes through.

    Inputs that you do not give (--set inputs.x='{$tensor: [1, 64]}') are guessed, and tried. The exit code is 2 where
    no call ran: the file then names the inputs to be filled in.
    """
    with errors_shown(as_json), show_lines() as (tell, _):
        from perfladder.initializing.write import init_workload

        result = init_workload(
            target,
            arguments or [],
            output=output,
            changes=changes or [],
            function=function,
            nth=nth,
            is_replaced=force,
            tell=tell,
        )
    if as_json:
        print(result.model_dump_json(indent=1))
    else:
        print(f"Wrote {result.path}.")
        if result.does_run:
            print(f"It runs; next: {result.next_command}")
    if not result.does_run:
        print(f"error: no call ran; fill in the inputs in {result.path}. {result.found.error}", file=sys.stderr)
    raise typer.Exit(0 if result.does_run else InputError.exit_code)


def _execute_tuned(script: str, arguments: list[str], *, as_json: bool) -> None:
    with errors_shown(as_json):
        from perfladder.jit.execute import execute_tuned

        result = execute_tuned(script, arguments, keeps_stdout=not as_json)
        print(result.describe(), end="", file=sys.stderr)
        if as_json:
            print(result.model_dump_json(indent=1))
    raise typer.Exit(result.exit_code)


def _run(
    file: WorkloadFile,
    source: str,
    *,
    as_json: bool,
    out: Path,
    plain: bool,
    until: str,
    tracking_uri: str | None,
    step: bool = False,
    resume: str | None = None,
) -> None:
    with errors_shown(as_json), show_lines() as lines:
        if step and lines.ask is None:
            raise InputError("--step asks at a terminal before each rung, and there is none. Leave it out.")
        if plain:
            from perfladder.ladder import climb

            outcome = climb(
                file,
                runs_dir=out,
                until=until,
                tell=lines.tell,
                source=source,
                ask=lines.ask,
                step=step,
                resume=resume,
            )
        else:
            outcome = _run_flow(file, source, out, until, tracking_uri, lines, step=step, resume=resume)
    _show_outcome(outcome, as_json)
    raise typer.Exit(outcome.exit_code)


def _run_flow(
    file: WorkloadFile,
    source: str,
    out: Path,
    until: str,
    tracking_uri: str | None,
    lines: Lines,
    *,
    step: bool,
    resume: str | None,
) -> ClimbOutcome:
    require_installed("prefect", "mlflow", otherwise="add --plain to climb without")
    # Not from the flow's own module: that imports Prefect, which reads its settings then, and takes seconds.
    from perfladder.flows.config import ProfilePipelineConfig
    from perfladder.flows.run import run_profile_pipeline

    config = ProfilePipelineConfig(
        workload=file.workload,
        base_dir=str(file.base_dir),
        source=source,
        runs_dir=str(out.resolve()),
        until=until,
        tracking_uri=tracking_uri,
        resume=resume,
    )
    return run_profile_pipeline(config, tell=lines.tell, ask=lines.ask, step=step)


def _show_outcome(outcome: ClimbOutcome, as_json: bool) -> None:
    from perfladder.report import build_report, render_summary
    from perfladder.report.answer import answer_of

    report = build_report(Path(outcome.run_dir))
    if as_json:
        print(answer_of(report).model_dump_json(indent=1))
    else:
        print_markdown(render_summary(report))
