"""The ordered list of rungs, and the climb: the same for the plain, server-less way and for the Prefect flow."""

from __future__ import annotations

import contextlib
import importlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from perfladder.checksums import Checksums
from perfladder.content_key import SourcesRequest, list_sources
from perfladder.device_lock import device_lock
from perfladder.errors import InputError, NotPossibleHereError, PerfladderError, RungError
from perfladder.files import cache_folder, write_atomically
from perfladder.find_runs import find_run
from perfladder.findings import Finding, collect_findings, rungs_to_skip
from perfladder.models import Model
from perfladder.rank_session import RankSession, open_session
from perfladder.resume import Keys
from perfladder.rundir import RunDirectory, RunStatus, read_model
from perfladder.rungs.base import Launch, RungContext, RungResult
from perfladder.rungs.capture import CaptureResult
from perfladder.rungs.cost import Ask, CostEstimate, why_skipped
from perfladder.session import Request, Result, Session
from perfladder.target import LoadedInfo, LoadRequest, PreloadRequest, load, preload
from perfladder.text import near_names
from perfladder.workload import Workload, WorkloadFile

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Rung:
    """One entry of the ladder. `number` is the rung as users count it; capture is the first half of rung 3.

    An optional rung is climbed only where `until` names it.
    """

    number: int
    name: str
    result: str
    question: str
    cost: str
    runs_on_ranks: bool = False
    is_optional: bool = False

    @property
    def module(self) -> Any:
        """The rung's module, with its `run` and its result class; imported when needed."""
        return importlib.import_module(f"perfladder.rungs.{self.name}")

    @property
    def result_type(self) -> type[RungResult]:
        """The class of its result."""
        kind: type[RungResult] = getattr(self.module, self.result)
        return kind


# Within the broad session the order is time, capture, profile: a process that has profiled stays slower.
RUNGS = (
    Rung(1, "stages", "StagesResult", "Which stage dominates the metric that matters?", "plain runs", True),
    Rung(3, "capture", "CaptureResult", "What does that stage receive and return?", "plain runs"),
    Rung(
        2,
        "regions",
        "RegionsResult",
        "How much time is in which module, and how much outside any?",
        "a profiled window",
        True,
    ),
    Rung(3, "harness", "HarnessResult", "Does that stage, alone, behave as in the pipeline?", "a replay process"),
    Rung(4, "kernels", "KernelsResult", "Which kernels, from which operator and module?", "a profiled replay"),
    Rung(5, "ncu", "NcuResult", "Why is that one kernel slow?", "ncu on the replay script", is_optional=True),
)
LAST_RUNG = next(rung.name for rung in reversed(RUNGS) if not rung.is_optional)
"""How far a ladder is climbed where nobody says so."""


def rung_named(name: str) -> Rung:
    """Look a rung up.

    Raises:
        InputError: There is none of that name.
    """
    for rung in RUNGS:
        if rung.name == name:
            return rung
    raise InputError(f"There is no rung {name!r}. {near_names(name, [rung.name for rung in RUNGS], 'rungs')}")


_NOT_ON_RANKS = (
    "The workload runs on {nproc} ranks, and a stage is captured and replayed alone, in one process, where a "
    "collective inside it would wait for the other ranks. Stage timing and regions are there for every rank."
)


