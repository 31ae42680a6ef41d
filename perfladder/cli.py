"""The command line. `--help` answers without importing torch: everything heavy is imported inside a verb."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from perfladder.cli_nightly import add_nightly_verb
from perfladder.cli_parts import DEFAULT_OUT as _DEFAULT_OUT
from perfladder.cli_parts import Json, Out, Set, TrackingUri, load_file, require_installed
from perfladder.cli_parts import errors_shown as _errors
from perfladder.cli_parts import print_error as _print_error
from perfladder.cli_parts import print_markdown as _print_markdown
from perfladder.cli_parts import show as _show
from perfladder.cli_reports import Html, add_report_verbs, show_page
from perfladder.cli_run import add_run_verbs
from perfladder.cli_servers import add_server_verbs
from perfladder.cli_show import add_show_verbs
from perfladder.cli_skill import add_skill_verbs
from perfladder.cli_sweep import add_sweep_verb
from perfladder.cli_tune import add_tune_verb
from perfladder.errors import InputError, NotPossibleHereError
from perfladder.progress_display import show_bar, show_lines

app = typer.Typer(
    name="perfladder",
    help="Finds why a PyTorch inference pipeline is slow, from stage timing down to kernels, with evidence.",
    epilog=(
        "Exit codes: 0 done; 1 a finding or regression that you asked to fail on; 2 wrong input; "
        "3 the workload failed; 4 not possible here; 5 done, but a rung failed; 130 interrupted; 143 terminated."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM


def main() -> None:
    """Entry point of the console script."""
    signal.signal(signal.SIGTERM, _terminate)
    as_json = "--json" in sys.argv
    try:
        # Without standalone mode the exit code that a verb raises comes back as the return value.
        sys.exit(app(standalone_mode=False) or 0)
    except (typer.Abort, KeyboardInterrupt):
        _tell_interrupted(_INTERRUPTED, as_json)
    except SystemExit as end:
        if end.code in (_INTERRUPTED, _TERMINATED):
            _tell_interrupted(int(end.code), as_json)
        raise
    except Exception as error:
        # Usage errors of the option parser carry their own exit code and way to show themselves.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            if as_json:
                _print_error("UsageError", str(error), 2)
            error.show()
            sys.exit(2)
        raise


def _terminate(*_: object) -> None:
    """End like Ctrl-C: children are ended and the run's record says so; batch systems and `timeout` send SIGTERM."""
    raise SystemExit(_TERMINATED)


