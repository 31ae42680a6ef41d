"""Prove a tuning: profile, tune, replay what was tuned, profile again, compare in turns, and keep it or not.

Every step leaves its result in the tuning run's folder before the next one begins, with what it rests on. A run that
was ended on the way goes on there. The Prefect flow and the plain, server-less way both call these steps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pydantic import JsonValue

from perfladder import __version__
from perfladder.checksums import Checksums
from perfladder.comparing.runs import LAUNCHES
from perfladder.content_key import SourcesRequest, list_sources
from perfladder.errors import InputError, NotPossibleHereError, PerfladderError, RungError
from perfladder.files import write_atomically
from perfladder.find_runs import find_run
from perfladder.ladder import exit_code_of, rung_named
from perfladder.progress import Progress
from perfladder.resume import Keys
from perfladder.rundir import SETTINGS_FILE, TUNINGS, RunDirectory
from perfladder.rungs.base import RungResult
from perfladder.session import Session
from perfladder.stats import MIN_PAIRS
from perfladder.target import LoadedInfo, LoadRequest, load
from perfladder.tuning.proof_model import (
    ARCHIVE,
    OUTCOME_FILE,
    REPORT_FILE,
    CompareStep,
    ProfileStep,
    ProofOutcome,
    ProofSettings,
    ProofVerdict,
    ReplayStep,
    StepSummary,
    TuneStep,
)
from perfladder.workload import TunedArchive, WorkloadFile

Tell = Callable[[str], None]
Taking = Callable[[Sequence[str]], AbstractContextManager[object]]


@dataclass(frozen=True)
class Step:
    """One step of a proof; without what an essential one finds there is nothing to prove."""

    number: int
    name: str
    question: str
    result_type: type[RungResult]
    is_essential: bool = False


STEPS: Final = (
    Step(1, "profile", "How does the plain workload run?", ProfileStep, is_essential=True),
    Step(2, "tune", "Which backend serves which module best?", TuneStep, is_essential=True),
    Step(3, "replay", "Is what the archive serves right on captured inputs, in a fresh process?", ReplayStep),
    Step(4, "profile-tuned", "How does the tuned workload run?", ProfileStep),
    Step(5, "compare", "Is the whole workload faster, process by process?", CompareStep),
)


class Proof:
    """One tuning run, step by step; a context manager that leaves no process behind.

    Args:
        file: The workload, plain.
        settings: How far, with what, and how much of it.
        source: What the user named, for the record.
        runs_dir: Profiles go there, and the tuning run to `tunings` in it.
        tell: Shows one line of progress.
        on_progress: Receives how far a step is.
        taking: Takes devices, by the names of their locks, where others share them beyond this machine.
        resume: An unfinished tuning run to go on with: a folder, an id, or `latest` of this workload.
        cache: Where the sums of large files are kept from run to run; None keeps none.

    Raises:
        InputError: A setting makes no sense, or the run to go on with is finished, in use, or not there.
        NotPossibleHereError: The workload has several ranks.
    """

    def __init__(
        self,
        file: WorkloadFile,
        settings: ProofSettings,
        *,
        source: str,
        runs_dir: Path,
        tell: Tell = lambda _: None,
        on_progress: Callable[[Progress], None] = lambda _: None,
        taking: Taking = lambda _: contextlib.nullcontext(),
        resume: str | None = None,
        cache: Path | None = None,
    ) -> None:
        _check(file, settings)
        self.file, self.settings, self.runs_dir = file, settings, runs_dir
        self.tell, self.on_progress, self.taking = tell, on_progress, taking
        self.results: dict[str, RungResult] = {}
        self.reused: set[str] = set()
        self.info: LoadedInfo | None = None
        self._kept: dict[str, RungResult] = {}
        self._keys: Keys | None = None
        self._is_resumed = resume is not None
        self._sums = Checksums(cache)
        root = runs_dir / TUNINGS
        if resume is None:
            self.run = RunDirectory.create(root, file.workload, source=source, base_dir=file.base_dir, kind="tuning")
        else:
            found = find_run(resume, root, workload_name=file.workload.name, needs_results=False)
            self.run = RunDirectory.resume(found, file.workload, kind="tuning")
            tell(f"going on with tuning run {self.run.record.run_id}")
        with self.run.writing():
            write_atomically(self.run.path / SETTINGS_FILE, settings.model_dump_json(indent=1))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.run.record.status == "running":
            is_ours = isinstance(error, PerfladderError)
            with contextlib.suppress(NotPossibleHereError):
                self.run.update(
                    status="failed" if is_ours else "interrupted",
                    ended_at=_now(),
                    exit_code=exit_code_of(error),
                    error=str(error) if is_ours else "interrupted",
                )
        self.run.close()

    def do(self, step: Step) -> RungResult:
        """Do one step, in the order of `STEPS`, and write its result; one that still holds is taken over instead.

        Raises:
            PerfladderError: An essential step failed, so that there is nothing to prove.
        """
        if self._is_resumed and self._keys is None:
            self._take_over()
        if (kept := self._kept.pop(step.name, None)) is not None:
            self.reused.add(step.name)
            self.tell(f"{step.number} {step.name}: taken over, as done at {kept.started_at}")
            return self._conclude(step, kept)
        self._forget_from(step)
        folder = self.run.rung_folder(step.number, step.name)
        started_at, start = _now(), time.perf_counter()
        error: PerfladderError | None = None
        if (skip := self._why_skipped()) is not None:
            self.tell(f"{step.number} {step.name}: skipped. {skip}")
            result = step.result_type(rung=step.name, status="skipped", reason=skip)
        else:
            self.tell(f"{step.number} {step.name}: {step.question}")
            try:
                result = self._attempt(step, folder)
            except PerfladderError as failure:
                error = failure
                result = step.result_type(
                    rung=step.name, status="failed", reason=str(error), error_type=type(error).__name__
                )
        facts = {"started_at": started_at, "duration_s": round(time.perf_counter() - start, 3)}
        facts |= {"perfladder_version": __version__, "device": self.info.device if self.info else None}
        result = result.model_copy(update={**facts, "rung": step.name})
        key = self._keys.key_of(step.name) if self._keys is not None and result.status == "done" else None
        self.run.write_result(folder, step.name, result, result.status, result.reason, key)
        if error is not None and step.is_essential:
            raise error
        return self._conclude(step, result)

    def finish(self) -> ProofOutcome:
        """Keep what was tuned or not, copy the archive where it was asked for, and write report and record."""
        verdict, reason = self._verdict()
        failed = any(result.status == "failed" for result in self.results.values())
        outcome = self._outcome(verdict, reason, RungError.exit_code if failed else 0)
        self._write(outcome)
        self.run.update(status="done", ended_at=_now(), exit_code=outcome.exit_code, error=None)
        self.tell(f"{verdict}: {reason}")
        return outcome

    def _conclude(self, step: Step, result: RungResult) -> RungResult:
        self.results[step.name] = result
        return result

    def _attempt(self, step: Step, folder: Path) -> RungResult:
        from perfladder.tuning import proof_steps

        function = getattr(proof_steps, step.name.replace("-", "_"))
        with contextlib.ExitStack() as stack:
            if self.info is not None:
                stack.enter_context(self.taking(self.info.lock_names))
            result: RungResult = function(self, folder)
        return result

    def _forget_from(self, step: Step) -> None:
        """What was done after this step rests on what it found then."""
        self._kept.clear()
        for later in STEPS[STEPS.index(step) :]:
            self.run.forget_result(later.name)

    def _why_skipped(self) -> str | None:
        """Why nothing more is to be measured: it is decided already."""
        tuned, replayed = self.results.get("tune"), self.results.get("replay")
        if isinstance(tuned, TuneStep) and tuned.archive_sha256 is None:
            return "The tuning found nothing to prove."
        if isinstance(replayed, ReplayStep) and replayed.status == "done" and replayed.why_not_right:
            return "What the archive serves is not right."
        if any(result.status == "failed" for result in self.results.values()):
            return "A step before it failed."
        return None

    def _verdict(self) -> tuple[ProofVerdict, str]:
        for name, result in self.results.items():
            if result.status == "failed":
                return "rejected", f"It is not proven: step {name} failed. {result.reason}"
        tuned, replayed, compared = (self.results[name] for name in ("tune", "replay", "compare"))
        assert isinstance(tuned, TuneStep)
        assert isinstance(replayed, ReplayStep)
        assert isinstance(compared, CompareStep)
        if tuned.archive_sha256 is None:
            return "rejected", _why_nothing(tuned)
        if (why := replayed.why_not_right) is not None:
            return "rejected", why
        return judge(self.settings.tune.keep, compared)

    def _outcome(self, verdict: ProofVerdict, reason: str, exit_code: int) -> ProofOutcome:
        tuned, compared = self.results["tune"], self.results["compare"]
        assert isinstance(tuned, TuneStep)
        assert isinstance(compared, CompareStep)
        is_kept = verdict == "kept"
        return ProofOutcome(
            run_dir=str(self.run.path),
            run_id=self.run.record.run_id,
            workload=self.file.workload.name,
            device=self.info.device if self.info else None,
            status="done",
            exit_code=exit_code,
            verdict=verdict,
            reason=reason,
            speedup=compared.speedup,
            interval=compared.interval,
            modules={**chosen_of(tuned), **_schedulers_of(tuned)},
            archive=self.run.relative(self.archive) if is_kept else None,
            archive_sha256=tuned.archive_sha256,
            saved_to=self._copy_archive() if is_kept else None,
            plain_run=self.run.record.profile_runs.get("profile"),
            tuned_run=self.run.record.profile_runs.get("profile-tuned"),
            steps=[
                StepSummary(
                    name=name,
                    status=result.status,
                    reason=result.reason,
                    duration_s=result.duration_s,
                    is_reused=name in self.reused,
                )
                for name, result in self.results.items()
            ],
        )

    def _write(self, outcome: ProofOutcome) -> None:
        from perfladder.report import render_proof

        with self.run.writing():
            write_atomically(self.run.path / OUTCOME_FILE, outcome.model_dump_json(indent=1))
            write_atomically(self.run.path / REPORT_FILE, render_proof(outcome, self.results))

    def _copy_archive(self) -> str | None:
        """Put what is kept where it was asked for, with its sums."""
        if self.settings.tune.save is None:
            return None
        from perfladder.tuning.archive_format import SUMS_ENDING
        from perfladder.tuning.archive_names import archive_path

        target = archive_path(self.settings.tune.save)
        sums = self.archive.with_name(f"{self.archive.stem}{SUMS_ENDING}")
        try:
            for origin, path in ((self.archive, target), (sums, target.with_name(f"{target.stem}{SUMS_ENDING}"))):
                part = path.with_name(f".{path.name}.part")
                shutil.copyfile(origin, part)
                os.replace(part, path)
        except OSError as error:
            raise NotPossibleHereError(
                f"--save {target} cannot be written: {error.strerror}. The archive is kept: {self.archive}"
            ) from error
        return str(target)

    @property
    def archive(self) -> Path:
        """Where the tuning writes its archive."""
        return self.run.path / f"{STEPS[1].number}-{STEPS[1].name}" / ARCHIVE

    @property
    def tuned_file(self) -> WorkloadFile:
        """The same work, with the archive's modules in place; the archive is this run's own, as its sum tells."""
        tuned = self.results["tune"]
        assert isinstance(tuned, TuneStep)
        archive = TunedArchive(archive=str(self.archive), sha256=tuned.archive_sha256, trust=True)
        return WorkloadFile(self.file.workload.model_copy(update={"tuned": archive}), self.file.base_dir)

    def note_loaded(self, info: LoadedInfo, files: Mapping[str, str]) -> None:
        """What every later step's key rests on: the machine, and the files that the target has loaded."""
        self.info = info
        with self.run.writing():
            write_atomically(self.run.path / "environment.json", info.model_dump_json(indent=1))
        settings = _settings_of_steps(self.settings)
        self._keys = Keys(self.run, self.file, info.environment, self._sums, self.tell, settings)
        self._keys.add_sources(files)

    def _take_over(self) -> None:
        """Find out which results of the run still hold, by loading the target as it is now."""
        self.tell("loading the target, to see which steps still hold")
        limit_s = self.file.workload.timeout_s
        with Session(self.file, log_path=self.run.path / "session.log", environment=None) as session:
            info = session.call(load, LoadRequest(), timeout_s=limit_s)
            files = session.call(list_sources, SourcesRequest(), timeout_s=limit_s).files
        self.note_loaded(info, files)
        assert self._keys is not None
        self._kept, reason = self._keys.holding(STEPS)
        if reason is not None:
            self.tell(reason)