class _LazySession:
    """A session that loads the target on first use, and is started again after it died."""

    def __init__(self, file: WorkloadFile, log_path: Path, environment: dict[str, str]) -> None:
        self.file, self.log_path, self.environment = file, log_path, environment
        self.only: str | None = None
        self._session: Session | RankSession | None = None
        self._is_loading = self._is_loaded = self._is_preloading = False
        self.info: LoadedInfo | None = None

    def start(self) -> Session | RankSession:
        """The running child, started if there is none."""
        if self._session is None or not self._session.is_alive:
            self.close()
            self._session = open_session(self.file, log_path=self.log_path, environment=self.environment)
            self._session.__enter__()
        return self._session

    def begin_load(self) -> None:
        """Let the child load the target while this process does other things."""
        self.start().submit(load, LoadRequest(only=self.only))
        self._is_loading = True

    def begin_preload(self) -> None:
        """Let the child import the target's module, without building anything yet."""
        self.start().submit(preload, PreloadRequest())
        self._is_preloading = True

    def finish_preload(self) -> None:
        """Wait for the imports, so that nothing runs beside a measurement; a failure shows when it loads."""
        if self._is_preloading and self._session is not None:
            self._is_preloading = False
            with contextlib.suppress(PerfladderError):
                self._session.result(preload, timeout_s=self.file.workload.timeout_s)

    def loaded(self) -> Session | RankSession:
        """The child with the target loaded."""
        timeout_s = self.file.workload.timeout_s
        self.finish_preload()
        if self._session is not None and not self._session.is_alive and not self._is_loading:
            self._is_loaded = False
        if not self._is_loaded:
            if not self._is_loading:
                self.begin_load()
            self._is_loading = False
            # The child that was asked, even if it has died meanwhile: its answer is then why.
            assert self._session is not None
            self.info = self._session.result(load, timeout_s=timeout_s)
            self._is_loaded = True
        assert self._session is not None
        return self._session

    def load(self) -> LoadedInfo:
        """Load the target, unless the running child has it already."""
        self.loaded()
        assert self.info is not None
        return self.info

    def call(self, measure: Callable[[Any, Request], Result], request: Request, *, timeout_s: float) -> Result:
        """Run a measuring function where the target is loaded."""
        return self.loaded().call(measure, request, timeout_s=timeout_s)

    def sources(self) -> dict[str, str]:
        """The source files that the child has loaded, with their sums; none where no child has the target."""
        if self._is_loaded and self._session is not None and self._session.is_alive:
            with contextlib.suppress(PerfladderError):
                timeout_s = self.file.workload.timeout_s
                return self._session.call(list_sources, SourcesRequest(), timeout_s=timeout_s).files
        return {}

    def close(self) -> None:
        """End the child."""
        if self._session is not None:
            self._session.close()
        self._session = None
        self._is_loading = self._is_loaded = self._is_preloading = False


class ClimbOutcome(Model):
    """How a climb ended."""

    run_dir: str
    status: RunStatus
    exit_code: int
    stopped_because: str | None
    findings: list[Finding]


