"""A run directory as MLflow has it: one parent run, one nested run a rung. Uploading again changes nothing.

Only `MlflowClient` with explicit run ids is used: MLflow's active run belongs to one thread. The functions named
`log_*` are called by `TrackingStore` in its own thread.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from pydantic import JsonValue

from perfladder.ladder import RUNGS, rung_named
from perfladder.rundir import SETTINGS_FILE, RunDirectory, RungEntry, RunRecord, read_model
from perfladder.rungs.base import RungResult
from perfladder.rungs.stages import StagesResult
from perfladder.target import LoadedInfo
from perfladder.tasks.metrics import headline, metrics_of
from perfladder.tasks.names import flatten, slugs
from perfladder.tasks.nights import night_metrics, night_tags
from perfladder.tasks.store import Target
from perfladder.tasks.uploads import NOT_PART_OF_IT

RUN_ID_TAG = "perfladder.run_id"
RUNG_TAG = "perfladder.rung"
MAX_PARAM_CHARS = 6000
MAX_TAG_CHARS = 8000
"""Longer values are cut without an error by MLflow (measured on 3.17)."""

_STATUS = {"running": "RUNNING", "done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_MAX_FILE_FAILURES = 2


class Files(NamedTuple):
    """Files of one folder to upload, and those that stay, with the reason."""

    root: Path
    chosen: list[Path]
    kept_back: dict[str, str]


def log_begin(target: Target, run: RunDirectory, *, max_artifact_bytes: int) -> str:
    """Make the parent run, with the workload as params and the environment as tags; returns its id."""
    record = run.record
    parent_id = runs_of(target, record).get(None) or _create(
        target, record, {}, record.run_id, ms_of(record.started_at)
    )
    params, tags = flatten(json.loads(_workload_json(run))) | _settings(run), _parent_tags(run)
    if record.resumed_at:
        if record.ended_at is None:
            target.client.update_run(parent_id, status="RUNNING")
        # MLflow never lets a param change, and another limit, say, is no reason for another run.
        params, changed = _unlogged(target.client.get_run(parent_id).data.params, params)
        tags |= {f"perfladder.resumed_with.{name}": value for name, value in changed.items()}
    log_values(target.client, parent_id, params, tags)
    return parent_id


def log_rung(target: Target, run: RunDirectory, name: str, *, max_artifact_bytes: int) -> list[str]:
    """Make or complete a rung's nested run: tags, metrics in one batch, files. Returns what could not be uploaded.

    A step of a tuning run has no run of its own: it goes into that of the whole.
    """
    if run.record.kind == "tuning":
        from perfladder.tasks.tuning_tracking import log_step

        return log_step(target, run, name, max_artifact_bytes=max_artifact_bytes)
    entry = next(entry for entry in run.record.rungs if entry.name == name)
    rung = rung_named(name)
    result = read_model(run.path / entry.folder / f"{name}.json", rung.result_type)
    start_ms = ms_of(result.started_at or run.record.started_at)
    runs = runs_of(target, run.record)
    tags = {RUNG_TAG: name, "mlflow.parentRunId": str(runs[None])}
    if name in runs and target.client.get_run(runs[name]).info.start_time != start_ms:
        # Of an earlier measurement, whose numbers must not stand among the new ones.
        target.client.delete_run(runs.pop(name))
    run_id = runs.get(name) or _create(target, run.record, tags, f"{rung.number}-{name}", start_ms)
    files = _rung_files(run, entry, max_artifact_bytes)
    renamed = log_metrics(target.client, run_id, metrics_of(result), start_ms)
    log_values(target.client, run_id, {}, _rung_tags(result, files))
    _end(
        target,
        run_id,
        "FAILED" if result.status == "failed" else "FINISHED",
        start_ms + int(1000 * (result.duration_s or 0)),
    )
    if renamed:
        target.client.log_dict(run_id, renamed, "metric_names.json")
    return upload_files(target.client, run_id, files)


def log_registration(target: Target, run: RunDirectory, *, max_artifact_bytes: int) -> list[str]:
    """Upload the archive that a tuning run keeps, and register it. Returns what could not be uploaded."""
    from perfladder.tasks.tuning_tracking import register

    return register(target, run)


def model_version(target: Target, run: RunDirectory, *, max_artifact_bytes: int) -> str:
    """Name and version of the registered archive."""
    from perfladder.tasks.tuning_tracking import find_version

    return find_version(target, run) or ""


def log_end(target: Target, run: RunDirectory, *, max_artifact_bytes: int) -> list[str]:
    """Complete the parent run: the metric that matters, how it ended, report and records."""
    record = run.record
    parent_id = str(runs_of(target, record)[None])
    start_ms = ms_of(record.started_at)
    metrics = _headline(run) | night_metrics(run)
    if record.ended_at is not None:
        metrics["wall_s"] = (ms_of(record.ended_at) - start_ms) / 1000
    log_metrics(target.client, parent_id, metrics, start_ms)
    own = (path for path in run.path.iterdir() if path.suffix != ".log" and path.name not in NOT_PART_OF_IT)
    files = files_of(run.path, own, max_artifact_bytes)
    tags = _parent_tags(run) | _end_tags(record, files) | night_tags(run) | _description(run)
    if record.kind == "tuning":
        from perfladder.tasks.tuning_tracking import outcome_tags

        tags |= outcome_tags(run)
    log_values(target.client, parent_id, {}, tags)
    if record.ended_at is not None:
        _end(target, parent_id, _STATUS[record.status], ms_of(record.ended_at))
    return upload_files(target.client, parent_id, files)


def log_folder(
    target: Target, name: str, folder: Path, metrics: Mapping[str, float], tags: Mapping[str, str]
) -> tuple[str, list[str]]:
    """Make a run of its own with metrics, tags and the files of a folder, or complete one of that name.

    Returns:
        The run's id, and what could not be uploaded.
    """
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    found = target.client.search_runs([target.experiment_id], f"attributes.run_name = '{name}'")
    own = {"mlflow.source.name": "perfladder", "mlflow.source.type": "LOCAL"}
    run = (
        found[0]
        if found
        else target.client.create_run(target.experiment_id, start_time=now_ms, tags=own, run_name=name)
    )
    run_id = str(run.info.run_id)
    renamed = log_metrics(target.client, run_id, metrics, int(run.info.start_time))
    log_values(target.client, run_id, {}, tags)
    if renamed:
        target.client.log_dict(run_id, renamed, "metric_names.json")
    failures = upload_files(target.client, run_id, files_of(folder, folder.iterdir(), sys.maxsize))
    _end(target, run_id, "FINISHED", now_ms)
    return run_id, failures


def runs_of(target: Target, record: RunRecord) -> dict[str | None, str]:
    """The MLflow runs of a perfladder run, by rung; the parent's rung is None."""
    found = target.client.search_runs([target.experiment_id], f"tags.`{RUN_ID_TAG}` = '{record.run_id}'")
    return {run.data.tags.get(RUNG_TAG): run.info.run_id for run in found}


