"""Measure two versions now, in turns: each in a process of its own, both loaded, one at work at a time (A B B A)."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from perfladder.comparing.differences import require_same_work
from perfladder.comparing.judge import Judge
from perfladder.comparing.model import RunComparison, Where
from perfladder.comparing.runs import LAUNCHES, MIN_EFFECT, check_min_effect, compare_sides
from perfladder.comparing.sides import MeasuredSide
from perfladder.comparing.turns import (
    CollectRequest,
    PrepareRequest,
    TurnRequest,
    collect,
    prepare,
    take_turn,
)
from perfladder.comparing.worktrees import Checkout, commits_checked_out
from perfladder.device_lock import device_lock
from perfladder.errors import InputError, NotPossibleHereError, PerfladderError
from perfladder.launch_pairs import MIN_LAUNCH_PAIRS, launch_noise_floor
from perfladder.models import ResultWarning
from perfladder.progress import Progress
from perfladder.session import Request, Result, Session
from perfladder.stats import MIN_PAIRS
from perfladder.target import LoadedInfo, LoadRequest, load
from perfladder.timing.results import StagesResult
from perfladder.workload import Workload, WorkloadFile

PAIRS: Final = 10
"""Runs of each side in each process."""

_WHERE: Final[tuple[Where, Where]] = ("baseline", "candidate")
_SHORT_RUN_MS: Final = 100.0
"""Of a shorter run, what the other side left in caches and clocks is a part that shows: one that is not counted goes
before it."""

Tell = Callable[[str], None]
OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Version:
    """One side of an interleaved comparison.

    Attributes:
        file: The workload.
        label: What the user called it.
        commit: Of the workload's repository, to be checked out; None: the files as they are now.
    """

    file: WorkloadFile
    label: str
    commit: str | None = None


@dataclass(frozen=True)
class _Place:
    """Where a version's code lies."""

    where: Where
    version: Version
    checkout: Checkout | None = None

    @property
    def file(self) -> WorkloadFile:
        """The workload, its paths starting in the checkout."""
        file = self.version.file
        return file if self.checkout is None else WorkloadFile(file.workload, self.checkout.at(file.base_dir))

    @property
    def folder(self) -> Path | None:
        """The current folder of its process: modules are found there as well, so it must not be the work tree."""
        return None if self.checkout is None else self.checkout.standing_for(Path.cwd())

    @property
    def request(self) -> PrepareRequest:
        """What its process must know to begin."""
        if self.checkout is None:
            return PrepareRequest()
        return PrepareRequest(own_root=str(self.checkout.path), foreign_root=str(self.checkout.root))


class _Running:
    """A version that is loaded in a process of its own."""

    def __init__(self, place: _Place, session: Session) -> None:
        self.place, self.session = place, session
        self.timeout_s = place.version.file.workload.timeout_s
        self.info = self.call(load, LoadRequest())

    def call(self, measure: Callable[[Any, Request], Result], request: Request) -> Result:
        """Run a measuring function there; an error says whose it is."""
        try:
            return self.session.call(measure, request, timeout_s=self.timeout_s)
        except PerfladderError as error:
            raise type(error)(f"{self.place.where} ({self.place.version.label}): {error}") from error


@dataclass(frozen=True)
class _Plan:
    """How much to measure, and where to tell of it."""

    pairs: int
    logs: Path
    tell: Tell
    on_progress: OnProgress


def compare_interleaved(
    baseline: Version,
    candidate: Version,
    *,
    pairs: int = PAIRS,
    check_noise: bool = False,
    min_effect: float = MIN_EFFECT,
    tell: Tell = lambda _: None,
    on_progress: OnProgress = lambda _: None,
    log_folder: Path | None = None,
) -> RunComparison:
    """Measure two versions of one workload in turns, and compare them pair by pair.

    Args:
        baseline: The version to compare with.
        candidate: The other one.
        pairs: Runs of each side in each process; scenarios have as many each. Of processes there are as many as the
            workload's `launches` says, by default 6 a side.
        check_noise: Measure the baseline against itself first: no smaller change is believed then.
        min_effect: Relative change below which none counts.
        tell: Receives lines of progress.
        on_progress: Receives how many pairs are done.
        log_folder: Receives what the processes print; None: it is not kept.

    Raises:
        InputError: The versions do not do the same work, there is no such commit, or `pairs` is too small.
        WorkloadError: A side failed.
        NotPossibleHereError: A workload has several ranks, or a commit cannot be checked out.
    """
    _check(baseline, candidate, pairs, min_effect, check_noise=check_noise)
    with contextlib.ExitStack() as stack:
        places = [
            _Place(where, version, stack.enter_context(_checked_out(version)))
            for where, version in zip(_WHERE, (baseline, candidate), strict=True)
        ]
        logs = log_folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perfladder-")))
        plan = _Plan(pairs, logs, tell, on_progress)
        floor = _measure_floor(places[0], plan) if check_noise else None
        sides, failures = _measure(places, plan)
    comparison = compare_sides(sides[0], sides[1], Judge(interleaved=True, min_effect=min_effect, aa_noise_floor=floor))
    measured = {where: side.stages for where, side in zip(_WHERE, sides, strict=True)}
    return comparison.model_copy(update={"measured": measured, "warnings": [*failures, *comparison.warnings]})