def prove(proof: Proof) -> ProofOutcome:
    """Do all steps, with no server."""
    with proof:
        for step in STEPS:
            proof.do(step)
        return proof.finish()


def judge(keep: str | float, compared: CompareStep) -> tuple[ProofVerdict, str]:
    """Whether a tuning that is right is kept, and why.

    Args:
        keep: `faster`, `right`, or the least speedup.
        compared: Of the whole workload.
    """
    why = compared.verdict_reason or ""
    if keep == "right":
        return "kept", f"What the archive serves is right, and any speed was accepted. {why}"
    if isinstance(keep, str):
        return ("kept" if compared.verdict == "faster" else "rejected"), why
    low = compared.interval.low if compared.interval is not None else 0.0
    if low >= keep:
        return "kept", why
    return "rejected", f"A speedup of {keep:g} or more was asked for. {why}"


def chosen_of(tuned: TuneStep) -> dict[str, str]:
    """What serves each module instead of the plain one, by the module's path."""
    if tuned.tuning is None:
        return {}
    found = {
        module.path: [graph.selected for graph in module.graphs if graph.selected not in (None, "eager")]
        for module in tuned.tuning.modules
        if module.error is None
    }
    return {path: ", ".join(dict.fromkeys(map(str, names))) for path, names in found.items() if names}


