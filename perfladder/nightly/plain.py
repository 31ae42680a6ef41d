"""A night without servers: the history is that of the runs folder, and nothing is told but on the terminal."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from perfladder.errors import RungError
from perfladder.find_runs import find_runs
from perfladder.ladder import ClimbOutcome, climb, rung_named
from perfladder.nightly.config import NightlyConfig
from perfladder.nightly.model import Night, NightVerdict
from perfladder.nightly.outcome import NightlyOutcome, WorkloadNight
from perfladder.nightly.records import Tell, night_of, read_history
from perfladder.nightly.watch import Steps, require_own_names, watch_workload, workload_files
from perfladder.rundir import RunDirectory
from perfladder.workload import WorkloadFile

FindRuns = Callable[[str], list[Path]]


class PlainSteps:
    """The steps of a night with no server."""

    def __init__(self, config: NightlyConfig, tell: Tell) -> None:
        self.runs_dir = Path(config.runs_dir)
        self.tell = tell

    def profile(self, file: WorkloadFile, source: str, until: str) -> ClimbOutcome:
        """Climb the ladder in a run directory."""
        return measured(climb(file, runs_dir=self.runs_dir, until=until, tell=self.tell, source=source))

    def history(self, workload: str) -> list[Night]:
        """Nights of the runs folder."""
        return read_history(self.runs_dir, workload, self.tell)

    def keep(self, night: Night, verdict: NightVerdict, page: str, second: Night | None) -> None:
        """The run directory has everything."""


def run_plain_night(config: NightlyConfig, tell: Tell = lambda _: None) -> NightlyOutcome:
    """Profile all workloads once and judge their night, with no server.

    Raises:
        InputError: There are no workload files, two have one name, or a baseline is not found.
    """
    return run_night(
        config,
        PlainSteps(config, tell),
        find=lambda name: find_runs(name, Path(config.runs_dir)),
        history_from=f"{Path(config.runs_dir).resolve()}",
    )


def run_night(
    config: NightlyConfig,
    steps: Steps,
    *,
    find: FindRuns,
    history_from: str,
    watch: Callable[..., WorkloadNight] = watch_workload,
) -> NightlyOutcome:
    """One night of all workloads, one after the other, however they are measured.

    Args:
        config: What to do.
        steps: How to measure, and who hears of it.
        find: Finds the runs of a baseline by name.
        history_from: Where `steps` reads earlier nights, for the record.
        watch: Does one workload.
    """
    rung_named(config.until)
    files = workload_files(Path(config.workloads))
    require_own_names(files)
    baseline = [night_of(path) for name in config.baseline for path in find(name)]
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    rows = [watch(file, config, steps, baseline=baseline) for file in files]
    return NightlyOutcome(
        started_at=started_at, runs_dir=str(Path(config.runs_dir).resolve()), history_from=history_from, workloads=rows
    )


def measured(outcome: ClimbOutcome) -> ClimbOutcome:
    """Pass an outcome on, unless nothing was measured.

    Raises:
        RungError: It was not; the message is that of the run's record.
    """
    if outcome.status == "failed":
        error = RunDirectory.open(Path(outcome.run_dir)).record.error
        raise RungError(f"{error or 'Nothing could be measured.'} All of it is in {outcome.run_dir}.")
    return outcome