class Climb:
    """One run of the ladder, rung by rung; a context manager that leaves no process behind.

    Args:
        file: The workload.
        source: What the user named, for the record.
        runs_dir: The folder that run directories are made in.
        until: The last rung to climb, by name.
        tell: Shows one line of progress.
        environment: Environment variables of the children; by default this process's.
        ask: Asks the user at a terminal whether to climb a rung that is over budget; None: it is skipped.
        step: Whether to ask before every rung but the first.
        resume: An unfinished run to go on with, in its own folder: a folder, an id, or `latest` of this workload.

    Raises:
        InputError: There is no such rung, or the run to go on with is finished, in use, or not there.
    """

    def __init__(
        self,
        file: WorkloadFile,
        *,
        source: str,
        runs_dir: Path,
        until: str = LAST_RUNG,
        tell: Tell = lambda _: None,
        environment: dict[str, str] | None = None,
        ask: Ask | None = None,
        step: bool = False,
        resume: str | None = None,
    ) -> None:
        last = RUNGS.index(rung_named(until))
        self.rungs = RUNGS[: last + 1]
        self.file = file
        self.tell = tell
        self._ask, self._step = ask, step
        self.results: dict[str, RungResult] = {}
        self.findings: list[Finding] = []
        self.reused: set[str] = set()
        self._kept: dict[str, RungResult] = {}
        self._keys: Keys | None = None
        self._is_resumed = resume is not None
        if resume is None:
            self.run = RunDirectory.create(runs_dir, file.workload, source=source, base_dir=file.base_dir)
        else:
            found = find_run(resume, runs_dir, workload_name=file.workload.name, needs_results=False)
            self.run = RunDirectory.resume(found, file.workload)
            tell(f"going on with run {self.run.record.run_id}")
        self._environment = dict(environment if environment is not None else os.environ)
        self._broad = _LazySession(file, self.run.path / "session.log", self._environment)
        self._replay = _LazySession(file, self.run.path / "replay.log", self._environment)
        self._error: PerfladderError | None = None

    def __enter__(self) -> Self:
        """Start both children: they load while servers start, and nothing is measured before all are ready."""
        self.tell("loading the target")
        try:
            self._broad.begin_load()
            if len(self.rungs) > 1 and self.workload.nproc == 1:
                self._replay.begin_preload()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self.run.record.status == "running":
            is_ours = isinstance(error, PerfladderError)
            # A disk that is full or read-only takes this no more than what failed; that error is on its way.
            with contextlib.suppress(NotPossibleHereError):
                self.run.update(
                    status="failed" if is_ours else "interrupted",
                    ended_at=_now(),
                    exit_code=exit_code_of(error),
                    error=str(error) if is_ours else "interrupted",
                )

    def close(self) -> None:
        """End the children."""
        self._broad.close()
        self._replay.close()

    def wait_until_loaded(self) -> LoadedInfo:
        """Wait for the target.

        Raises:
            PerfladderError: It could not be loaded; the exit code says whose fault it is.
        """
        self._broad.loaded()
        self._replay.finish_preload()
        info = self.info
        if info.description is not None:
            self.tell(f"the call: {info.description}")
        with self.run.writing():
            write_atomically(self.run.path / "environment.json", info.model_dump_json(indent=1))
        sums = Checksums(cache_folder(self._environment))
        self._keys = Keys(self.run, self.file, info.environment, sums, self.tell)
        self._keys.add_sources(self._broad.sources())
        if self._is_resumed:
            self._take_over(self._keys)
        return info

    def _take_over(self, keys: Keys) -> None:
        """Find out which results of the run still hold; the others are forgotten, with all their files."""
        self._kept, reason = keys.holding(self.rungs)
        if reason is not None:
            self.tell(reason)
        skipped = {entry.name for entry in self.run.record.rungs if entry.status == "skipped"}
        # What lies beyond `until` stays, unless something that it rests on is measured anew.
        for rung in self.rungs:
            if rung.name not in self._kept and (rung.name not in skipped or reason is not None):
                self.run.forget_result(rung.name)

    @property
    def info(self) -> LoadedInfo:
        """What the broad session found when it loaded the target."""
        assert self._broad.info is not None, "the target is not loaded yet"
        return self._broad.info

    @property
    def workload(self) -> Workload:
        """The workload that is being run."""
        return self.file.workload

    @property
    def error(self) -> PerfladderError | None:
        """The first that a rung failed with."""
        return self._error

    @contextlib.contextmanager
    def holding_device(self) -> Iterator[None]:
        """Hold the lock of each device that is measured on, always in one order."""
        with contextlib.ExitStack() as locks:
            for name in self.info.lock_names:
                locks.enter_context(device_lock(name, what=f"run {self.run.path}", tell=self.tell))
            yield

    def rungs_to_climb(self) -> Iterator[Rung]:
        """The rungs in order, each after the one before it is climbed; when the first fails, nothing can follow."""
        for rung in self.rungs:
            yield rung
            if rung is RUNGS[0] and self.results[rung.name].status == "failed":
                return

    def climb_rung(self, rung: Rung) -> RungResult:
        """Climb one rung: write its result, then derive the findings. A failure costs this rung only.

        In a run that is gone on with, a result that still holds is taken over instead, and `reused` names its rung.

        Raises:
            NotPossibleHereError: The result cannot be written.
        """
        if (kept := self._kept.pop(rung.name, None)) is not None:
            self.reused.add(rung.name)
            self.tell(f"{rung.name} (rung {rung.number}): taken over, as measured at {kept.started_at}")
            return self._conclude(rung, kept)
        folder = self.run.rung_folder(rung.number, rung.name)
        started_at, start = _now(), time.perf_counter()
        context = self._context(folder)
        skip, estimate = rungs_to_skip(self.findings).get(rung.name), None
        if skip is None:
            estimate = rung.module.estimate(context)
            skip = self._why_not_for_its_cost(rung, estimate)
        what = f"{rung.question} {estimate}" if skip is None else f"skipped. {skip}"
        self.tell(f"{rung.name} (rung {rung.number}): {what}")
        if self._is_resumed and skip is None:
            self._forget_from(rung)
        result = (
            self._attempt(rung, context)
            if skip is None
            else rung.result_type(rung=rung.name, status="skipped", reason=skip)
        )
        result = result.model_copy(
            update={
                "started_at": started_at,
                "estimate": estimate,
                "duration_s": round(time.perf_counter() - start, 3),
                "perfladder_version": self.run.record.perfladder_version,
                "device": self.info.device,
                "environment_fingerprint": self.info.environment.fingerprint,
                "fingerprints": self.info.fingerprints,
            }
        )
        assert self._keys is not None
        for session in (self._broad, self._replay):
            self._keys.add_sources(session.sources())
        key = self._keys.key_of(rung.name)
        self.run.write_result(folder, rung.name, result, result.status, result.reason, key)
        self._conclude(rung, result)
        if result.status == "failed":
            self.tell(f"{rung.name} (rung {rung.number}) failed: {result.reason}")
        return result

    def _forget_from(self, rung: Rung) -> None:
        """What was measured after this rung rests on what it said then, or on its not being there."""
        self._kept.clear()
        for later in RUNGS[RUNGS.index(rung) :]:
            self.run.forget_result(later.name)
        self.run.rung_folder(rung.number, rung.name)

    def _conclude(self, rung: Rung, result: RungResult) -> RungResult:
        self.results[rung.name] = result
        self.findings = collect_findings(self.workload, self.info, self.results, source=self.run.record.workload_source)
        return result

    def finish(self) -> ClimbOutcome:
        """Write the report and the end of the record."""
        from perfladder.report import build_report, write_report

        skipped = rungs_to_skip(self.findings)
        stopped_because = next((skipped[r.name] for r in self.rungs if r.name in skipped), None)
        exit_code = self._exit_code()
        is_anything_measured = any(result.status == "done" for result in self.results.values())
        status: Literal["done", "failed"] = "done" if is_anything_measured else "failed"
        self.run.update(
            status=status,
            ended_at=_now(),
            exit_code=exit_code,
            stopped_because=stopped_because,
            error=str(self._error) if self._error else None,
        )
        with self.run.writing():
            write_report(build_report(self.run.path), self.run.path)
        return ClimbOutcome(
            run_dir=str(self.run.path),
            status=status,
            exit_code=exit_code,
            stopped_because=stopped_because,
            findings=self.findings,
        )

    def _why_not_for_its_cost(self, rung: Rung, estimate: CostEstimate) -> str | None:
        return why_skipped(
            estimate,
            self.workload.budget,
            name=rung.name,
            question=rung.question,
            ask=self._ask,
            asks_always=self._step and rung is not RUNGS[0],
        )

    def _context(self, folder: Path) -> RungContext:
        captured = self.results.get("capture")
        self._replay.only = captured.stage if isinstance(captured, CaptureResult) else None
        return RungContext(
            file=self.file,
            info=self.info,
            broad=self._broad,
            replay=self._replay,
            results=dict(self.results),
            folder=folder,
            tell=self.tell,
            cache_folder=cache_folder(self._environment),
            open_fresh=self._open_fresh,
            free_device=self.close,
        )

    def _attempt(self, rung: Rung, context: RungContext) -> RungResult:
        if self.workload.nproc > 1 and not rung.runs_on_ranks:
            reason = _NOT_ON_RANKS.format(nproc=self.workload.nproc)
            return rung.result_type(rung=rung.name, status="not_applicable", reason=reason)
        try:
            result: RungResult = rung.module.run(context)
            return result
        except PerfladderError as error:
            failure = error
        except Exception as error:  # a fault of ours must not cost the finished rungs
            frame = traceback.extract_tb(error.__traceback__)[-1]
            failure = RungError(f"Internal error, please report it: {error!r} at {frame.filename}:{frame.lineno}")
        self._error = self._error or failure
        return rung.result_type(rung=rung.name, status="failed", reason=str(failure), error_type=type(failure).__name__)

    @contextlib.contextmanager
    def _open_fresh(self, variables: Mapping[str, str]) -> Iterator[Launch]:
        session = _LazySession(self.file, self.run.path / "launches.log", {**self._environment, **variables})
        try:
            yield session
        finally:
            session.close()

    def _exit_code(self) -> int:
        """Nothing measured: the error's own code. Otherwise 5 when a rung failed."""
        failed = [name for name, result in self.results.items() if result.status == "failed"]
        if not failed or self._error is None:
            return 0
        return self._error.exit_code if failed[0] == RUNGS[0].name else RungError.exit_code


