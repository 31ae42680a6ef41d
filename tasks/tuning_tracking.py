"""A tuning run as MLflow has it: one run with what each step found, and the kept archive as a registered model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from perfladder.errors import InputError
from perfladder.rundir import RunDirectory, RunRecord, read_model
from perfladder.rungs.base import RungResult
from perfladder.stats import Interval
from perfladder.target import LoadedInfo
from perfladder.tasks.metrics import Pairs, finite, metric_that_matters
from perfladder.tasks.store import Target
from perfladder.tasks.tracking import MAX_TAG_CHARS, files_of, log_metrics, log_values, ms_of, runs_of, upload_files
from perfladder.tasks.uploads import kept_archive
from perfladder.tuning.proof_model import (
    OUTCOME_FILE,
    CompareStep,
    ProfileStep,
    ProofOutcome,
    ReplayStep,
    TuneStep,
)
from perfladder.tuning.prove import STEPS

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

MODEL_PREFIX = "perfladder-"
_SIDES = {"profile": "plain", "profile-tuned": "tuned"}
_NOT_UPLOADED = (".ait", ".log")
"""The archive goes to the store when it is kept; logs hold what the target printed."""


def log_step(target: Target, run: RunDirectory, name: str, *, max_artifact_bytes: int) -> list[str]:
    """Log a step's metrics and files in the tuning run. Returns what could not be uploaded."""
    entry = next(entry for entry in run.record.rungs if entry.name == name)
    step = next(step for step in STEPS if step.name == name)
    result = read_model(run.path / entry.folder / f"{name}.json", step.result_type)
    run_id = str(runs_of(target, run.record)[None])
    # Of a step that was done twice, as after a kill, the numbers of the second time are the latest ones.
    renamed = log_metrics(
        target.client, run_id, step_metrics(result), ms_of(result.started_at or run.record.started_at)
    )
    log_values(target.client, run_id, {}, {f"perfladder.step.{name}": result.status})
    if renamed:
        target.client.log_dict(run_id, renamed, f"{entry.folder}/metric_names.json")
    paths = [path for path in (run.path / entry.folder).rglob("*") if path.suffix not in _NOT_UPLOADED]
    return upload_files(target.client, run_id, files_of(run.path, paths, max_artifact_bytes))


def step_metrics(result: RungResult) -> dict[str, float]:
    """The numbers of one step."""
    return finite([(f"{result.rung}/duration_s", result.duration_s), *_numbers(result)])


def _numbers(result: RungResult) -> Pairs:
    if isinstance(result, ProfileStep) and result.metric is not None:
        for name, value in metric_that_matters(result.metric).items():
            yield f"{_SIDES[result.rung]}/{name}", value
    elif isinstance(result, TuneStep) and result.tuning is not None and result.tuning.evidence is not None:
        evidence = result.tuning.evidence
        yield from _speedup("tune/", evidence.comparison.speedup, evidence.comparison.interval)
        yield "tune/max_rel_error", evidence.output.max_rel_error
        yield "tune/build_s", evidence.break_even.build_s
        yield "tune/num_calls_to_pay", evidence.break_even.calls_for_tuning
    elif isinstance(result, ReplayStep):
        for one in result.modules:
            prefix = f"replay/{one.module or 'target'}/"
            yield f"{prefix}max_rel_error", one.replay.max_rel_error
            if one.replay.comparison is not None:
                yield from _speedup(prefix, one.replay.comparison.speedup, one.replay.comparison.interval)
    elif isinstance(result, CompareStep):
        yield from _speedup("", result.speedup, result.interval)


def _speedup(prefix: str, speedup: float | None, interval: Interval | None) -> Iterator[tuple[str, float | None]]:
    yield f"{prefix}speedup_ratio", speedup
    yield f"{prefix}speedup_low_ratio", interval.low if interval else None
    yield f"{prefix}speedup_high_ratio", interval.high if interval else None


