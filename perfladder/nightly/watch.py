"""The steps of one workload's night: profile, read the history, judge, measure again before an alarm, write it down."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from perfladder.errors import InputError, PerfladderError
from perfladder.files import write_atomically
from perfladder.ladder import ClimbOutcome
from perfladder.nightly.config import NightlyConfig
from perfladder.nightly.judge import judge_night
from perfladder.nightly.model import Night, NightVerdict
from perfladder.nightly.outcome import WorkloadNight
from perfladder.nightly.records import in_order, night_of, write_night
from perfladder.nightly.trend import trend_data
from perfladder.nightly.views import render_night
from perfladder.rundir import RunDirectory
from perfladder.workload import WorkloadFile, load_workload

PAGE_FILE = "night.md"
FIRST_RUNG = "stages"
"""A second measurement answers whether the metric is slower; rung 1 is enough for that."""


class Steps(Protocol):
    """What differs between a night with servers and one without."""

    def profile(self, file: WorkloadFile, source: str, until: str) -> ClimbOutcome:
        """Measure a workload into a run directory of its own."""
        ...

    def history(self, workload: str) -> list[Night]:
        """All nights that are known of a workload."""
        ...

    def keep(self, night: Night, verdict: NightVerdict, page: str, second: Night | None) -> None:
        """Tell others of a night that is on disk already."""
        ...

    def tell(self, text: str) -> None:
        """Show one line."""
        ...


def workload_files(path: Path) -> list[Path]:
    """The workload files of a folder, or the one that was named.

    Raises:
        InputError: There is none.
    """
    if path.is_file():
        return [path]
    found = sorted(file for file in path.glob("*") if file.suffix in (".yaml", ".yml") and file.is_file())
    if not found:
        what = "has no workload file (*.yaml, *.yml)" if path.is_dir() else "is neither a folder nor a file"
        raise InputError(f"--workloads: {path} {what}. Name a folder with one file for each workload.")
    return found


def require_own_names(files: Sequence[Path]) -> None:
    """Refuse two files with one name, whose nights would be one history.

    Raises:
        InputError: Names both files. A file that cannot be read is told when its turn comes.
    """
    owners: dict[str, Path] = {}
    for file in files:
        try:
            name = load_workload(str(file)).workload.name
        except PerfladderError:
            continue
        if name in owners:
            raise InputError(
                f"--workloads: {owners[name]} and {file} both have the name {name!r}, and a history belongs to a name. "
                "Give each workload its own."
            )
        owners[name] = file


def watch_workload(
    source: Path,
    config: NightlyConfig,
    steps: Steps,
    *,
    baseline: Sequence[Night] = (),
    sleep: Callable[[float], None] = time.sleep,
) -> WorkloadNight:
    """One workload's night. What goes wrong is in the row: the other workloads have their turn all the same.

    Args:
        source: Its file.
        config: What to do.
        steps: How to measure, and who hears of it.
        baseline: Nights named as the baseline, of any workload.
        sleep: Waits before a second measurement.
    """
    row = WorkloadNight(source=str(source), status="failed")
    try:
        file = _prepared(load_workload(str(source)), config)
        row = row.model_copy(update={"workload": file.workload.name})
        tonight = _measured(steps.profile(file, str(source), config.until), None)
        row = row.model_copy(update={"run_dir": tonight.run_dir})
        return _judged(row, file, tonight, config, steps, baseline, sleep)
    except PerfladderError as error:
        steps.tell(f"{row.workload or source}: failed: {error}")
        return row.model_copy(update={"error": str(error), "exit_code": error.exit_code})


def _prepared(file: WorkloadFile, config: NightlyConfig) -> WorkloadFile:
    launches = file.workload.launches or config.launches
    return WorkloadFile(file.workload.model_copy(update={"launches": launches}), file.base_dir)


def _measured(outcome: ClimbOutcome, second_of: str | None) -> Night:
    return night_of(Path(outcome.run_dir), second_of=second_of)


def _judged(
    row: WorkloadNight,
    file: WorkloadFile,
    tonight: Night,
    config: NightlyConfig,
    steps: Steps,
    baseline: Sequence[Night],
    sleep: Callable[[float], None],
) -> WorkloadNight:
    nights = in_order(steps.history(tonight.workload))
    named = [night for night in baseline if night.workload == tonight.workload]
    verdict, second = judge_night(tonight, nights, config.rules, baseline=named), None
    # Before anything else: what is measured next may fail, and the night must not be lost.
    write_night(tonight, verdict)
    if verdict.kind == "suspected" and config.takes_second:
        steps.tell(f"{tonight.workload}: {verdict.reason} A second measurement follows in {config.second_after_s:g} s.")
        sleep(config.second_after_s)
        second, error = _second(row, file, tonight, steps)
        row = row.model_copy(update={"error": error, "second_run_dir": second.run_dir if second is not None else None})
        if second is not None:
            verdict = judge_night(tonight, nights, config.rules, second=second, baseline=named)
            write_night(second)
    record = write_night(tonight, verdict)
    known = [*nights, record.night, *([second] if second is not None else [])]
    page = render_night(verdict, trend_data(known, config.rules))
    with RunDirectory.open(Path(tonight.run_dir)).writing():
        write_atomically(Path(tonight.run_dir) / PAGE_FILE, page)
    steps.keep(record.night, verdict, page, second)
    steps.tell(f"{tonight.workload}: {verdict.kind}: {verdict.reason}")
    mlflow_run_id = RunDirectory.open(Path(tonight.run_dir)).record.mlflow_run_id
    return row.model_copy(update={"status": "judged", "verdict": verdict, "mlflow_run_id": mlflow_run_id})


def _second(row: WorkloadNight, file: WorkloadFile, tonight: Night, steps: Steps) -> tuple[Night | None, str | None]:
    """The second measurement, or why there is none; the first one stands all the same."""
    try:
        return _measured(steps.profile(file, row.source, FIRST_RUNG), tonight.run_id), None
    except PerfladderError as error:
        steps.tell(f"{tonight.workload}: the second measurement failed: {error}")
        return None, f"The second measurement failed: {error}"