def _create(target: Target, record: RunRecord, tags: Mapping[str, str], name: str, start_ms: int) -> str:
    own = {RUN_ID_TAG: record.run_id, "mlflow.source.name": "perfladder", "mlflow.source.type": "LOCAL"}
    run = target.client.create_run(target.experiment_id, start_time=start_ms, tags={**own, **tags}, run_name=name)
    return str(run.info.run_id)


def _end(target: Target, run_id: str, status: str, end_ms: int) -> None:
    target.client.set_terminated(run_id, status=status, end_time=end_ms)


def log_metrics(client: MlflowClient, run_id: str, metrics: Mapping[str, float], time_ms: int) -> dict[str, str]:
    """Log all metrics at once, at a fixed time: a second upload adds nothing. Returns the names that were changed."""
    names = slugs(metrics)
    # MLflow stores an infinite number as a large finite one, without an error.
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    client.log_batch(run_id, metrics=[Metric(names[name], value, time_ms, 0) for name, value in finite.items()])
    return {spelt: name for name, spelt in names.items() if spelt != name}


def log_values(client: MlflowClient, run_id: str, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
    """Log params and tags; a value that is too long becomes its digest, and the whole text an artifact."""
    long_values: dict[str, str] = {}
    param_names, tag_names = slugs(params), slugs(tags)

    def fitting(name: str, value: str, limit: int) -> str:
        if len(value) <= limit:
            return value
        file = f"long_values/{hashlib.sha256(name.encode()).hexdigest()[:16]}.txt"
        long_values[file] = value
        return f"sha256:{hashlib.sha256(value.encode()).hexdigest()} ({len(value)} characters, in artifact {file})"

    client.log_batch(
        run_id,
        params=[Param(param_names[name], fitting(name, value, MAX_PARAM_CHARS)) for name, value in params.items()],
        tags=[RunTag(tag_names[name], fitting(name, value, MAX_TAG_CHARS)) for name, value in tags.items()],
    )
    for file, text in long_values.items():
        client.log_text(run_id, text, file)


def _unlogged(logged: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split params into those that are not there yet, and those that are there with another value."""
    names = slugs(wanted)
    new = {name: value for name, value in wanted.items() if names[name] not in logged}
    changed = {
        name: value
        for name, value in wanted.items()
        if len(value) <= MAX_PARAM_CHARS and logged.get(names[name], value) != value
    }
    return new, changed


def _settings(run: RunDirectory) -> dict[str, str]:
    """What a tuning run was asked for, besides its workload."""
    path = run.path / SETTINGS_FILE
    return flatten(json.loads(path.read_text(encoding="utf-8")), "proof") if path.is_file() else {}


def _workload_json(run: RunDirectory) -> str:
    import yaml

    return json.dumps(yaml.safe_load((run.path / "workload.yaml").read_text(encoding="utf-8")))


def _parent_tags(run: RunDirectory) -> dict[str, str]:
    record = run.record
    tags = {
        "perfladder.version": record.perfladder_version,
        "perfladder.kind": record.kind,
        "perfladder.workload": record.workload_name,
        "perfladder.workload_source": record.workload_source,
        "perfladder.run_dir": str(run.path),
        **prefect_tags(record.prefect_flow_run_id, record.prefect_flow_run_url),
    }
    environment = run.path / "environment.json"
    if not environment.is_file():
        return tags
    info = read_model(environment, LoadedInfo)
    if info.git.commit:
        tags["mlflow.source.git.commit"] = info.git.commit
    return tags | _environment_tags(info)


def prefect_tags(flow_run_id: str | None, url: str | None) -> dict[str, str]:
    """The same run in Prefect."""
    tags = {"perfladder.prefect_flow_run_id": flow_run_id, "perfladder.prefect_flow_run_url": url}
    return {name: value for name, value in tags.items() if value}


def _environment_tags(info: LoadedInfo) -> dict[str, str]:
    """What stays the same from run to run on this machine; the moving state is in the artifact environment.json."""
    prints = info.fingerprints
    described: dict[str, JsonValue] = {
        "env": {**info.environment.model_dump(mode="json"), "fingerprint": info.environment.fingerprint},
        "target": info.model_dump(
            mode="json",
            include={
                "target_type",
                "device",
                "dtypes",
                "num_parameters",
                "attention_backend",
                "compiled_modules",
                "tuned_modules",
            },
        ),
        "git": info.git.model_dump(mode="json"),
        "fingerprint": {name: getattr(prints, name).digest for name in ("work", "configuration", "protocol")},
    }
    return {name: text for name, text in flatten(described).items() if text != "null"}


def _rung_tags(result: RungResult, files: Files) -> dict[str, str]:
    tags = {
        "perfladder.status": result.status,
        "perfladder.reason": result.reason,
        "perfladder.question": rung_named(result.rung).question,
        "perfladder.warnings": "\n".join(f"{warning.code}: {warning.message}" for warning in result.warnings),
        "perfladder.not_uploaded": _kept_back_text(files),
    }
    return {name: value for name, value in tags.items() if value}


def _end_tags(record: RunRecord, files: Files) -> dict[str, str]:
    tags = {
        "perfladder.status": record.status,
        "perfladder.exit_code": str(record.exit_code),
        "perfladder.error": record.error,
        "perfladder.stopped_because": record.stopped_because,
        "perfladder.not_uploaded": _kept_back_text(files),
    }
    return {name: value for name, value in tags.items() if value}


def _description(run: RunDirectory) -> dict[str, str]:
    """The report as MLflow's description of the run, as far as a tag holds it."""
    report = run.path / "report.md"
    if not report.is_file():
        return {}
    text, rest = report.read_text(encoding="utf-8"), "\n\nThe rest is in the artifact `report.md`."
    if len(text) > MAX_TAG_CHARS:
        text = text[: MAX_TAG_CHARS - len(rest)].rpartition("\n")[0] + rest
    return {"mlflow.note.content": text}


def _headline(run: RunDirectory) -> dict[str, float]:
    """The metric that matters and the stages' times, also on the parent run, where runs are compared."""
    entry = next((entry for entry in run.record.rungs if entry.name == RUNGS[0].name), None)
    if entry is None:
        return {}
    return headline(read_model(run.path / entry.folder / f"{entry.name}.json", StagesResult))


def _rung_files(run: RunDirectory, entry: RungEntry, max_bytes: int) -> Files:
    """The files of a rung. A capture holds prompts and pictures of users: only its result goes into the store."""
    folder = run.path / entry.folder
    paths = [path for path in folder.rglob("*") if not path.is_symlink() and path.is_file()]
    captured = [path for path in paths if _is_captured(path, run.path, entry)]
    files = files_of(folder, [path for path in paths if path not in captured], max_bytes)
    if captured:
        files.kept_back["captured inputs and outputs"] = (
            f"{len(captured)} files with the pipeline's data stay in {folder}"
        )
    return files


def _is_captured(path: Path, root: Path, entry: RungEntry) -> bool:
    is_result = path == root / entry.folder / f"{entry.name}.json"
    return not is_result and any(part.endswith("-capture") for part in path.relative_to(root).parts[:-1])


def files_of(root: Path, paths: Iterable[Path], max_bytes: int) -> Files:
    """Regular files, small ones first."""
    files = Files(root, [], {})
    plain = [path for path in paths if path.is_file() and not path.is_symlink() and not path.name.startswith(".")]
    for path in sorted(plain, key=lambda path: (path.stat().st_size, path)):
        size = path.stat().st_size
        if size <= max_bytes:
            files.chosen.append(path)
        else:
            files.kept_back[str(path.relative_to(root))] = (
                f"{size >> 20} MiB is over the limit of {max_bytes >> 20} MiB"
            )
    return files


def _kept_back_text(files: Files) -> str:
    return "\n".join(f"{name}: {reason}" for name, reason in files.kept_back.items())


def upload_files(client: MlflowClient, run_id: str, files: Files) -> list[str]:
    """Upload files and compare their sizes in the store; returns what failed, and gives up after two failures."""
    failures: list[str] = []
    for path in files.chosen:
        name = str(path.relative_to(files.root))
        if len(failures) == _MAX_FILE_FAILURES:
            failures.append("and the files after it")
            break
        try:
            client.log_artifact(run_id, str(path), _folder(path, files.root))
        except Exception as error:  # Artifact stores raise what their drivers raise; the other files still go.
            reason = next(iter(str(error).splitlines()), "")[:200]
            failures.append(f"{name} ({type(error).__name__}: {reason})")
    return failures or _size_failures(client, run_id, files)


def _size_failures(client: MlflowClient, run_id: str, files: Files) -> list[str]:
    sizes = _stored_sizes(client, run_id, {_folder(path, files.root) for path in files.chosen})
    failures = []
    for path in files.chosen:
        name, size = str(path.relative_to(files.root)), path.stat().st_size
        stored = sizes.get(name)
        if name not in sizes:
            failures.append(f"{name} (did not arrive)")
        elif stored is not None and stored != size:
            failures.append(f"{name} ({stored} of {size} bytes arrived)")
    return failures


def _stored_sizes(client: MlflowClient, run_id: str, folders: set[str | None]) -> dict[str, int | None]:
    return {info.path: info.file_size for folder in folders for info in client.list_artifacts(run_id, folder)}


def _folder(path: Path, root: Path) -> str | None:
    parent = path.parent.relative_to(root).as_posix()
    return None if parent == "." else parent


def ms_of(moment: str) -> int:
    """Milliseconds since the epoch, as MLflow counts time."""
    return int(datetime.fromisoformat(moment).timestamp() * 1000)