def outcome_tags(run: RunDirectory) -> dict[str, str]:
    """How it ended, and where its profiles are."""
    tags: dict[str, str | None] = {"perfladder.model_version": run.record.mlflow_model_version}
    path = run.path / OUTCOME_FILE
    if path.is_file():
        outcome = read_model(path, ProofOutcome)
        tags |= {"perfladder.verdict": outcome.verdict, "perfladder.reason": outcome.reason}
        tags |= {"perfladder.archive_sha256": outcome.archive_sha256}
        tags |= {f"perfladder.tuned.{path or 'target'}": what for path, what in outcome.modules.items()}
    for step, folder in run.record.profile_runs.items():
        tags[f"perfladder.{_SIDES[step]}_run_dir"] = folder
        record = _record_of(Path(folder))
        tags[f"perfladder.{_SIDES[step]}_run"] = record.mlflow_run_id if record is not None else None
    return {name: value for name, value in tags.items() if value}


def register(target: Target, run: RunDirectory) -> list[str]:
    """Upload the archive and its sums, and make them a version of the workload's model; a second call finds it there.

    Returns:
        What could not be uploaded; nothing is registered then.
    """
    archive, run_id = kept_archive(run), str(runs_of(target, run.record)[None])
    assert archive is not None, "it is looked at before"
    if not archive.is_file():
        return [f"{archive.name} (it is gone from {archive.parent})"]
    beside = archive.parent.glob(f"{archive.stem}_sha256_sums.txt")
    # Whatever its size: it is what is registered.
    failures = upload_files(target.client, run_id, files_of(run.path, [archive, *beside], archive.stat().st_size))
    if failures:
        return failures
    name = model_name(run)
    version = _version_of(target.client, name, run_id)
    if version is None:
        _create_model(target.client, name)
        source = f"{target.client.get_run(run_id).info.artifact_uri}/{archive.parent.name}"
        outcome = read_model(run.path / OUTCOME_FILE, ProofOutcome)
        version = target.client.create_model_version(
            name,
            source,
            run_id,
            tags=_version_tags(run, outcome),
            description=outcome.reason[:MAX_TAG_CHARS],
        )
    log_values(target.client, run_id, {}, {"perfladder.model_version": f"{name}/{version.version}"})
    return []


def find_version(target: Target, run: RunDirectory) -> str | None:
    """Name and version of a run's archive in the model registry; None: it is not there."""
    name = model_name(run)
    version = _version_of(target.client, name, str(runs_of(target, run.record)[None]))
    return None if version is None else f"{name}/{version.version}"


def model_name(run: RunDirectory) -> str:
    """The registered model of a workload."""
    return f"{MODEL_PREFIX}{run.record.workload_name}"


def _create_model(client: MlflowClient, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description="Modules tuned by perfladder, as archives with their proofs.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _version_of(client: MlflowClient, name: str, run_id: str) -> ModelVersion | None:
    found = client.search_model_versions(f"name = '{name}'")
    return next((version for version in found if version.run_id == run_id), None)


def _version_tags(run: RunDirectory, outcome: ProofOutcome) -> dict[str, str]:
    tags: dict[str, object] = {
        "perfladder.run_id": outcome.run_id,
        "perfladder.workload": outcome.workload,
        "perfladder.device": outcome.device,
        "perfladder.speedup": outcome.speedup,
        "perfladder.speedup_low": outcome.interval.low if outcome.interval else None,
        "perfladder.speedup_high": outcome.interval.high if outcome.interval else None,
        "perfladder.archive_sha256": outcome.archive_sha256,
        "perfladder.modules": ", ".join(f"{path or 'target'}: {what}" for path, what in outcome.modules.items()),
    }
    folders = {"": run.path, "tuned.": Path(run.record.profile_runs.get("profile-tuned", ""))}
    for prefix, folder in folders.items():
        if (folder / "environment.json").is_file():
            info = read_model(folder / "environment.json", LoadedInfo)
            tags |= {f"{prefix}fingerprint.work": info.fingerprints.work.digest}
            tags |= {f"{prefix}fingerprint.configuration": info.fingerprints.configuration.digest}
            tags |= {"env.fingerprint": info.environment.fingerprint, "git.commit": info.git.commit}
    return {name: str(value) for name, value in tags.items() if value is not None}


def _record_of(folder: Path) -> RunRecord | None:
    try:
        return RunDirectory.open(folder).record
    except InputError:
        return None