def _check(baseline: Version, candidate: Version, pairs: int, min_effect: float, *, check_noise: bool) -> None:
    check_min_effect(min_effect)
    require_same_work(baseline.file.workload, candidate.file.workload)
    workloads = baseline.file.workload, candidate.file.workload
    if any(workload.nproc > 1 for workload in workloads):
        raise NotPossibleHereError(
            "nproc: two jobs of several ranks cannot take turns; compare their runs, each with --set launches=5."
        )
    if check_noise and _num_launches(workloads) < MIN_LAUNCH_PAIRS:
        raise InputError(f"--check-noise needs launches to be {MIN_LAUNCH_PAIRS} or more; processes differ too.")
    if pairs * _num_launches(workloads) < MIN_PAIRS:
        raise InputError(f"pairs is {pairs}; a verdict needs at least {MIN_PAIRS} pairs of runs in all.")


@contextlib.contextmanager
def _checked_out(version: Version) -> Iterator[Checkout | None]:
    if version.commit is None:
        yield None
        return
    with commits_checked_out(version.file.base_dir, [version.commit]) as (checkout,):
        yield checkout


def _measure_floor(place: _Place, plan: _Plan) -> float:
    """How far the baseline is from itself."""
    plan.tell("the baseline against itself: how large is the noise?")
    (first, second), _ = _measure([place, place], plan)
    return launch_noise_floor(first.stages.default.wall_ms, second.stages.default.wall_ms)


def _measure(places: list[_Place], plan: _Plan) -> tuple[list[MeasuredSide], list[ResultWarning]]:
    """Both sides, in as many pairs of processes as the workloads' `launches` say; those after the first may fail."""
    count = _num_launches([place.version.file.workload for place in places])
    found: tuple[list[StagesResult], list[StagesResult]] = ([], [])
    infos: list[LoadedInfo] = []
    failures: list[ResultWarning] = []
    for number in range(count):
        launched = f", launch {number + 1} of {count}" if count > 1 else ""
        try:
            infos, results = _measure_once(places, plan, launched, is_reversed=number % 2 == 1)
        except PerfladderError as error:
            if not infos:
                raise
            message = f"Launch {number + 1} of {count} gave no samples: {error}"
            failures.append(ResultWarning(code="LAUNCH_FAILED", message=message))
            continue
        for side, result in zip(found, results, strict=True):
            side.append(result)
    sides = [
        MeasuredSide(label=place.version.label, workload=place.version.file.workload, info=info, all_stages=side)
        for place, info, side in zip(places, infos, found, strict=True)
    ]
    return sides, failures


def _measure_once(
    places: list[_Place], plan: _Plan, launched: str, *, is_reversed: bool
) -> tuple[list[LoadedInfo], list[StagesResult]]:
    """One process a side, both loaded and measured in turns; `is_reversed`: the candidate is loaded first."""
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with contextlib.ExitStack() as stack:
        sides = []
        for place in reversed(places) if is_reversed else places:
            plan.tell(f"loading the {place.where}{launched}")
            log_path = plan.logs / f"{place.where}.log"
            session = Session(place.file, log_path=log_path, environment=None, folder=place.folder)
            sides.append(_Running(place, stack.enter_context(session)))
        for name in sorted({name for side in sides for name in side.info.lock_names}):
            stack.enter_context(device_lock(name, tell=plan.tell))
        _take_turns(sides, plan, launched)
        results = [side.call(collect, CollectRequest()) for side in sides]
    results = [result.model_copy(update={"started_at": started_at}) for result in results]
    infos = [side.info for side in sides]
    return (infos[::-1], results[::-1]) if is_reversed else (infos, results)


def _take_turns(sides: list[_Running], plan: _Plan, launched: str) -> None:
    """Warm both sides up in turns, then measure pairs in the order A B B A, scenario by scenario."""
    plan.tell(f"warming up{launched}")
    prepared = [side.call(prepare, side.place.request) for side in sides]
    num_settling = int(max(one.run_ms for one in prepared) < _SHORT_RUN_MS)
    workloads = [side.place.version.file.workload for side in sides]
    scenarios = [None, *workloads[0].scenario_names]
    for scenario in scenarios:
        for _ in range(max(1, *(workload.warmup_runs for workload in workloads))):
            for side in sides:
                side.call(take_turn, TurnRequest(scenario=scenario, is_counted=False))
    plan.tell(f"measuring in turns{launched}")
    num_total = len(scenarios) * plan.pairs
    for number in range(num_total):
        plan.on_progress(Progress(label=f"pairs{launched}", num_done=number, num_total=num_total))
        turn = TurnRequest(scenario=scenarios[number // plan.pairs], num_settling=num_settling)
        for side in sides if number % 2 == 0 else reversed(sides):
            side.call(take_turn, turn)


def _num_launches(workloads: Sequence[Workload]) -> int:
    asked = [workload.launches for workload in workloads if workload.launches is not None]
    return max(asked, default=LAUNCHES)