def _tell_interrupted(exit_code: int, as_json: bool) -> None:
    told = {"demo": " What was finished is in its folder: perfladder report latest"}
    told["run"] = f"{told['demo']}. To go on with it, give the same command once more, with --resume latest."
    told["tune"] = " Candidates that were finished are not tried again: give the same command once more."
    if "--prove" in sys.argv:
        told["tune"] = " What was finished is kept. To go on, give the same command once more, with --resume latest."
    message = "Interrupted." + told.get("".join(sys.argv[1:2]), "")
    if as_json:
        _print_error("Interrupted", message, exit_code)
    print(message, file=sys.stderr)
    sys.exit(exit_code)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from perfladder import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Finds why a PyTorch inference pipeline is slow, from stage timing down to kernels, with evidence."""


add_report_verbs(app)


@app.command()
def compare(
    baseline: Annotated[
        str, typer.Argument(help="A run, or several with commas between; with --interleave, a workload.")
    ],
    candidate: Annotated[
        str | None, typer.Argument(help="The same; with --interleave it may be left out: the same workload.")
    ] = None,
    as_json: Json = False,
    interleave: Annotated[
        bool, typer.Option("--interleave", help="Measure both sides now, in turns, on this machine.")
    ] = False,
    baseline_commit: Annotated[
        str | None, typer.Option("--baseline-commit", help="Commit of the workload's repository, for the baseline.")
    ] = None,
    candidate_commit: Annotated[
        str | None, typer.Option("--candidate-commit", help="The same for the candidate; else the files as they are.")
    ] = None,
    baseline_changes: Annotated[
        list[str] | None, typer.Option("--baseline-set", help="Change a workload field of the baseline (repeatable).")
    ] = None,
    candidate_changes: Annotated[
        list[str] | None, typer.Option("--candidate-set", help="The same of the candidate (repeatable).")
    ] = None,
    changes: Set = None,
    pairs: Annotated[
        int | None, typer.Option("--pairs", min=1, help="Runs of each side in turns, in each process (10).")
    ] = None,
    check_noise: Annotated[
        bool,
        typer.Option("--check-noise", help="Measure the baseline against itself first; believe no less than that."),
    ] = False,
    min_effect: Annotated[
        float, typer.Option("--min-effect", help="Relative change below which none counts: 0.02 is 2 %.")
    ] = 0.02,
    fail_if_slower: Annotated[
        bool, typer.Option("--fail-if-slower", help="Exit with 1 if the metric or a scenario is slower for certain.")
    ] = False,
    fail_if_more_breaks: Annotated[
        bool, typer.Option("--fail-if-more-breaks", help="Exit with 1 if torch.compile breaks more graphs than before.")
    ] = False,
    to: Annotated[Path | None, typer.Option("--to", help="Folder for comparison.json, .md and .html.")] = None,
    html: Html = None,
    out: Out = _DEFAULT_OUT,
    tracking_uri: TrackingUri = None,
) -> None:
    """Tell whether one version is faster than another, by finished runs or measured now in turns.

    A run is named by its folder, its id, 'latest', its workload's name, the beginning of its commit, or from MLflow by
    mlflow:RUN_ID or tag:KEY=VALUE.
    """
    with _errors(as_json), show_bar(is_silent=as_json) as (tell, on_progress):
        from perfladder.comparing.command import CompareOptions
        from perfladder.comparing.command import compare as compare_as_asked
        from perfladder.comparing.views import render_comparison

        options = CompareOptions(
            baseline=baseline,
            candidate=candidate,
            interleave=interleave,
            commits=(baseline_commit, candidate_commit),
            changes=(changes or [], baseline_changes or [], candidate_changes or []),
            pairs=pairs,
            check_noise=check_noise,
            min_effect=min_effect,
            to=to,
            html=html,
        )
        result = compare_as_asked(
            options, find=lambda name: _find_runs(name, out, tracking_uri), tell=tell, on_progress=on_progress
        )
    _show(result, as_json, render_comparison)
    if html is not None:
        show_page(html, is_opened=False, as_json=as_json)
    is_refused = (fail_if_slower and result.is_slower) or (fail_if_more_breaks and result.has_more_graph_breaks)
    raise typer.Exit(1 if is_refused else 0)


@app.command()
def attribute(
    traces: Annotated[
        list[str],
        typer.Argument(metavar="TRACE...", help="Files of torch.profiler or Kineto, plain or gzip; one a rank."),
    ],
    as_json: Json = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows of each table.")] = 30,
) -> None:
    """Analyse any profiler trace: kernels, regions, idle time, copies, communication."""
    with _errors(as_json):
        from perfladder.profiling.attribute import analyse_traces

        analyses = analyse_traces(traces, limit=limit)
        if as_json:
            print(analyses.model_dump_json(indent=1))
        else:
            _print_markdown(analyses.markdown())


@app.command()
def capture(
    workload: Annotated[str, typer.Argument(help="A workload file (YAML), or the name of a built-in.")],
    stage: Annotated[
        str, typer.Option("--stage", help="Call site to capture, as in unet, vae.decode, scheduler.step.")
    ],
    to: Annotated[Path, typer.Option("--to", help="Folder that the capture goes to; it must not hold anything yet.")],
    as_json: Json = False,
    calls: Annotated[
        str,
        typer.Option("--calls", help="'default' (the first, a middle and the last call of a run), 'all', or 0,3,-1."),
    ] = "default",
    runs: Annotated[int, typer.Option("--runs", min=1, help="How many runs to capture.")] = 1,
    max_bytes: Annotated[
        int | None,
        typer.Option("--max-bytes", min=1, help="Limit; by default a quarter of the free disk, 4 GiB at most."),
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Replace texts and numbers by meaningless ones of the same form.")
    ] = False,
    allow_side_effects: Annotated[
        bool, typer.Option("--allow-side-effects", help="Also where the stage writes files or opens connections.")
    ] = False,
    changes: Set = None,
) -> None:
    """Save what one stage receives and returns in real calls: your prompts and pictures too, unless you --redact."""
    with _errors(as_json), show_lines() as (tell, _):
        from perfladder.capturing.api import capture_request, capture_workload
        from perfladder.report import render_capture

        file = load_file(workload, changes)
        request = capture_request(
            stage,
            to,
            calls=_parse_calls(calls),
            runs=runs,
            max_bytes=max_bytes,
            redact=redact,
            allow_side_effects=allow_side_effects,
        )
        result = capture_workload(file, request, tell=tell)
    _show(result, as_json, render_capture)
    raise typer.Exit(0 if result.status == "done" else NotPossibleHereError.exit_code)


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(metavar="CAPTURE", help="Folder of a capture.")],
    as_json: Json = False,
    workload: Annotated[
        str | None, typer.Option("--workload", help="The workload that was captured: a file, or a built-in.")
    ] = None,
    factory: Annotated[
        str | None, typer.Option("--factory", help="Instead of it: module:function that returns the stage alone.")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed repeats of each captured call.")] = 20,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Random numbers in place of the captured ones; proves nothing.")
    ] = False,
    in_turns: Annotated[
        bool,
        typer.Option("--in-turns", help="Where only the time is not faithful, take turns with the whole pipeline."),
    ] = False,
    changes: Set = None,
) -> None:
    """Replay a capture on its stage alone, in a fresh process, and judge whether it stands for the pipeline's calls."""
    with _errors(as_json), show_lines() as (tell, _):
        from perfladder.capturing.api import StageBenchHarness
        from perfladder.report import render_replay

        file = load_file(workload, changes) if workload else None
        harness = StageBenchHarness(folder, workload=file, factory=factory)
        result = harness.run(repeats=repeats, synthetic=synthetic, in_turns=in_turns, tell=tell)
    _show(result, as_json, render_replay)


