"""Run directories made from recorded results: those of an H200 in `tests/data/findings`, and parts of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perfladder.ladder import RUNGS
from perfladder.rundir import RunDirectory
from perfladder.workload import parse_workload

RECORDED = Path(__file__).parents[1] / "data" / "findings"
NAMES = tuple(sorted(path.name for path in RECORDED.iterdir() if path.is_dir()))
STARTED = "2026-11-30T08:00:00+00:00"

Change = Callable[[dict[str, Any]], None]


def make_run(
    root: Path,
    name: str = "ahead",
    *,
    rungs: Sequence[str] = ("stages", "capture", "regions", "harness", "kernels"),
    changes: dict[str, Change] | None = None,
    **workload: Any,
) -> Path:
    """Write a finished run with the recorded results; each change edits one rung's JSON before it is written."""
    parsed = parse_workload({"name": name, "target": f"planted.py:{name}", "device": "cuda", **workload})
    run = RunDirectory.create(root, parsed, source=name, base_dir=root)
    (run.path / "environment.json").write_text((RECORDED / name / "environment.json").read_text())
    for rung in RUNGS:
        if rung.name not in rungs:
            continue
        data = json.loads((RECORDED / name / f"{rung.name}.json").read_text())
        if changes and rung.name in changes:
            changes[rung.name](data)
        result = rung.result_type.model_validate(data)
        run.write_result(run.rung_folder(rung.number, rung.name), rung.name, result, result.status, result.reason)
    run.update(run_id="20261130T080000-0a1b2c", started_at=STARTED, ended_at=STARTED, status="done", exit_code=0)
    return run.path
