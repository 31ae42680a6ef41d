"""The verb `tune`: choose faster backends in one process, or go the whole way and prove what was chosen."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from perfladder.cli_parts import (
    DEFAULT_OUT,
    Json,
    Out,
    Plain,
    Set,
    TrackingUri,
    errors_shown,
    load_file,
    print_markdown,
    require_installed,
    show,
)
from perfladder.errors import InputError
from perfladder.progress_display import show_bar

if TYPE_CHECKING:
    from collections.abc import Callable

    from perfladder.progress import Progress
    from perfladder.tuning.proof_model import ProofOutcome, ProofSettings
    from perfladder.tuning.tune_request import TuneRequest
    from perfladder.tuning.tune_result import TuneWorkloadResult
    from perfladder.workload import WorkloadFile

    Tell = Callable[[str], None]
    OnProgress = Callable[[Progress], None]


def add_tune_verb(app: typer.Typer) -> None:
    """Add it to the command line."""
    app.command()(tune)


def tune(
    workload: Annotated[str, typer.Argument(help="A workload file (YAML), or the name of a built-in.")],
    as_json: Json = False,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--module",
            help="Module or scheduler, as in unet (repeatable); else by --min-share, and all schedulers.",
        ),
    ] = None,
    min_share: Annotated[float, typer.Option("--min-share", help="Least part of the time of a module.")] = 0.02,
    limit: Annotated[int | None, typer.Option("--limit", help="At most so many modules, the slowest first.")] = None,
    strategy: Annotated[
        str,
        typer.Option("--strategy", help="first-wins, max-throughput, min-latency, latency-budget or one-backend."),
    ] = "first-wins",
    latency_budget_ms: Annotated[
        float | None, typer.Option("--latency-budget-ms", help="Of a module's call, for latency-budget.")
    ] = None,
    backends: Annotated[
        list[str] | None,
        typer.Option("--backend", help="NAME or NAME:key=value,key=value; several are tried in order."),
    ] = None,
    quality: Annotated[
        str | None, typer.Option("--quality", help="Gate on the whole output: cosine>=0.99, psnr>=30, ssim>=0.95.")
    ] = None,
    keep: Annotated[
        str, typer.Option("--keep", help="faster; a least speedup such as 1.05; or right: whatever is correct.")
    ] = "faster",
    pairs: Annotated[int, typer.Option("--pairs", help="Runs of the whole, tuned and plain in turns.")] = 20,
    save: Annotated[Path | None, typer.Option("--save", help="Archive for what is kept.")] = None,
    no_isolation: Annotated[
        bool, typer.Option("--no-isolation", help="First builds in the workload's own process: a crash ends it all.")
    ] = False,
    cache_dir: Annotated[Path | None, typer.Option("--cache-dir", help="Folder for builds and what was found.")] = None,
    clear_cache: Annotated[bool, typer.Option("--clear-cache", help="Forget what earlier tunings found.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be tried, and build nothing.")] = False,
    prove: Annotated[
        bool,
        typer.Option("--prove", help="Also profile before and after, replay what was tuned, and compare in processes."),
    ] = False,
    plain: Plain = False,
    until: Annotated[
        str | None, typer.Option("--until", help="With --prove: last rung to climb, before and after (kernels).")
    ] = None,
    launches: Annotated[
        int | None, typer.Option("--launches", min=1, help="With --prove: pairs of processes to compare in (6).")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume", metavar="RUN", help="With --prove: an unfinished tuning run: its folder, its id, or 'latest'."
        ),
    ] = None,
    out: Out = DEFAULT_OUT,
    tracking_uri: TrackingUri = None,
    fail_if_not_faster: Annotated[
        bool, typer.Option("--fail-if-not-faster", help="Exit with 1 if nothing is kept.")
    ] = False,
    changes: Set = None,
) -> None:
    """Choose a faster backend for each module that is worth it, and show the gain on the whole workload.

    With --prove that is the second of five steps, each kept in a tuning run: profile, tune, replay what was tuned in a
    fresh process, profile again, compare in pairs of processes. Only what is right and faster then is kept.
    """
    with errors_shown(as_json), show_bar(is_silent=as_json) as (tell, on_progress):
        from perfladder.tuning.tune_request import tune_request

        request = tune_request(
            modules=modules or None,
            min_share=min_share,
            limit=limit,
            strategy=strategy,
            latency_budget_ms=latency_budget_ms,
            backends=backends or [],
            quality=quality,
            keep=keep,
            pairs=pairs,
            save=save,
            isolate_builds=not no_isolation,
            cache_dir=cache_dir,
            clear_cache=clear_cache,
            dry_run=dry_run,
        )
        file = load_file(workload, changes)
        if prove:
            asked = _Asked(workload, file, _settings(request, until, launches), out, tracking_uri, resume)
            outcome = _prove(asked, plain, tell, on_progress)
        else:
            _refuse_stray({"--until": until, "--launches": launches, "--resume": resume, "--plain": plain})
            result = _tune(file, request, tell, on_progress)
    if prove:
        _show_outcome(outcome, as_json)
        raise typer.Exit(1 if fail_if_not_faster and outcome.verdict == "rejected" else outcome.exit_code)
    from perfladder.report import render_tuning

    show(result, as_json, render_tuning)
    raise typer.Exit(1 if fail_if_not_faster and result.status == "rejected" else 0)


class _Asked(NamedTuple):
    """What the options of a proof say."""

    source: str
    file: WorkloadFile
    settings: ProofSettings
    out: Path
    tracking_uri: str | None
    resume: str | None


def _tune(file: WorkloadFile, request: TuneRequest, tell: Tell, on_progress: OnProgress) -> TuneWorkloadResult:
    from perfladder.measure_alone import measure_alone
    from perfladder.tuning.tune_workload import measure

    return measure_alone(file, measure, request, tell=tell, what="tuning", on_progress=on_progress)


def _settings(request: TuneRequest, until: str | None, launches: int | None) -> ProofSettings:
    from perfladder.tuning.proof_model import ProofSettings

    settings = ProofSettings(tune=request, launches=launches)
    return settings if until is None else settings.model_copy(update={"until": until})


def _prove(asked: _Asked, plain: bool, tell: Tell, on_progress: OnProgress) -> ProofOutcome:
    if plain:
        from perfladder.files import cache_folder
        from perfladder.tuning.prove import Proof, prove

        proof = Proof(
            asked.file,
            asked.settings,
            source=asked.source,
            runs_dir=asked.out,
            tell=tell,
            on_progress=on_progress,
            resume=asked.resume,
            cache=cache_folder(os.environ),
        )
        return prove(proof)
    require_installed("prefect", "mlflow", otherwise="add --plain to prove without")
    # Not from the flow's own module: that imports Prefect, which reads its settings then, and takes seconds.
    from perfladder.flows.config import TunePipelineConfig
    from perfladder.flows.run import run_tune_pipeline

    config = TunePipelineConfig(
        workload=asked.file.workload,
        base_dir=str(asked.file.base_dir),
        source=asked.source,
        runs_dir=str(asked.out.resolve()),
        resume=asked.resume,
        tracking_uri=asked.tracking_uri,
        **{name: getattr(asked.settings, name) for name in type(asked.settings).model_fields},
    )
    return run_tune_pipeline(config, tell, on_progress)


def _show_outcome(outcome: ProofOutcome, as_json: bool) -> None:
    if as_json:
        print(outcome.model_dump_json(indent=1))
        return
    from perfladder.tuning.proof_model import REPORT_FILE

    print_markdown((Path(outcome.run_dir) / REPORT_FILE).read_text(encoding="utf-8"))


def _refuse_stray(options: dict[str, object]) -> None:
    stray = next((name for name, value in options.items() if value), None)
    if stray is not None:
        raise InputError(f"{stray} belongs to --prove, which keeps a tuning run. Add it, or leave this out.")