@app.command()
def kernels(
    folder: Annotated[Path, typer.Argument(metavar="CAPTURE", help="Folder of a capture.")],
    export: Annotated[str, typer.Option("--export", help="Function to export, as in linear, conv2d, Tensor.matmul.")],
    to: Annotated[Path, typer.Option("--to", help="Folder that it goes to; it must not hold anything yet.")],
    as_json: Json = False,
    workload: Annotated[
        str | None, typer.Option("--workload", help="The workload that was captured: a file, or a built-in.")
    ] = None,
    factory: Annotated[
        str | None, typer.Option("--factory", help="Instead of it: module:function that returns the stage alone.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Forms of call at most, the most frequent first.")] = 8,
    changes: Set = None,
) -> None:
    """Write one function's real inputs, what is right for them, and a script that checks and times another kernel."""
    with _errors(as_json), show_lines() as (tell, _):
        from perfladder.capturing.api import StageBenchHarness
        from perfladder.report import render_export

        file = load_file(workload, changes) if workload else None
        harness = StageBenchHarness(folder, workload=file, factory=factory)
        result = harness.export(export, to, limit=limit, tell=tell)
    _show(result, as_json, render_export)


@app.command()
def ncu(
    folder: Annotated[
        Path, typer.Argument(metavar="CAPTURE", help="Folder of a capture; in a run's folder it becomes its rung 5.")
    ],
    as_json: Json = False,
    kernel: Annotated[
        str | None,
        typer.Option("--kernel", help="Name as in rung 4, or the function's alone; by default rung 4's heaviest."),
    ] = None,
    workload: Annotated[
        str | None, typer.Option("--workload", help="The workload that was captured: a file, or a built-in.")
    ] = None,
    factory: Annotated[
        str | None, typer.Option("--factory", help="Instead of it: module:function that returns the stage alone.")
    ] = None,
    call: Annotated[int | None, typer.Option("--call", help="Which captured call; by default rung 4's.")] = None,
    launch_skip: Annotated[
        int | None, typer.Option("--launch-skip", min=0, help="Launches of that function in the call to leave out.")
    ] = None,
    launch_count: Annotated[int, typer.Option("--launch-count", min=1, max=20, help="How many to profile.")] = 1,
    sections: Annotated[
        list[str] | None, typer.Option("--section", help="Section of ncu (repeatable) in place of the usual ones.")
    ] = None,
    clock_control: Annotated[
        str, typer.Option("--clock-control", help="none, or base: lock the clocks to the base clock.")
    ] = "none",
    cache_control: Annotated[
        str, typer.Option("--cache-control", help="all: empty caches before each pass; or none.")
    ] = "all",
    limit_s: Annotated[float, typer.Option("--limit-s", min=1, help="After so long ncu is ended.")] = 600.0,
    to: Annotated[Path | None, typer.Option("--to", help="Folder for report and result.")] = None,
    changes: Set = None,
) -> None:
    """Look at one kernel of a captured stage with Nsight Compute: what limits it, and what that rests on."""
    with _errors(as_json), show_lines() as (tell, _):
        from perfladder.nsight.api import profile_capture
        from perfladder.report import render_ncu

        options: dict[str, object] = {"launch_count": launch_count, "clock_control": clock_control}
        options |= {"cache_control": cache_control, **({"sections": sections} if sections else {})}
        result = profile_capture(
            folder,
            workload=load_file(workload, changes) if workload else None,
            factory=factory,
            kernel=kernel,
            call=call,
            launch_skip=launch_skip,
            to=to,
            limit_s=limit_s,
            options=options,
            tell=tell,
        )
    _show(result, as_json, render_ncu)
    raise typer.Exit(0 if result.status == "done" else NotPossibleHereError.exit_code)


