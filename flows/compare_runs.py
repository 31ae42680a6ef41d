"""Compare two versions by their finished runs, as a Prefect flow that is kept in MLflow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.logging import get_run_logger

from perfladder.comparing.model import RunComparison
from perfladder.flows.config import CompareRunsConfig
from perfladder.tasks.comparing import (
    compare_sides_task,
    find_side,
    log_comparison,
    publish_comparison,
    save_comparison,
)
from perfladder.tasks.store import TrackingStore, resolve_tracking_uri

__all__ = ["CompareRunsConfig", "compare_runs"]

_OPTIONS: dict[str, Any] = {"name": "compare-runs", "retries": 0, "persist_result": False}


@flow(**_OPTIONS)
def compare_runs(config: CompareRunsConfig) -> RunComparison:
    """Find both sides, compare them, and keep the comparison as files, as artifacts and in MLflow.

    Raises:
        PerfladderError: A run is not found or was not measured, or the sides do not do the same work; the flow run
            then ends as failed.
    """
    logger, runs_dir = get_run_logger(), Path(config.runs_dir)
    uri = resolve_tracking_uri(config.tracking_uri, os.environ, runs_dir)
    baseline = find_side(config.baseline, "baseline", uri, runs_dir)
    candidate = find_side(config.candidate, "candidate", uri, runs_dir)
    comparison = compare_sides_task(baseline, candidate, config.min_effect)
    folder = save_comparison(comparison, Path(config.to) if config.to else None, runs_dir)
    logger.info(f"{comparison.reason} {comparison.next_step or ''} In {folder}.")
    publish_comparison(comparison, folder)
    with TrackingStore(uri, experiment=config.experiment, runs_dir=runs_dir, tell=logger.info) as store:
        log_comparison(store, comparison, folder)
    return comparison