def _schedulers_of(tuned: TuneStep) -> dict[str, str]:
    """What was kept of schedulers, which only the whole output and the whole time speak of."""
    if tuned.tuning is None:
        return {}
    return {one.path: "timesteps from the host" for one in tuned.tuning.schedulers if one.status == "kept"}


def _check(file: WorkloadFile, settings: ProofSettings) -> None:
    rung_named(settings.until)
    if settings.tune.dry_run:
        raise InputError("--dry-run builds nothing that could be proven; leave it or --prove out.")
    if file.workload.nproc > 1:
        raise NotPossibleHereError("nproc: tuning runs in one process; set it to 1, as with --set nproc=1.")
    if file.workload.tuned is not None or file.workload.compile is not None:
        name = "tuned" if file.workload.tuned is not None else "compile"
        raise InputError(
            f"{name}: the workload must be plain, since that is what the tuned one is compared with. Leave it out, as "
            f"with --set {name}=null."
        )
    num_pairs = settings.pairs * (settings.launches or file.workload.launches or LAUNCHES)
    if num_pairs < MIN_PAIRS:
        raise InputError(f"pairs is {settings.pairs}; a verdict needs at least {MIN_PAIRS} pairs of runs in all.")


def _why_nothing(tuned: TuneStep) -> str:
    """Why there is no archive, with what is said of the first module that could not be tuned."""
    assert tuned.tuning is not None, "it is done"
    errors = [f"{module.path or 'the target'}: {module.error}" for module in tuned.tuning.modules if module.error]
    return " ".join([tuned.tuning.reason, *errors[:1]])


def _settings_of_steps(settings: ProofSettings) -> Mapping[str, JsonValue]:
    """What each step's result rests on besides the workload and the steps before it."""
    asked = settings.model_dump(mode="json")
    tuning = {name: value for name, value in asked["tune"].items() if name != "save"}
    compared = {name: asked[name] for name in ("pairs", "launches", "min_effect")}
    return {
        "profile": asked["until"],
        "tune": tuning,
        "replay": {"pairs": tuning["pairs"], "quality": tuning["quality"]},
        "profile-tuned": asked["until"],
        "compare": compared,
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