@app.command()
def inspect(
    workload: Annotated[str, typer.Argument(help="A workload file (YAML), or the name of a built-in.")],
    as_json: Json = False,
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Measured runs.")] = 10,
    min_depth: Annotated[int, typer.Option("--min-depth", min=0, help="Least steps of a module's path.")] = 0,
    max_depth: Annotated[int, typer.Option("--max-depth", min=0, help="Most steps of a module's path.")] = 5,
    changes: Set = None,
) -> None:
    """List the topmost modules that run, with their time: which are worth tuning?"""
    with _errors(as_json), show_lines() as (tell, _):
        from perfladder.measure_alone import measure_alone
        from perfladder.report import render_inspection
        from perfladder.tuning.inspect_workload import InspectRequest, measure

        if max_depth < min_depth:
            raise InputError(f"--max-depth {max_depth} is less than --min-depth {min_depth}.")
        request = InspectRequest(number_of_iterations=iterations, min_depth=min_depth, max_depth=max_depth)
        result = measure_alone(load_file(workload, changes), measure, request, tell=tell, what="inspecting")
    _show(result, as_json, render_inspection)


add_run_verbs(app)
add_nightly_verb(app)
add_server_verbs(app)
add_show_verbs(app)
add_sweep_verb(app)
add_tune_verb(app)
add_skill_verbs(app)


@app.command()
def doctor(as_json: Json = False, out: Out = _DEFAULT_OUT) -> None:
    """Tell what limits a measurement here, and what to do: devices, clocks, load, threads, disk, libraries, ncu."""
    with _errors(as_json):
        import os

        from perfladder.doctor.examine import examine, render

        examination = examine(os.environ, out)
        if as_json:
            print(examination.model_dump_json(indent=1))
        else:
            render(examination)


def _find_runs(name: str, out: Path, tracking_uri: str | None) -> list[Path]:
    """Runs below `out`, or from MLflow where that is installed."""
    from perfladder.find_runs import find_runs

    if not name.startswith(("mlflow:", "tag:")):
        return find_runs(name, out)
    require_installed("mlflow", otherwise="name the run by its folder")
    import os

    from perfladder.tasks.find import find_anywhere

    return find_anywhere(name, tracking_uri, os.environ, out)


def _parse_calls(text: str) -> str | list[int]:
    if text in ("default", "all"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"--calls {text!r}: expected 'default', 'all', or indices such as 0,3,-1.") from error


if __name__ == "__main__":
    main()