def climb(
    workload: str | Path | Workload | WorkloadFile,
    *,
    runs_dir: str | Path = "runs",
    until: str = LAST_RUNG,
    tell: Tell = lambda _: None,
    source: str | None = None,
    ask: Ask | None = None,
    step: bool = False,
    resume: str | Path | None = None,
) -> ClimbOutcome:
    """Climb the ladder with no server: the result is the run directory.

    Args:
        workload: A workload file, a built-in name, or a `Workload` (relative paths then start at the current folder).
        runs_dir: Where the run directory is made.
        until: The last rung to climb.
        tell: Shows one line of progress.
        source: What to call the workload's origin in the record; by default the file or the workload's name.
        ask: Asks the user at a terminal about a rung over budget; None: it is skipped.
        step: Whether to ask before every rung but the first.
        resume: An unfinished run to go on with, in its own folder: a folder, an id, or `latest` of this workload.

    Raises:
        PerfladderError: The workload or the target is wrong, so that nothing could be measured.
    """
    from perfladder.workload import load_workload

    if isinstance(workload, Workload):
        file = WorkloadFile(workload, Path.cwd())
    elif isinstance(workload, WorkloadFile):
        file = workload
    else:
        file, source = load_workload(workload), source or str(workload)
    ladder = Climb(
        file,
        source=file.workload.name if source is None else source,
        runs_dir=Path(runs_dir),
        until=until,
        tell=tell,
        ask=ask,
        step=step,
        resume=None if resume is None else str(resume),
    )
    with contextlib.closing(ladder.run), ladder:
        ladder.wait_until_loaded()
        with ladder.holding_device():
            for rung in ladder.rungs_to_climb():
                ladder.climb_rung(rung)
        return ladder.finish()


def load_results(run: RunDirectory) -> dict[str, RungResult]:
    """Read the results of a run back, in the order they were written."""
    if run.record.kind == "tuning":
        raise InputError(f"{run.path} is a tuning run, not a profile. Its report is report.md there.")
    results: dict[str, RungResult] = {}
    for entry in run.record.rungs:
        rung = rung_named(entry.name)
        results[entry.name] = read_model(run.path / entry.folder / f"{entry.name}.json", rung.result_type)
    return results


def exit_code_of(error: BaseException | None) -> int:
    """The exit code of a command that an error ends."""
    if isinstance(error, PerfladderError):
        return error.exit_code
    if isinstance(number := getattr(error, "signal", None), int):
        return 128 + number  # What Prefect raises where a flow is cancelled.
    return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 130


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
