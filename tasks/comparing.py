"""The steps of comparing runs: find and read each side, compare, save, publish, keep in MLflow."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.states import Completed, Failed

from perfladder.comparing.model import Change, RunComparison, Where
from perfladder.comparing.runs import compare_read
from perfladder.comparing.sides import MeasuredSide, read_side
from perfladder.comparing.views import render_comparison, write_comparison
from perfladder.tasks.artifacts import key_of, link_to_mlflow, page_of_flow_run
from perfladder.tasks.find import find_anywhere
from perfladder.tasks.steps import skill_task
from perfladder.tasks.store import StoreError, TrackingStore

_STEP = "6. Decide, and stop"
_PLAIN: dict[str, Any] = {"cache_policy": NO_CACHE, "retries": 0, "persist_result": False}
_UPLOADING: dict[str, Any] = {"cache_policy": NO_CACHE, "retries": 1, "retry_delay_seconds": 1, "persist_result": False}


def find_side(names: str | Sequence[str], where: Where, tracking_uri: str, runs_dir: Path) -> MeasuredSide:
    """Find and read the runs of one side, as the task `load-baseline` or `load-candidate`."""
    named = [names] if isinstance(names, str) else list(names)
    step = find_side_task.with_options(name=f"load-{where}", task_run_name=f"load-{where}")
    return step(named, where, tracking_uri, runs_dir)


@skill_task(_STEP, **_PLAIN)
def find_side_task(names: list[str], where: Where, tracking_uri: str, runs_dir: Path) -> MeasuredSide:
    """Read what was measured of one side."""
    paths = [path for name in names for path in find_anywhere(name, tracking_uri, os.environ, runs_dir)]
    return read_side(paths, f"{where} {', '.join(names)}")


@skill_task(_STEP, name="compare", task_run_name="compare", **_PLAIN)
def compare_sides_task(baseline: MeasuredSide, candidate: MeasuredSide, min_effect: float) -> RunComparison:
    """Compare the two sides; nothing is measured."""
    return compare_read(baseline, candidate, min_effect=min_effect)


@skill_task(_STEP, name="save", task_run_name="save", **_PLAIN)
def save_comparison(comparison: RunComparison, folder: Path | None, runs_dir: Path) -> Path:
    """Write the comparison's files before anyone else hears of it."""
    if folder is None:
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{secrets.token_hex(3)}"
        folder = runs_dir.resolve() / "comparisons" / f"{comparison.workload}-{name}"
    write_comparison(comparison, folder)
    return folder


def publish_comparison(comparison: RunComparison, folder: Path) -> None:
    """Publish as a task; without it, the folder still has everything."""
    publish_comparison_task(comparison, folder, return_state=True)


@skill_task("7. Report", name="publish", task_run_name="publish", **_UPLOADING)
def publish_comparison_task(comparison: RunComparison, folder: Path) -> None:
    """Create the artifacts `comparison-<workload>` and `changes-<workload>`; each comparison adds a version."""
    markdown, name = render_comparison(comparison), comparison.workload
    create_markdown_artifact(markdown, key=key_of("comparison", name), description=f"In {folder}")
    create_table_artifact(changes_table(comparison), key=key_of("changes", name), description=f"In {folder}")


def changes_table(comparison: RunComparison) -> list[dict[str, Any]]:
    """One row for each time that was compared."""
    return [_row(part, change) for part, change in _all_changes(comparison)]


def comparison_metrics(comparison: RunComparison) -> dict[str, float]:
    """The numbers of a comparison as metrics; a ratio has no unit, a time has."""
    found: dict[str, float] = {}
    for part, change in _all_changes(comparison):
        prefix = f"{part}/{change.name}"
        found |= {f"{prefix}/baseline_{change.unit}": change.baseline}
        found |= {f"{prefix}/candidate_{change.unit}": change.candidate}
        if change.speedup is not None:
            found[f"{prefix}/speedup_ratio"] = change.speedup
        if change.interval is not None:
            found[f"{prefix}/speedup_low_ratio"] = change.interval.low
            found[f"{prefix}/speedup_high_ratio"] = change.interval.high
    return found


def log_comparison(store: TrackingStore, comparison: RunComparison, folder: Path) -> None:
    """Upload as a task; what fails is told, and costs nothing: the folder has everything."""
    state = log_comparison_task(store, comparison, folder, return_state=True)
    if state.is_failed():
        store.tell(f"Not in MLflow: {state.message} Everything is in {folder}.")


@skill_task(_STEP, name="comparison-to-mlflow", task_run_name="comparison-to-mlflow", **_UPLOADING)
def log_comparison_task(store: TrackingStore, comparison: RunComparison, folder: Path) -> State[None]:
    """Make an MLflow run with the comparison's metrics, tags and files; it and the flow run link to each other."""
    from perfladder.tasks.tracking import log_folder, prefect_tags

    metrics = comparison_metrics(comparison)
    tags = _tags(comparison) | prefect_tags(flow_run.get_id(), page_of_flow_run())
    try:
        run_id, failures = store.ask(
            lambda target: log_folder(target, f"compare-{comparison.workload}-{folder.name}", folder, metrics, tags)
        )
        link_to_mlflow(store.page_of(run_id), comparison.workload)
    except StoreError as error:
        return Failed(message=str(error))
    return Failed(message="; ".join(failures)) if failures else Completed(message="Uploaded")


def _all_changes(comparison: RunComparison) -> list[tuple[str, Change]]:
    found = [("metric", comparison.metric)]
    for number, scenario in enumerate(comparison.scenarios):
        part = "stage" if number == 0 else f"scenario/{scenario.name}/stage"
        found += [(part, change) for change in (scenario.end_to_end, *scenario.stages)]
    for name, profiled in (("region", comparison.regions), ("family", comparison.families)):
        found += [(name, change) for change in (profiled.rows if profiled is not None else [])]
    return found


def _row(part: str, change: Change) -> dict[str, Any]:
    interval = change.interval
    return {
        "part": part,
        "name": change.name,
        "baseline": f"{change.baseline:.4g} {change.unit}",
        "candidate": f"{change.candidate:.4g} {change.unit}",
        "speedup": None if change.speedup is None else round(change.speedup, 4),
        "interval": None if interval is None else f"{interval.low:.4f} to {interval.high:.4f}",
        "verdict": change.verdict if change.same_within is None else f"same within {change.same_within:.1%}",
        "reason": change.reason,
    }


def _tags(comparison: RunComparison) -> dict[str, str]:
    tags = {
        "perfladder.version": comparison.perfladder_version,
        "perfladder.kind": "comparison",
        "perfladder.workload": comparison.workload,
        "perfladder.method": comparison.method,
        "perfladder.verdict": comparison.verdict,
        "perfladder.reason": comparison.reason,
    }
    for where, side in (("baseline", comparison.baseline), ("candidate", comparison.candidate)):
        tags[f"perfladder.{where}"] = side.label
        tags[f"perfladder.{where}_runs"] = "\n".join(side.runs)
        tags[f"perfladder.{where}_commit"] = side.commit or "none"
    return tags
